from __future__ import annotations

import threading
from typing import Any

import pytest

import transfer_engine as te

SOON_S = 20.0


def test_a_new_counter_is_zero_and_has_reached_it(engine: te.Engine) -> None:
    counter = engine.counter()
    assert counter.value == 0
    assert counter.wait(0, timeout_s=0) == 0


def test_a_timeout_tells_got_and_expected(pair: Any) -> None:
    for _ in range(2):
        pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify).wait(SOON_S)
    pair.counter.wait(2, timeout_s=SOON_S)
    with pytest.raises(te.TransferTimeout, match="2/3"):
        pair.counter.wait(3, timeout_s=0.01)
    with pytest.raises(te.TransferTimeout, match="2/3"):
        pair.counter.reached(3, timeout_s=0.01).wait(SOON_S)


def test_early_arrivals_and_overshoot_lose_nothing(pair: Any) -> None:
    for _ in range(5):
        pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify)
    pair.counter.wait(5, timeout_s=SOON_S)
    assert pair.counter.wait(3, timeout_s=0) == 5
    assert pair.counter.reached(3).result(SOON_S) == 5


def test_a_wait_ends_when_the_value_is_reached(pair: Any) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(pair.counter.wait(2, timeout_s=SOON_S)))
    thread.start()
    for _ in range(2):
        pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify)
    thread.join(SOON_S)
    assert seen == [2]


async def test_reached_can_be_awaited(pair: Any) -> None:
    arrival = pair.counter.reached(2)
    assert not arrival.done()
    for _ in range(2):
        pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify)
    assert await arrival == 2


def test_arrivals_beyond_64_bits_are_refused(engine: te.Engine) -> None:
    counter = engine.counter()
    for wrong in (-1, 1 << 64):
        with pytest.raises(te.ArgumentError):
            counter.wait(wrong, timeout_s=0)
    for wrong_type in (1.5, "3", None):
        with pytest.raises(TypeError):
            counter.wait(wrong_type, timeout_s=0)  # type: ignore[arg-type]


def test_the_loss_of_a_named_peer_ends_the_wait(pair: Any) -> None:
    pair.a.connect(pair.b.address).wait(SOON_S)
    pair.b.connect(pair.a.address).wait(SOON_S)
    arrival = pair.counter.reached(1, timeout_s=SOON_S, peers=[pair.a.address])
    pair.a.close()
    with pytest.raises(te.PeerError):
        pair.counter.wait(1, timeout_s=SOON_S, peers=[bytes(pair.a.address)])
    with pytest.raises(te.PeerError):
        arrival.wait(SOON_S)


def test_a_closed_counter_is_refused(pair: Any) -> None:
    pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify).wait(SOON_S)
    with pair.counter:
        pass
    pair.counter.close()
    for call in (lambda: pair.counter.value, lambda: pair.counter.wait(5), lambda: pair.counter.reached(5)):
        with pytest.raises(te.EngineClosed) as caught:
            call()
        assert "this counter was closed" in caught.value.hint
    with pytest.raises(te.TransferEngineError):
        pair.a.write(pair.region[:8], pair.remote[8:16], notify=pair.notify).wait(SOON_S)
    pair.assert_only(0, pair.source[:8])


def test_closing_the_engine_ends_a_wait(pair: Any) -> None:
    started = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        started.set()
        try:
            pair.counter.wait(1, timeout_s=60)
        except te.TransferEngineError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert started.wait(SOON_S)
    pair.b.close()
    thread.join(SOON_S)
    assert [type(error) for error in errors] == [te.EngineClosed]


def test_a_single_peer_may_be_named_in_any_form(pair: Any) -> None:
    peer = pair.b.connect(pair.a.address)
    peer.wait(SOON_S)
    pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify)
    for one in (peer, pair.a.address, bytes(pair.a.address), str(pair.a.address)):
        assert pair.counter.wait(1, timeout_s=SOON_S, peers=one) == 1
        assert pair.counter.reached(1, timeout_s=SOON_S, peers=one).result() == 1


@pytest.mark.parametrize("wrong", [5, [5], "text", b"bytes", ["text"], object()])
def test_what_names_no_peer_is_refused(engine: te.Engine, wrong: Any) -> None:
    counter = engine.counter()
    for call in (counter.wait, counter.reached):
        with pytest.raises((te.ArgumentTypeError, te.DescriptorError)):
            call(1, timeout_s=0, peers=wrong)
