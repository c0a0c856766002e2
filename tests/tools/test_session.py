"""Both sides of a session in one process, on the simulated fabric."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transfer_engine.tools import protocol, sweep
from transfer_engine.tools.loopback import run_sweep
from transfer_engine.tools.results import Exit, TransportResult
from transfer_engine.tools.session import Session, await_client, open_session, serve_client
from transfer_engine.tools.sweep import Case, Row

import transfer_engine as te

SOON_S = 20.0
ROWS = [
    Row((Case("write", 0, seed=1), Case("write", 257, source_offset=1, seed=2))),
    Row((Case("write", 4096, 5, target_offset=3, seed=3),)),
    Row((Case("batch", 0, 9, growth_bytes=33, seed=4),)),
    Row((Case("pages", 100, 20, source_stride=103, target_stride=113, index_bytes=4, seed=5),)),
    Row((Case("message", 0, 7, growth_bytes=999, seed=6),)),
]


@pytest.fixture(params=[1, 3], ids=["one_nic", "three_nics"])
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[te.Engine, te.Engine]]:
    settings = te.Settings(core="none")
    with (
        te.Engine("sim", nics=request.param, settings=settings) as one,
        te.Engine("sim", nics=request.param, settings=settings) as other,
    ):
        yield one, other


@contextmanager
def serving(engine: te.Engine) -> Iterator[list[bool]]:
    stop = threading.Event()
    outcomes: list[bool] = []

    def serve() -> None:
        found = await_client(engine, lambda: not stop.is_set())
        if found is not None:
            outcomes.append(serve_client(engine, *found))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield outcomes
    finally:
        stop.set()
        thread.join(SOON_S)
        assert not thread.is_alive()


@contextmanager
def session_of(engines: tuple[te.Engine, te.Engine], flip: str | None = None) -> Iterator[Session]:
    one, other = engines
    source, target = sweep.buffer_bytes(ROWS)
    with (
        serving(other) as outcomes,
        open_session(
            one, other.address, source_bytes=source, target_bytes=target, timeout_s=SOON_S, flip=flip
        ) as session,
    ):
        yield session
    assert outcomes == [True]


def swept(session: Session) -> TransportResult:
    result = TransportResult("sim")
    run_sweep(session, ROWS, result, measure_s=0.001, progress=lambda _text, _finished: None)
    return result


def test_every_case_is_verified_in_both_directions(engines: Any) -> None:
    with session_of(engines) as session:
        result = swept(session)
    assert result.status == Exit.OK
    assert result.mismatches == []
    cases = [case for row in ROWS for case in row.cases]
    assert sum(row.verified_operations for row in result.rows) == 2 * sum(case.count for case in cases)
    assert sum(row.verified_bytes for row in result.rows) == 2 * sum(case.payload_bytes for case in cases)
    assert all(set(row.measured) == {"outgoing", "incoming"} for row in result.rows)


@pytest.mark.parametrize("flip", [*sweep.OPERATIONS, "guard"])
def test_a_flipped_byte_is_found_and_located(engines: Any, flip: str) -> None:
    with session_of(engines, flip) as session:
        result = swept(session)
    assert result.status == Exit.WRONG_BYTES
    assert [row.wrong for row in result.rows].count(1) == 1
    [mismatch] = result.mismatches
    assert mismatch.direction == "outgoing"
    assert mismatch.wrong_bytes == 1
    assert mismatch.expected is not None
    assert mismatch.actual is not None
    assert int(mismatch.expected[:2], 16) ^ int(mismatch.actual[:2], 16) == 1
    assert mismatch.expected[2:] == mismatch.actual[2:]
    if flip == "guard":
        assert mismatch.where == "guard bytes"
    else:
        assert mismatch.case["operation"] == flip


def test_a_source_that_changes_is_found(engines: Any) -> None:
    case = Case("write", 1000, seed=9)
    with session_of(engines) as session:
        session.together(True, "load", "prepare", case)
        session.local._source_bytes[999] ^= 1
        sent, received = session.together(True, "transmit", "verify", case)
    assert sent["mismatch"]["offset"] == 999
    assert "source" in sent["mismatch"]["where"]
    assert received["mismatch"]["offset"] == 999


def test_a_byte_beside_the_target_is_found(engines: Any) -> None:
    case = Case("write", 10, seed=9)
    with session_of(engines) as session:
        session.together(False, "load", "prepare", case)
        at = sweep.pieces(case)[0].target + 10
        session.local._target_bytes[at] ^= 0x80
        _, received = session.together(False, "transmit", "verify", case)
    assert received["mismatch"]["where"] == "guard bytes"
    assert received["mismatch"]["buffer_offset"] == at


def test_a_count_without_its_write_is_found(engines: Any) -> None:
    """An arrival that nobody sent: the receiver counts one too many, and says so at the latest in the next rounds."""
    one, other = engines
    case = Case("write", 10, seed=9)
    with session_of(engines) as session:
        session.together(False, "load", "prepare", case)
        counter = session.local._counter
        nothing = te.RegionDescriptor.from_bytes(bytes(one.register(bytearray(1)).descriptor))[0:0]
        other.write(other.register(bytearray(1))[0:0], nothing, notify=counter.descriptor).wait(SOON_S)
        counter.wait(1, timeout_s=SOON_S)
        found = [session.together(False, "transmit", "verify", case)[1]["mismatch"]]
        for _ in range(4):
            session.together(False, "load", "prepare", case)
            found.append(session.together(False, "transmit", "verify", case)[1]["mismatch"])
    assert any(mismatch is not None and "too many" in mismatch["where"] for mismatch in found)


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        ({"do": "erase", "case": Case("write", 1).to_dict(), "rounds": 1}, "ValueError"),
        ({"do": "close", "case": Case("write", 1).to_dict(), "rounds": 1}, "ValueError"),
        ({"do": "load", "case": {"operation": "write"}, "rounds": 1}, "TypeError"),
        ({"do": "load", "case": Case("write", 1 << 40).to_dict(), "rounds": 1}, "ValueError"),
        ({"do": "load"}, "KeyError"),
    ],
)
def test_a_wrong_request_is_answered_and_the_session_goes_on(engines: Any, request_: Any, kind: str) -> None:
    with session_of(engines) as session:
        session._channel.send(request_, timeout_s=SOON_S)
        with pytest.raises(protocol.RemoteFailure, match=kind) as caught:
            protocol.result_of(session._channel.receive(timeout_s=SOON_S))
        assert caught.value.kind == kind
        session.together(True, "load", "prepare", ROWS[0].head)


@pytest.mark.parametrize(
    "change",
    [{"hello": 99}, {"source_bytes": -1}, {"target_bytes": 1 << 50}, {"offer": {}}, {"offer": {"region": "AAAA"}}],
)
def test_a_wrong_greeting_is_refused_with_a_reason(engines: Any, change: dict[str, Any]) -> None:
    one, other = engines
    hello = {"hello": protocol.VERSION, "source_bytes": 9, "target_bytes": 9, "timeout_s": 5, "offer": {}, **change}
    with serving(other) as outcomes:
        channel = protocol.Channel(one, other.address)
        channel.send(hello, timeout_s=SOON_S)
        with pytest.raises(protocol.RemoteFailure):
            protocol.result_of(channel.receive(timeout_s=SOON_S))
    assert outcomes == [False]


def test_a_second_client_is_turned_away(engines: Any) -> None:
    with session_of(engines) as session, te.Engine("sim") as third:
        channel = protocol.Channel(third, engines[1].address)
        channel.send({"hello": protocol.VERSION}, timeout_s=SOON_S)
        with pytest.raises(protocol.RemoteFailure, match="Busy"):
            protocol.result_of(channel.receive(timeout_s=SOON_S))
        session.together(True, "load", "prepare", ROWS[0].head)


def test_silence_ends_in_a_time_out(engines: Any) -> None:
    one, other = engines
    with pytest.raises(te.TransferTimeout, match=r"said nothing for 0\.3 s"):
        protocol.Channel(one, other.address).receive(timeout_s=0.3)


def test_a_closed_peer_ends_the_wait(engines: Any) -> None:
    one, other = engines
    channel = protocol.Channel(one, other.address)
    channel.send({}, timeout_s=SOON_S)
    other.close()
    with pytest.raises(te.PeerLost):
        channel.receive(timeout_s=SOON_S)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]", b"17", b"{"])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.decode(data)


def test_the_check_of_the_other_process_ends_a_wait(engines: Any) -> None:
    def gone() -> None:
        raise ChildProcessError

    check: Callable[[], None] = gone
    one, other = engines
    with pytest.raises(ChildProcessError):
        protocol.Channel(one, other.address, check).receive(timeout_s=SOON_S)
