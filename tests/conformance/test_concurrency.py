"""Many threads at once: nothing is lost, mixed up or counted twice."""

from __future__ import annotations

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Rig, eventually, in_threads, on

THREADS = 64


@on(nics=(1, 3))
def test_64_threads_submit_at_once(rig: Rig) -> None:
    rig.set_up(shard_bytes=500)
    share = 2000
    link = rig.link(THREADS * share)

    def work(k: int) -> None:
        transfers = [link.write(k * share + i * 40, k * share + i * 40, 40) for i in range(share // 40)]
        for transfer in transfers:
            transfer.wait(SOON_S)
        link.pages(np.arange(k * 20, k * 20 + 20), np.arange(k * 20, k * 20 + 20), 100).wait(SOON_S)
        link.write(k * share, k * share, share).wait(SOON_S)

    in_threads(THREADS, work)
    expected = THREADS * (share // 40 + 20 + 1)
    assert link.wait(expected) == expected
    link.check([(0, 0, THREADS * share)], expected)


@on(nics=(2,))
def test_64_threads_share_few_slots(rig: Rig) -> None:
    rig.set_up(shard_bytes=500, operations=16, operations_per_peer=16, assembly_slots=2, immediate_window=4)
    link = rig.link(THREADS * 2000)

    def work(k: int) -> None:
        for _ in range(10):
            link.write(k * 2000, k * 2000, 2000).wait(SOON_S)

    in_threads(THREADS, work)
    assert link.wait(THREADS * 10) == THREADS * 10
    link.check([(0, 0, THREADS * 2000)], THREADS * 10)


@on(nics=(2,), apart=False)
def test_many_threads_do_everything_at_once(rig: Rig) -> None:
    """Writes, pages, messages, registrations, counters, connections, cancellations and statistics."""
    rig.clean = False  # notifications of cancelled writes may come too late to mean anything
    rig.set_up(shard_bytes=500)
    link = rig.link(64_000)
    far, near = rig.far.engine, rig.near
    written = [0] * 16

    def work(k: int) -> None:
        kind = k % 8
        for i in range(30):
            if kind == 0:
                link.write(k * 1000, k * 1000, 1000).wait(SOON_S)
                written[k] += 1
            elif kind == 1:
                link.pages([k * 10 + 1, k * 10], [k * 10, k * 10 + 1], 100).wait(SOON_S)
                written[k] += 2
            elif kind == 2:
                near.send(far.address, b"%d" % i).wait(SOON_S)
                far.receive(SOON_S)
            elif kind == 3:
                with near.register(bytearray(100)) as region:
                    near.write(region, link.remote[:100], notify=None).wait(SOON_S)
            elif kind == 4:
                with far.counter() as counter:
                    near.write(link.region[:0], link.remote[:0], notify=counter.descriptor).wait(SOON_S)
                    counter.wait(1, timeout_s=SOON_S)
            elif kind == 5:
                near.connect(far.address).wait(SOON_S)
                far.connect(near.address).wait(SOON_S)
            elif kind == 6:
                transfer = link.write(0, 0, 60_000, notify=False)
                transfer.cancel()
                transfer.exception(SOON_S)
                transfer.wait_quiesced(SOON_S)
            else:
                near.stats()
                far.stats()
                near.describe()

    in_threads(16, work)
    assert link.wait(sum(written)) == sum(written)
    eventually(lambda: near.stats()["engine"]["operations_in_use"] == 0)
    assert near.stats()["engine"]["regions"] == 1


@on(nics=(2,), apart=False)
def test_many_engines_of_one_process_write_to_each_other(rig: Rig) -> None:
    count = 6
    engines = [rig.engine() for _ in range(count)]
    targets = [np.zeros(count * 100, np.uint8) for _ in engines]
    remotes = [engine.register(target).descriptor for engine, target in zip(engines, targets, strict=True)]
    counters = [engine.counter() for engine in engines]

    def work(k: int) -> None:
        region = engines[k].register(np.full(100, k + 1, np.uint8))
        for _ in range(20):
            for other in range(count):
                engines[k].write(region, remotes[other][100 * k : 100 * k + 100], notify=counters[other].descriptor)

    in_threads(count, work)
    for counter, target in zip(counters, targets, strict=True):
        assert counter.wait(20 * count, timeout_s=SOON_S) == 20 * count
        np.testing.assert_array_equal(target, np.repeat(np.arange(1, count + 1, dtype=np.uint8), 100))


@pytest.mark.soak
@on(nics=(1, 3))
def test_64_threads_submit_for_a_long_time(rig: Rig) -> None:
    rig.set_up(shard_bytes=500)
    link = rig.link(THREADS * 2000)

    def work(k: int) -> None:
        under_way: list[te.Transfer] = []
        for _ in range(5_000):
            under_way.append(link.write(k * 2000, k * 2000, 2000))
            if len(under_way) == 16:
                under_way.pop(0).wait(SOON_S)
        for transfer in under_way:
            transfer.wait(SOON_S)

    in_threads(THREADS, work, 3000)
    assert link.wait(THREADS * 5_000) == THREADS * 5_000
    link.check([(0, 0, THREADS * 2000)])
