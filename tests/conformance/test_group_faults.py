"""Groups whose members fail, leave, are replaced or never come: the others are not affected, and errors have names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .fan import Fan, fars_of
from .rig import BOUND_S, SOON_S, Mortal, Rig, eventually, on, on_mortals

LENGTHS = [0, 100, 3000, 20_000]


def pieces_of(count: int) -> list[tuple[int, int, int]]:
    return [(i, 2 * i, LENGTHS[i % len(LENGTHS)]) for i in range(count)]


def failed_alone(transfer: te.Transfer, members: set[int], error: type[te.TransferEngineError]) -> None:
    """Exactly these members failed, in this way, and the transfer's error names them."""
    failure = transfer.exception(SOON_S)
    assert set(transfer.failed_members) == members
    assert all(isinstance(found, error) for found in transfer.failed_members.values()), transfer.failed_members
    assert isinstance(failure, error)
    assert f"{len(members)} of " in failure.message
    for member in members:
        assert f" {member}" in failure.message


# --- what a member's owner does ---------------------------------------------------------------------------------------


@on(nics=(1, 3))
def test_the_closed_region_of_a_member_fails_its_part_alone(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 5, engines=3, shard_bytes=1000), 30_000)
    pieces = pieces_of(5)
    fan.scatter(pieces).wait(SOON_S)
    fan.arrived()
    fan.fars[3].close_memory(fan.memories[3])
    fan.poison()
    for _ in range(3):
        transfer = fan.scatter(pieces)
        failed_alone(transfer, {3}, te.RegionClosed)
        assert transfer.failed_members[3].peer == str(fan.remotes[3].address)
        assert transfer.failed_members[3].operation == "scatter"
    fan.arrived(3, but=[3])
    fan.check([*pieces[:3], None, pieces[4]])
    fan.counters_stand()


@on(nics=(1, 3))
def test_the_closed_counter_of_a_member_fails_its_part_alone(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 4), 30_000)
    fan.scatter(pieces_of(4)).wait(SOON_S)
    fan.arrived()
    fan.fars[1].close_counter(fan.counters[1])
    for _ in range(3):
        failed_alone(fan.scatter(pieces_of(4)), {1}, te.RegionClosed)
    fan.arrived(3, but=[1])


@on(nics=(2,), apart=False)
def test_a_region_that_closes_under_load_fails_its_part_alone(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 4), 30_000)
    pieces = pieces_of(4)
    transfers = [fan.scatter(pieces) for _ in range(20)]
    fan.fars[2].close_memory(fan.memories[2])
    fan.fars[2].poison(fan.memories[2])
    transfers += [fan.scatter(pieces) for _ in range(20)]
    for transfer in transfers:
        if transfer.exception(SOON_S) is not None:
            failed_alone(transfer, {2}, te.RegionClosed)
    failed_alone(transfers[-1], {2}, te.RegionClosed)
    fan.arrived(40, but=[2])
    fan.check([pieces[0], pieces[1], None, pieces[3]])


@on_mortals
def test_a_member_that_dies_fails_its_part_by_name_and_nothing_else(rig: Rig, life: dict[str, Any]) -> None:
    mortal = Mortal(rig, **life)
    fars = fars_of(rig, 4, **life)
    fan = Fan(rig, [fars[0], mortal.far, fars[1], fars[2]], 30_000)
    pieces = [(0, 0, 20_000)] * 4
    fan.scatter(pieces).wait(SOON_S)
    fan.arrived()
    mortal.kill()
    transfers = [fan.scatter(pieces) for _ in range(10)]
    for transfer in transfers:
        failure = transfer.exception(BOUND_S)
        assert set(transfer.failed_members) <= {1}
        if failure is not None:
            assert transfer.failed_members[1].peer == str(fan.remotes[1].address)
    with pytest.raises(te.PeerError) as caught:
        fan.scatter(pieces).wait(BOUND_S)
    assert caught.value.message.startswith("1 of 4 members failed: 1 (peer te1:")
    fan.arrived(11, but=[1])
    del fan.fars[1], fan.memories[1]
    fan.check(pieces[1:])


@on(nics=(2,), apart=False)
def test_a_member_that_was_never_there_fails_its_part_by_name(rig: Rig) -> None:
    rig.set_up(connect_timeout_s=0.3)
    fan = Fan(rig, [*fars_of(rig, 2), rig.another_far()], 1000)
    rig.near.disconnect(fan.remotes[2].address).wait(SOON_S)
    fan.fars[2].close()
    again = rig.near.peer_group([remote.address for remote in fan.remotes])
    with pytest.raises(te.PeerUnreachable, match="1 of 3 members failed: 2 "):
        again.wait(SOON_S)
    failed_alone(fan.scatter([(0, 0, 500)] * 3), {2}, te.PeerError)
    fan.arrived(but=[2])


