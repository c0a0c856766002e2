"""Watchers and triggers: every raise that is due is one transfer, posted by the worker, and none is lost or doubled."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .fan import Fan, fars_of
from .rig import LIFE_S, SOON_S, Link, Mortal, Rig, eventually, in_threads, on, on_mortals, pattern


def write_of(link: Link, target: int = 0, source: int = 0, length: int = 100) -> te.Write:
    return te.Write(link.region[source : source + length], link.remote[target : target + length], link.notify)


def settled(trigger: te.Trigger, fired: int) -> te.TriggeredTransfers:
    def look() -> te.TriggeredTransfers | None:
        counts = trigger.transfers
        return counts if counts.completed + counts.failed == fired and not counts.owed else None

    found: te.TriggeredTransfers = eventually(look)
    return found


@on(nics=(1, 3))
def test_each_raise_posts_the_bytes_of_that_moment_and_counts_once(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    memory = np.zeros(20_000, np.uint8)
    region = rig.near.register(memory)
    link = rig.link(20_000)
    watcher, posted, completed = rig.near.watcher(), rig.near.flag(), rig.near.flag()
    assert watcher.kind == "host"
    prepared = rig.near.prepare(te.Write(region, link.remote, link.notify))
    with watcher.trigger(prepared, posted=posted, completed=completed) as trigger:
        for turn in range(1, 21):
            memory[:] = pattern(turn, 20_000)
            watcher.add()
            trigger.wait(turn, SOON_S)
            posted.wait(timeout_s=SOON_S)
            completed.wait(timeout_s=SOON_S)
            assert link.wait(turn) == turn
            assert rig.far.read(link.memory) == bytes(memory)
        assert trigger.transfers == te.TriggeredTransfers(fired=20, posted=20, completed=20, failed=0, owed=0)
        assert trigger.error is None
    assert watcher.value == posted.value == completed.value == 20
    assert not trigger.active
    watcher.add()
    assert link.value == 20


@on(nics=(2,))
def test_pages_and_scatters_go_out_on_every_nth_raise(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(64 * 256)
    fan = Fan(rig, fars_of(rig, 3, shard_bytes=1000), 5000)
    watcher = rig.near.watcher()
    pages = rig.near.prepare(
        te.PageWrite(te.Pages(link.region, [3, 1, 2], 256), te.Pages(link.remote, [9, 8, 7], 256), link.notify)
    )
    scatter = rig.near.prepare(te.Scatter(fan.target, fan.region, lengths=[0, 100, 4000]))
    triggers = [watcher.trigger(pages, every=2), watcher.trigger(scatter, every=3, first=5)]
    for _ in range(30):
        watcher.add()
    assert link.wait(3 * 15) == 3 * 15
    fan.arrived(9)
    assert settled(triggers[0], 15).posted == 15
    assert settled(triggers[1], 9).completed == 9
    link.check([(9 * 256, 3 * 256, 256), (8 * 256, 256, 256), (7 * 256, 2 * 256, 256)], 45)
    fan.check([(0, 0, 0), (0, 0, 100), (0, 0, 4000)])


@on(nics=(2,))
def test_raises_of_many_threads_are_as_many_transfers_at_the_peer(rig: Rig) -> None:
    link = rig.link(1000)
    flag = rig.far.flag()
    rig.far.bind(link.counter, flag)
    watcher = rig.near.watcher()
    trigger = watcher.trigger(rig.near.prepare(write_of(link)))

    def work(k: int) -> None:
        for i in range(100):
            watcher.add(n=1 + (i + k) % 3)

    in_threads(8, work)
    total = watcher.value
    assert total == sum(1 + (i + k) % 3 for k in range(8) for i in range(100))
    assert rig.far.flag_wait(flag, total) == total
    assert settled(trigger, total) == te.TriggeredTransfers(total, total, total, 0, 0)
    link.check([(0, 0, 100)], total)


@on(nics=(2,))
def test_more_firings_than_slots_all_find_their_place(rig: Rig) -> None:
    rig.set_up(operations=16, operations_per_peer=4, immediate_window=4)
    link = rig.link(2000)
    watcher = rig.near.watcher()
    watcher.add(n=300)  # before the trigger: those are due, too
    trigger = watcher.trigger(rig.near.prepare(write_of(link, 0, 0, 2000)))
    for _ in range(20):
        link.write(0, 0, 2000).wait(SOON_S)
    assert link.wait(320) == 320
    assert settled(trigger, 300) == te.TriggeredTransfers(300, 300, 300, 0, 0)
    link.check([(0, 0, 2000)], 320)


@on(nics=(1,), apart=False)
def test_a_cancel_is_the_end_and_what_is_under_way_is_counted(rig: Rig) -> None:
    link = rig.link(50_000)
    prepared = rig.near.prepare(write_of(link, 0, 0, 50_000))
    expected = 0
    for _ in range(20):
        watcher = rig.near.watcher()
        trigger = watcher.trigger(prepared)
        thread = threading.Thread(target=lambda w=watcher: [w.add() for _ in range(50)])
        thread.start()
        trigger.cancel()
        trigger.cancel()
        thread.join()
        watcher.add(n=1000)
        counts = settled(trigger, trigger.transfers.fired)
        assert counts.owed == counts.failed == 0
        assert not trigger.active
        expected += counts.completed
        watcher.close()
        watcher.close()
    eventually(lambda: rig.near.stats()["engine"]["operations_in_use"] == 0)
    assert link.wait(expected) == expected


@on(nics=(2,))
def test_closing_what_a_trigger_names_makes_firings_fail_with_the_reason(rig: Rig) -> None:
    mine, theirs, third = rig.link(1000), rig.link(1000), rig.link(1000)
    watcher = rig.near.watcher()
    prepared = [rig.near.prepare(write_of(link)) for link in (mine, theirs, third)]
    triggers = [watcher.trigger(each) for each in prepared]
    watcher.add(n=3)
    for trigger in triggers:
        trigger.wait(3, SOON_S)
    mine.region.close(SOON_S)
    rig.far.close_memory(theirs.memory)
    prepared[2].close()
    watcher.add(n=4)
    for trigger, error in zip(triggers, (te.RegionClosed, te.RegionClosed, te.EngineClosed), strict=True):
        counts = settled(trigger, 7)
        assert (counts.completed, counts.failed) == (3, 4)
        assert isinstance(trigger.error, error)
        with pytest.raises(error):
            trigger.wait(4, SOON_S)
    assert triggers[1].error is not None
    assert triggers[1].error.peer == str(theirs.remote.address)


@on_mortals
def test_firings_towards_a_dead_peer_fail_by_its_name(rig: Rig) -> None:
    rig.clean = False  # an engine that the simulated fabric kills sees what was on its way
    settings = {"peer_timeout_s": LIFE_S, "connect_timeout_s": LIFE_S + 0.1}
    rig.set_up(**settings)
    mortal = Mortal(rig, **settings)
    link = rig.link(1000, far=mortal.far)
    address = str(mortal.far.address())
    watcher = rig.near.watcher()
    trigger = watcher.trigger(rig.near.prepare(write_of(link)))
    watcher.add(n=5)
    trigger.wait(5, SOON_S)
    mortal.kill()
    watcher.add(n=5)
    counts = settled(trigger, 10)
    assert counts.completed >= 5
    watcher.add(n=5)
    counts = settled(trigger, 15)
    assert counts.failed >= 5
    assert isinstance(trigger.error, te.PeerError)
    assert trigger.error.peer == address


@on(nics=(1,), apart=False)
def test_callbacks_see_each_change_once_and_may_end_themselves(rig: Rig) -> None:
    watcher = rig.near.watcher()
    watcher.add(n=7)
    seen: list[tuple[int, int]] = []
    ends: list[Any] = []
    once: list[int] = []

    def first_only(_old: int, new: int) -> None:
        once.append(new)
        ends[0]()
        raise RuntimeError("told in the log, and no more")

    ends.append(watcher.on_change(first_only))
    end = watcher.on_change(lambda old, new: seen.append((old, new)))
    for _ in range(500):
        watcher.add()
    eventually(lambda: seen and seen[-1][1] == 507)
    assert seen[0][0] == 7
    assert all(old == before for (old, _), (_, before) in zip(seen[1:], seen, strict=False))
    assert all(old < new for old, new in seen)
    assert len(once) == 1
    end()
    end()
    watcher.add()
    assert seen[-1][1] == 507
    done = threading.Event()
    watcher.on_change(lambda _old, _new: (watcher.close(), done.set()))
    watcher.add()
    assert done.wait(SOON_S)
    assert watcher.closed


@on(nics=(1,), apart=False)
def test_watchers_triggers_and_flags_come_and_go_without_end(rig: Rig) -> None:
    link = rig.link(1000)
    prepared = rig.near.prepare(write_of(link))
    for turn in range(1, 201):
        watcher = rig.near.watcher()
        flag = rig.near.flag()
        trigger = watcher.trigger(prepared, completed=flag)
        watcher.add()
        flag.wait(timeout_s=SOON_S)
        assert trigger.transfers.completed == 1
        if turn % 2:
            watcher.close()
        del watcher, trigger, flag
    assert link.wait(200) == 200
