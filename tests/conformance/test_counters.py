"""Counters: exactly one per write and page, monotonic, never early, never lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Rig, on


@on(nics=(1, 3))
def test_notifications_that_came_before_anybody_waited_are_there(rig: Rig) -> None:
    link = rig.link(100)
    for transfer in [link.write(0, 0, 100) for _ in range(5)]:
        transfer.wait(SOON_S)
    assert link.wait(5) == 5
    assert link.wait(5, 0) == 5  # and again, without waiting


@on(nics=(1, 3))
def test_a_wait_ends_with_exactly_the_last_notification(rig: Rig) -> None:
    link = rig.link(100)
    link.write(0, 0, 100).wait(SOON_S)
    link.wait(1)
    for expected in range(2, 12):
        with pytest.raises(te.TransferTimeout, match=f"{expected - 1}/{expected}"):
            link.wait(expected, 0)
        link.write(0, 0, 100)
        assert link.wait(expected) == expected


@on(nics=(1, 3))
def test_surplus_notifications_are_kept_for_the_next_wait(rig: Rig) -> None:
    link = rig.link(100)
    for _ in range(7):
        link.write(0, 0, 100)
    assert link.wait(7) == 7
    assert link.wait(3, 0) == 7
    for _ in range(2):
        link.write(0, 0, 100)
    assert link.wait(9) == 9


@on(nics=(1, 3), apart=False)
def test_a_thread_that_waits_is_woken_by_arrivals(rig: Rig) -> None:
    link = rig.link(1000)
    seen: list[int] = []

    def wait() -> None:
        for expected in range(1, 101):
            seen.append(link.wait(expected))

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiters:
        thread.start()
    for _ in range(100):
        link.write(0, 0, 1000)
    for thread in waiters:
        thread.join(SOON_S)
    assert len(seen) == 300
    assert link.value == 100


@on(nics=(1, 3))
def test_counters_do_not_mix(rig: Rig) -> None:
    rig.set_up(shard_bytes=100)
    links = [rig.link(400) for _ in range(8)]
    for i in range(50):
        for number, link in enumerate(links):
            if i % (number + 1) == 0:
                link.write(0, 0, 400)
    for number, link in enumerate(links):
        expected = len(range(0, 50, number + 1))
        assert link.wait(expected) == expected
    for number, link in enumerate(links):
        link.check([(0, 0, 400)], len(range(0, 50, number + 1)))


@on(nics=(1, 3))
def test_writes_without_a_counter_count_nowhere(rig: Rig) -> None:
    link = rig.link(100_000)
    for _ in range(20):
        link.write(0, 0, 100_000, notify=False, flush=True).wait(SOON_S)
    link.write(0, 0, 100_000).wait(SOON_S)
    assert link.wait(1) == 1


@on(nics=(2,))
def test_several_writers_raise_one_counter_together(rig: Rig) -> None:
    rig.set_up(shard_bytes=200)
    link = rig.link(1000)
    others = [rig.engine(shard_bytes=200) for _ in range(3)]
    for engine in others:
        region = engine.register(np.zeros(1000, np.uint8))
        for _ in range(40):
            engine.write(region, link.remote, notify=link.notify)
    for _ in range(40):
        link.write(0, 0, 1000)
    assert link.wait(160) == 160
    assert link.value == 160


@on(nics=(1, 3))
def test_a_batch_counts_each_of_its_writes_and_pages(rig: Rig) -> None:
    rig.set_up(shard_bytes=500)
    first, second = rig.link(10_000), rig.link(10_000)
    transfer = rig.near.write_batch(
        [
            te.Write(first.region[:5000], first.remote[:5000], notify=first.notify),
            te.PageWrite(te.Pages(first.region, [5, 7], 1000), te.Pages(first.remote, [6, 8], 1000), first.notify),
            te.Write(second.region[:0], second.remote[:0], notify=second.notify),
            te.Write(second.region[10:20], second.remote[:10]),
            te.PageWrite(
                te.Pages(second.region, range(3), 100), te.Pages(second.remote, [3, 2, 1], 100), second.notify
            ),
        ]
    )
    transfer.wait(SOON_S)
    assert first.wait(3) == 3
    assert second.wait(4) == 4
    first.check([(0, 0, 5000), (6000, 5000, 1000), (8000, 7000, 1000)], 3)
    rig.near.write(second.region[:0], second.remote[:0], flush=True).wait(SOON_S)  # the entry without a counter
    second.check([(0, 10, 10), (300, 0, 100), (200, 100, 100), (100, 200, 100)], 4)


@on(nics=(1, 3))
def test_a_closed_counter_refuses_notifications_and_its_successor_starts_at_zero(rig: Rig) -> None:
    link = rig.link(5000)
    for _ in range(10):
        link.write(0, 0, 5000).wait(SOON_S)
    link.wait(10)
    rig.far.close_counter(link.counter)
    link.poison()
    with pytest.raises(te.TransferEngineError):
        link.write(0, 0, 5000).wait(SOON_S)
    link.check([])
    successor = rig.link(5000)
    successor.write(0, 0, 5000).wait(SOON_S)
    assert successor.wait(1) == 1


@on(nics=(1,), apart=False)
def test_counting_goes_on_when_one_waiter_gives_up(rig: Rig) -> None:
    link = rig.link(100)
    arrival = rig.far.counters[link.counter].reached(3, timeout_s=0.01)
    with pytest.raises(te.TransferTimeout, match="0/3"):
        arrival.wait(SOON_S)
    other = rig.far.counters[link.counter].reached(3)
    for _ in range(3):
        link.write(0, 0, 100)
    assert other.result(SOON_S) == 3