@on(nics=(2,))
def test_a_peer_that_parted_and_is_met_again_is_a_member_as_before(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 3, engines=3, shard_bytes=1000), 30_000)
    for _ in range(5):
        fan.poison()
        fan.scatter([(1, 2, 25_000)] * 3).wait(SOON_S)
        fan.arrived()
        fan.check([(1, 2, 25_000)] * 3)
        rig.near.disconnect(fan.remotes[1].address).wait(SOON_S)


# --- replacing and closing --------------------------------------------------------------------------------------------


@on(nics=(1, 2))
def test_a_replaced_member_is_missing_by_name_until_its_place_is_filled(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    pieces = [(0, 0, 900)] * 3
    fan.scatter(pieces).wait(SOON_S)
    fan.arrived()
    newcomer = rig.another_far()
    fan.group.replace(1, newcomer.address())
    assert fan.group.members[1] == newcomer.address()
    assert len(fan.group) == 3
    fan.group.wait(SOON_S)
    fan.poison()
    failed_alone(fan.scatter(pieces), {1}, te.TransferEngineError)
    fan.arrived(but=[1])
    fan.check([pieces[0], None, pieces[2]])
    fan.counters_stand()
    with pytest.raises(te.ArgumentError, match="member 1"):
        fan.target.replace(1, fan.remotes[1], notify=fan.notify[1])
    fan.settle(1, newcomer)
    fan.target.replace(1, fan.remotes[1], notify=fan.notify[1])
    fan.scatter(pieces).wait(SOON_S)
    fan.arrived()
    fan.check(pieces)


@on(nics=(1, 3))
def test_a_member_may_get_another_region_and_counter_of_the_same_peer(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    for turn in range(20):
        fan.settle(turn % 3, fan.fars[turn % 3])
        fan.target.replace(turn % 3, fan.remotes[turn % 3], notify=fan.notify[turn % 3])
        fan.poison()
        fan.scatter([(turn, 0, 900)] * 3).wait(SOON_S)
        fan.arrived()
        fan.check([(turn, 0, 900)] * 3)


@contextmanager
def scattering(fan: Fan, threads: int = 3) -> Iterator[list[te.Transfer]]:
    """Threads that scatter all the time, until the block ends or the target is closed. Gives the transfers."""
    stop = threading.Event()
    made: list[te.Transfer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not stop.is_set():
                transfer = fan.scatter([(0, 0, 900)] * len(fan.fars))
                made.append(transfer)
                transfer.exception(SOON_S)
        except te.EngineClosed as error:
            if not fan.target.closed:
                errors.append(error)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        eventually(lambda: len(made) > 5)
        yield made
    finally:
        stop.set()
        for worker in workers:
            worker.join(SOON_S)
    if errors:
        raise errors[0]


@on(nics=(2,))
def test_members_replaced_while_others_scatter_disturb_no_other_member(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 4), 1000)
    former = []
    with scattering(fan) as made:
        for turn in range(10):
            newcomer = fan.fars[turn % 4]
            former.append((fan.fars[1], fan.counters[1]))
            fan.group.replace(1, newcomer.address())
            fan.settle(1, newcomer)
            fan.target.replace(1, fan.remotes[1], notify=fan.notify[1])
            before = len(made)  # of those that come now, the newcomer gets its part
            eventually(lambda before=before: len(made) > before + 5)  # type: ignore[misc]
    failures = 0
    for transfer in made:
        assert set(transfer.failed_members) <= {1}
        failures += transfer.exception(SOON_S) is not None
    fan.arrived(len(made), but=[1])
    former.append((fan.fars[1], fan.counters[1]))
    eventually(lambda: sum(far.value(counter) for far, counter in former) >= len(made) - failures)
    assert sum(far.value(counter) for far, counter in former) == len(made) - failures
    fan.check([(0, 0, 900)] * 4)


@on(nics=(2,))
@pytest.mark.parametrize("what", ["group", "target"])
def test_closing_while_others_scatter_ends_what_is_under_way_well(rig: Rig, what: str) -> None:
    fan = Fan(rig, fars_of(rig, 4), 1000)
    with scattering(fan) as made:
        (fan.group if what == "group" else fan.target).close()
    for transfer in made:
        transfer.wait(SOON_S)
    fan.arrived(len(made))
    assert fan.target.closed
    with pytest.raises(te.EngineClosed, match="closed"):
        fan.scatter([(0, 0, 1)] * 4)
    fan.group.close()
    fan.counters_stand()


@on(nics=(2,), apart=False)
def test_targets_come_and_go_without_end(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    for turn in range(3000):
        target = fan.group.target(fan.remotes, notify=fan.notify)
        if turn % 100 == 0:
            target.scatter(fan.region, lengths=[100] * 3).wait(SOON_S)
            fan.arrived()
        if turn % 2:
            target.close()
    fan.counters_stand()


# --- deadlines, cancel, NICs ------------------------------------------------------------------------------------------


def ends_by_itself(transfer: te.Transfer) -> None:
    with pytest.raises(te.TransferTimeout):
        transfer.wait(SOON_S)


def is_cancelled(transfer: te.Transfer) -> None:
    transfer.cancel()
    with pytest.raises(te.TransferCancelled):
        transfer.wait(SOON_S)


@on(nics=(1, 3), faults=True)
@pytest.mark.parametrize(
    ("ends", "timeout_s", "error"),
    [(ends_by_itself, 0.1, te.TransferTimeout), (is_cancelled, None, te.TransferCancelled)],
)
def test_a_scatter_that_is_held_up_ends_by_its_deadline_or_by_cancel_and_leaves_nothing(
    rig: Rig, ends: Callable[[te.Transfer], None], timeout_s: float | None, error: type[te.TransferEngineError]
) -> None:
    rig.clean = False  # what is let go later has no meaning any more
    rig.set_up(shard_bytes=1000, peer_timeout_s=SOON_S)
    fan = Fan(rig, fars_of(rig, 4, shard_bytes=1000, peer_timeout_s=SOON_S), 30_000)
    fan.scatter(pieces_of(4)).wait(SOON_S)
    fan.arrived()
    rig.near._inject("pause")
    transfer = fan.scatter([(0, 0, 20_000)] * 4, timeout_s=timeout_s)
    eventually(lambda: any(nic["in_flight"] for nic in rig.near.stats()["nics"].values()))
    ends(transfer)
    assert set(transfer.failed_members) == {0, 1, 2, 3}
    assert all(isinstance(found, error) for found in transfer.failed_members.values())
    assert not transfer.quiesced
    rig.near._inject("resume")
    transfer.wait_quiesced(SOON_S)
    former = list(fan.counters)
    for i, far in enumerate(fan.fars):
        fan.settle(i, far)
        fan.target.replace(i, fan.remotes[i], notify=fan.notify[i])
    for _ in range(5):
        fan.poison()
        fan.scatter(pieces_of(4)).wait(SOON_S)
        fan.arrived()
        fan.check(pieces_of(4))
    fan.counters_stand()
    for counter, far in zip(former, fan.fars, strict=True):
        assert 1 <= far.value(counter) <= 2  # what ended early may count, once


@on(nics=(2, 3), faults=True)
@pytest.mark.parametrize("fate", ["clean", "unknown", "partial"])
def test_writes_that_the_network_loses_fail_their_members_alone_and_counts_stay_exact(rig: Rig, fate: str) -> None:
    rig.clean = False  # what arrives for a write of unknown outcome has no meaning any more
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 6, shard_bytes=1000), 30_000)
    fan.scatter(pieces_of(6)).wait(SOON_S)
    fan.arrived()
    failures = 0
    for turn in range(60):
        rig.near._inject(f"fail_after {turn % 13} {fate}")
        transfer = fan.scatter(pieces_of(6))
        failure = transfer.exception(SOON_S)
        rig.near._inject("error_next 0")
        transfer.wait_quiesced(SOON_S)
        failed = set(transfer.failed_members)
        assert (failure is None) == (not failed)
        assert all(isinstance(found, te.TransportError) for found in transfer.failed_members.values())
        assert all(found.nic in rig.near.nics for found in transfer.failed_members.values())
        failures += bool(failed)
        fan.arrived(but=sorted(failed))
    assert failures > 30
    fan.counters_stand()


@on(nics=(2, 3), faults=True)
def test_a_nic_that_goes_down_and_returns_fails_members_and_falsifies_no_count(rig: Rig) -> None:
    rig.clean = False
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 6, shard_bytes=1000), 30_000)
    good, submitted = np.zeros(6, int), 0
    for turn in range(12):
        transfers = [fan.scatter(pieces_of(6)) for _ in range(8)]
        if turn % 3 == 1:
            rig.near._inject("nic_down 1")
        if turn % 3 == 2:
            rig.near._inject("nic_up 1")
            fan.group.wait(SOON_S)
        for transfer in transfers:
            transfer.exception(SOON_S)
            transfer.wait_quiesced(SOON_S)
            good += [member not in transfer.failed_members for member in range(6)]
        submitted += 8
    for i, far in enumerate(fan.fars):
        assert good[i] <= far.wait(fan.counters[i], int(good[i]), SOON_S) <= submitted
        fan.counts[i] = far.value(fan.counters[i])
    fan.poison()

    def whole() -> bool:
        return fan.scatter(pieces_of(6)).exception(SOON_S) is None

    eventually(whole)
    fan.check(pieces_of(6))
