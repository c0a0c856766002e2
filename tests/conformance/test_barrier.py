"""Barriers: every member's counter rises by exactly one, and nobody goes on before all have come."""

from __future__ import annotations

from typing import Any

import pytest

import transfer_engine as te

from .fan import Fan, Home, fars_of
from .rig import BOUND_S, SOON_S, Mortal, Rig, in_threads, on, on_mortals


@on(nics=(1, 3))
def test_it_raises_every_counter_by_one(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 5, home=not rig.case.apart), 100)
    for _ in range(100):
        fan.group.barrier(notify=fan.notify).wait(SOON_S)
    fan.arrived(100)
    transfers = [fan.group.barrier(notify=fan.notify, request_id=turn) for turn in range(100)]
    for transfer in transfers:
        transfer.wait(SOON_S)
        assert not transfer.failed_members
    fan.arrived(100)
    fan.check([None] * 5)
    fan.counters_stand()


@on(nics=(2,))
def test_members_without_a_counter_are_left_out(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 100)
    notify = [fan.notify[0], None, fan.notify[2]]
    for _ in range(10):
        fan.group.barrier(notify=notify).wait(SOON_S)
    fan.arrived(10, but=[1])
    fan.group.barrier(notify=[None] * 3).wait(SOON_S)
    fan.counters_stand()


@on(nics=(1, 2), apart=False)
@pytest.mark.parametrize("with_oneself", [True, False])
def test_nobody_goes_on_before_all_have_come(rig: Rig, with_oneself: bool) -> None:
    count, turns = 6, 40
    engines = [rig.engine() for _ in range(count)]
    counters = [engine.counter() for engine in engines]
    notify = [counter.descriptor for counter in counters]
    came = [0] * count

    def work(k: int) -> None:
        group = engines[k].peer_group([engine.address for engine in engines])
        mine = [n if with_oneself or i != k else None for i, n in enumerate(notify)]
        for turn in range(1, turns + 1):
            came[k] = turn
            group.barrier(notify=mine).wait(SOON_S)
            counters[k].wait(turn * (count if with_oneself else count - 1), timeout_s=SOON_S)
            assert min(came) >= turn
            assert max(came) <= turn + 1

    in_threads(count, work)
    assert [counter.value for counter in counters] == [turns * (count if with_oneself else count - 1)] * count


@on(nics=(2,), apart=False)
def test_more_lists_of_counters_than_are_kept_may_take_turns(rig: Rig) -> None:
    far = Home(rig.near)
    fans = [[far.counter() for _ in range(3)] for _ in range(20)]
    group = rig.near.peer_group([far.address()] * 3)
    for _ in range(5):
        for counters in fans:
            group.barrier(notify=[te.CounterDescriptor.from_bytes(bytes(n)) for _, n in counters]).wait(SOON_S)
    for counters in fans:
        for number, _ in counters:
            assert far.wait(number, 5) == 5


@on(nics=(2,), apart=False)
def test_threads_share_a_group_with_more_lists_of_counters_than_are_kept(rig: Rig) -> None:
    far = Home(rig.near)
    lists = [[far.counter() for _ in range(2)] for _ in range(12)]
    group = rig.near.peer_group([far.address()] * 2)

    def work(k: int) -> None:
        for turn in range(24):
            group.barrier(notify=[n for _, n in lists[(k + turn) % 12]]).wait(SOON_S)

    in_threads(8, work)
    for counters in lists:
        for number, _ in counters:
            assert far.wait(number, 16) == 16


@on(nics=(1,), apart=False)
def test_an_empty_group_is_done_at_once(rig: Rig) -> None:
    group = rig.near.peer_group([])
    assert len(group) == 0
    assert group.members == ()
    group.wait(0)
    region = rig.near.register(bytearray(10))
    for transfer in (
        group.barrier(notify=[]),
        group.target([], notify=[]).scatter(region, lengths=[]),
        group.target(None).scatter(region, src_offsets=[], lengths=[], dst_offsets=[]),
    ):
        transfer.wait(SOON_S)
        assert not transfer.failed_members
        assert transfer.quiesced


@on(nics=(2,))
def test_after_a_replacement_the_newcomer_is_notified_and_the_former_is_not(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 100)
    fan.group.barrier(notify=fan.notify).wait(SOON_S)
    fan.arrived()
    former, number = fan.fars[1], fan.counters[1]
    newcomer = rig.another_far()
    fan.group.replace(1, newcomer.address())
    with pytest.raises(te.ArgumentError, match="member 1"):
        fan.group.barrier(notify=fan.notify)
    fan.settle(1, newcomer)
    fan.group.barrier(notify=fan.notify).wait(SOON_S)
    fan.arrived()
    assert former.value(number) == 1


@on_mortals
def test_a_dead_member_is_named_and_the_others_are_notified(rig: Rig, life: dict[str, Any]) -> None:
    mortal = Mortal(rig, **life)
    fars = fars_of(rig, 3, **life)
    fan = Fan(rig, [*fars, mortal.far], 100)
    fan.group.barrier(notify=fan.notify).wait(SOON_S)
    fan.arrived()
    mortal.kill()
    failure = None
    while failure is None:  # what was sent before the death was noticed may count as done
        failure = fan.group.barrier(notify=fan.notify).exception(BOUND_S)
        fan.arrived(but=[3])
    assert failure.message.startswith("1 of 4 members failed: 3 (peer te1:")
    assert failure.peer == str(fan.remotes[3].address)
