"""Deadlines, cancel, quiescence and fences: an end in time, and the truth about what may still land."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import POISON, SLOWNESS, SOON_S, Child, Link, Rig, eventually, on

# Where a network, or a peer, can be made to stand still: the simulated fabric holds bytes back; elsewhere the peer's
# process is stopped.
on_standstill = pytest.mark.cases(
    [*on(nics=(1, 3), faults=True).mark.args[0], *on(nics=(2,), apart=True, transports=("tcp", "rxe")).mark.args[0]]
)


class Still:
    """A link whose bytes or answers can be held back."""

    def __init__(self, rig: Rig) -> None:
        # A small window, so that a peer that does not answer is soon in the way of more writes.
        settings = {"shard_bytes": 1000, "peer_timeout_s": SOON_S, "immediate_window": 8, "assembly_slots": 4}
        rig.set_up(**settings)
        self.rig = rig
        self.child: Child | None = rig.spawn() if rig.case.apart else None
        self.far = rig.another_far(self.child, **settings)
        self.link: Link = rig.link(60_000, far=self.far)
        self.link.write(0, 0, 60_000).wait(SOON_S)
        self.link.wait(1)
        self.link.poison()
        self.held = False

    def hold(self) -> None:
        self.held = True
        if self.child is None:
            self.rig.near._inject("pause")
        else:
            self.child.stop()

    def release(self) -> None:
        if not self.held:
            return
        self.held = False
        if self.child is None:
            self.rig.near._inject("resume")
        else:
            self.child.resume()

    def stuck(self, **arguments: Any) -> list[te.Transfer]:
        """Enough writes that some of them cannot end while the peer stands still."""
        return [self.link.write(0, 0, 60_000, **arguments) for _ in range(60)]


@pytest.fixture
def still(rig: Rig) -> Iterator[Still]:
    made = Still(rig)
    yield made
    made.release()


@on_standstill
def test_a_deadline_ends_what_cannot_end_by_itself(still: Still) -> None:
    still.hold()
    begin = time.monotonic()
    transfers = still.stuck(timeout_s=0.3)
    failures = [transfer.exception(SOON_S) for transfer in transfers]
    assert 0.3 <= time.monotonic() - begin < 3 * SLOWNESS
    timed_out = [failure for failure in failures if failure is not None]
    assert timed_out
    for failure in timed_out:
        assert isinstance(failure, te.TransferTimeout)
        assert failure.peer == str(still.link.remote.address)
        assert failure.elapsed_s is not None
        assert failure.elapsed_s >= 0.3


@on_standstill
@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_once_it_is_quiesced_nothing_of_an_ended_transfer_lands_and_counts_stay_right(still: Still, how: str) -> None:
    link = still.link
    still.hold()
    transfers = still.stuck(timeout_s=0.2 if how == "deadline" else SOON_S)
    if how == "cancel":
        for transfer in transfers:
            transfer.cancel()
    failures = [transfer.exception(SOON_S) for transfer in transfers]
    expected = te.TransferTimeout if how == "deadline" else te.TransferCancelled
    assert any(failures)
    assert all(isinstance(failure, expected | None) for failure in failures)
    claimed = [transfer.quiesced for transfer in transfers]
    if link.near.describe()["delivery_complete"]:
        in_flight = sum(nic["in_flight"] for nic in link.near.stats()["nics"].values())
        assert not in_flight or not all(claimed)
    still.release()
    for transfer in transfers:
        transfer.wait_quiesced(SOON_S)
        assert transfer.quiesced
    link.poison()
    good = 1 + failures.count(None)
    other = still.rig.link(60_000, far=still.far)
    for _ in range(20):
        other.write(0, 0, 60_000).wait(SOON_S)
    assert other.wait(20) == 20
    other.check([(0, 0, 60_000)], 20)
    link.check([])  # nothing has landed since
    assert good <= link.wait(good) <= 61
    before = link.value
    for i in range(1, 11):
        link.write(0, 0, 60_000).wait(SOON_S)
        assert link.wait(before + i) <= before + i
    link.check([(0, 0, 60_000)])


@on(nics=(1, 3), faults=True)
def test_quiescence_is_not_claimed_while_bytes_may_still_land(rig: Rig) -> None:
    still = Still(rig)
    still.hold()
    transfer = still.link.write(0, 0, 60_000, timeout_s=0.05)
    assert isinstance(transfer.exception(SOON_S), te.TransferTimeout)
    assert not transfer.quiesced
    with pytest.raises(te.TransferTimeout, match="may still land"):
        transfer.wait_quiesced(0.05)
    still.release()
    transfer.wait_quiesced(SOON_S)
    assert transfer.quiesced


@on(nics=(2,))
def test_what_ended_well_is_quiesced(rig: Rig) -> None:
    link = rig.link(100_000)
    transfer = link.write(0, 0, 100_000)
    transfer.wait(SOON_S)
    transfer.wait_quiesced(SOON_S)
    assert transfer.quiesced
    transfer.cancel()
    assert transfer.exception() is None


@on(nics=(2,))
def test_a_deadline_of_zero_still_ends_the_transfer_once(rig: Rig) -> None:
    link = rig.link(10_000)
    link.write(0, 0, 1).wait(SOON_S)
    link.wait(1)
    good = 0
    for _ in range(50):
        transfer = link.write(0, 0, 10_000, timeout_s=0)
        failure = transfer.exception(SOON_S)
        assert isinstance(failure, te.TransferTimeout | None)
        transfer.wait_quiesced(SOON_S)
        good += failure is None
    assert 1 + good <= link.wait(1 + good) <= 51


@on(nics=(2,))
def test_hundreds_of_cancelled_transfers_leave_everything_in_order(rig: Rig) -> None:
    rig.clean = False  # notifications of cancelled writes may come too late to mean anything
    rig.set_up(shard_bytes=1000, assembly_slots=3, immediate_window=8)
    link = rig.link(20_000)
    random = np.random.default_rng(9)
    good = cancelled = 0
    for _ in range(15):
        transfers = []
        for _ in range(20):
            transfers.append(link.write(0, 0, int(random.integers(0, 20_000))))
            if random.random() < 0.4:
                transfers[int(random.integers(len(transfers)))].cancel()
        for transfer in transfers:
            failure = transfer.exception(SOON_S)
            assert isinstance(failure, te.TransferCancelled | None)
            transfer.wait_quiesced(SOON_S)
            good += failure is None
            cancelled += failure is not None
    assert good <= link.wait(good) <= good + cancelled
    fresh = rig.link(20_000)
    for i in range(20):
        fresh.write(0, 0, 20_000).wait(SOON_S)
        assert fresh.wait(i + 1) == i + 1
    fresh.check([(0, 0, 20_000)], 20)
    eventually(lambda: rig.near.stats()["engine"]["operations_in_use"] == 0)


# --- fences ----------------------------------------------------------------------------------------------------------


@on(nics=(2,))
def test_a_fence_hurts_none_of_a_living_peers_writes(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(20_000)
    written = 0
    for _ in range(8):
        transfers = [link.write(0, 0, 20_000) for _ in range(20)]
        rig.far.fence(rig.near.address)
        for transfer in transfers:
            transfer.wait(SOON_S)
        written += 20
    assert link.wait(written) == written
    link.check([(0, 0, 20_000)], written)


@on(nics=(2,))
def test_a_fence_of_a_stranger_is_done_at_once(rig: Rig) -> None:
    stranger = rig.near.address
    far = rig.far
    begin = time.monotonic()
    far.fence(stranger)
    assert time.monotonic() - begin < 2 * SLOWNESS


@on(nics=(2,), apart=True, transports=("tcp", "rxe"))
@pytest.mark.parametrize("length", [4 << 20, 10_000])
def test_after_the_fence_of_a_stopped_writer_nothing_of_it_lands_or_the_fence_does_not_end(
    rig: Rig, length: int
) -> None:
    rig.clean = False  # notifications of a fenced peer have no meaning any more
    life = {"peer_timeout_s": 0.6 * SLOWNESS, "shard_bytes": 1000}
    rig.set_up(**life)
    child = rig.spawn()
    far = rig.another_far(child, **life)
    target = np.full(length, POISON, np.uint8)
    region, counter = rig.near.register(target), rig.near.counter()
    number, _ = far.memory(length)
    far.load(number, 5)
    far.push(number, region.descriptor, None, 1)
    address = far.address()
    far.begin(number, region.descriptor, counter.descriptor, max(8, 600_000 // length))
    child.stop()  # in the middle of a write
    fence = rig.near.fence(address, timeout_s=2.0 * SLOWNESS)
    failure = fence.exception(SOON_S)
    if rig.near.describe()["keys_enforced"]:
        assert failure is None
        target[:] = POISON
        value = counter.value
        child.resume()
        far.finish()
        assert (target == POISON).all()
        assert counter.value == value
    else:
        assert isinstance(failure, te.TransferTimeout)
        child.kill()
        rig.near.fence(address).wait(SOON_S)


def ends_within(call: Callable[[], Any], bound_s: float) -> float:
    begin = time.monotonic()
    call()
    took = time.monotonic() - begin
    assert took < bound_s
    return took


@on(nics=(1,))
def test_waits_end_when_their_time_is_over(rig: Rig) -> None:
    link = rig.link(100)

    def expect_timeout(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(te.TransferTimeout) as caught:
                call()
            assert isinstance(caught.value, TimeoutError)

        return run

    for timeout_s in (0.0, 0.1):
        for call in (
            lambda t=timeout_s: link.wait(1, t),
            lambda t=timeout_s: rig.far.receive(t),
            lambda t=timeout_s: rig.near.receive(t),
        ):
            assert ends_within(expect_timeout(call), timeout_s + 2 * SLOWNESS) >= timeout_s
