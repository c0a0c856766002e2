"""The messages: what is written is read, and what is foreign is refused with the one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_engine.rendezvous import wire
from transfer_engine.rendezvous.wire import Answer, Ask, Hello, Presence, Refusal, Reply, Request, WireError

KEYS = st.text(min_size=1, max_size=40).filter(lambda text: 0 < len(text.encode("utf-8", "replace")) <= 1024)
SAFE_KEYS = KEYS.filter(lambda text: text.encode("utf-8", "replace").decode() == text)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    kind = draw(st.sampled_from(Request))
    least, most = {Request.WHO: (0, 0), Request.BYE: (0, 0)}.get(
        kind, (1, 5) if kind in (Request.GET, Request.WAIT, Request.CHECK) else (1, 1)
    )
    keys = tuple(draw(st.lists(SAFE_KEYS, min_size=least, max_size=most)))
    value = draw(st.binary(max_size=100)) if kind is Request.SET else b""
    number = draw(st.integers(-(1 << 63), (1 << 63) - 1))
    return Ask(kind, keys, value, number, draw(st.integers(0, 1 << 31)) / 1000)


ANSWERS = st.one_of(
    st.sampled_from((Answer(Reply.DONE), Answer(Reply.LATE), Answer(Reply.WELCOME))),
    st.builds(lambda values: Answer(Reply.VALUES, values=tuple(values)), st.lists(st.binary(max_size=50), max_size=9)),
    st.builds(lambda number: Answer(Reply.NUMBER, number=number), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.builds(lambda flags: Answer(Reply.FLAGS, flags=tuple(flags)), st.lists(st.booleans(), max_size=20)),
    st.builds(
        lambda ranks: Answer(Reply.RANKS, ranks=tuple(ranks)),
        st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(Presence), st.integers(0, 10**6).map(float))),
    ),
)


@given(asks())
def test_requests_round_trip(ask: Ask) -> None:
    assert wire.decode_ask(wire.encode_ask(ask)) == ask


@given(ANSWERS)
def test_answers_round_trip(answer: Answer) -> None:
    assert wire.decode_answer(wire.encode_answer(answer)) == answer


@given(SAFE_KEYS, st.integers(1, 1 << 20), st.binary(min_size=32, max_size=32), st.booleans(), st.data())
def test_greetings_round_trip(job: str, world: int, nonce: bytes, authenticated: bool, data: st.DataObject) -> None:
    hello = Hello(job, data.draw(st.integers(0, world - 1)), world, nonce, authenticated)
    assert wire.decode_hello(hello.encode()) == hello


def test_refusals_and_challenges_round_trip() -> None:
    refused = wire.decode_answer(wire.encode_refused(Refusal.RANK_TAKEN, "rank 3 is connected already"))
    assert (refused.refusal, refused.text) == (Refusal.RANK_TAKEN, "rank 3 is connected already")
    challenge = wire.decode_answer(wire.encode_challenge(b"n" * 32, b"p" * 32))
    assert (challenge.nonce, challenge.proof) == (b"n" * 32, b"p" * 32)
    assert wire.decode_answer(wire.encode_challenge(b"n" * 32, b"")).proof == b""


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_the_one_error(body: bytes) -> None:
    for decode in (wire.decode_ask, wire.decode_answer, wire.decode_hello):
        try:
            decode(body)
        except WireError:
            continue


@given(asks(), st.data())
def test_damaged_requests_are_a_request_or_the_one_error(ask: Ask, data: st.DataObject) -> None:
    body = bytearray(wire.encode_ask(ask))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    try:
        found = wire.decode_ask(bytes(body))
    except WireError:
        return
    assert len(found.keys) <= wire.MOST_KEYS
    assert all(found.keys)


@given(ANSWERS, st.data())
def test_cut_answers_are_refused_or_shorter_ones(answer: Answer, data: st.DataObject) -> None:
    body = wire.encode_answer(answer)
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    with pytest.raises(WireError):
        wire.decode_answer(cut)


@pytest.mark.parametrize(
    "body",
    [
        wire.encode_ask(Ask(Request.SET, ())),
        wire.encode_ask(Ask(Request.SET, ("a", "b"), b"x")),
        wire.encode_ask(Ask(Request.GET, ())),
        wire.encode_ask(Ask(Request.WHO, ("a",))),
        wire.encode_ask(Ask(Request.GET, ("a",), b"value")),
        wire.encode_ask(Ask(Request.SET, ("k" * 1025,), b"x")),
        wire.encode_ask(Ask(Request.SET, ("",), b"x")),
        wire.encode_ask(Ask(Request.SET, ("k",), bytes(wire.MOST_VALUE_BYTES + 1))),
        b"\x02" + bytes(12) + b"\xff\xff\xff\xff",
    ],
)
def test_requests_that_nobody_may_make_are_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_ask(body)


@pytest.mark.parametrize("length", [0, 4097, 1 << 31])
def test_lengths_are_bounded_before_memory_is_taken(length: int) -> None:
    with pytest.raises(WireError, match=str(length)):
        wire.body_length(length.to_bytes(4, "big"), wire.MOST_HANDSHAKE_BYTES)
