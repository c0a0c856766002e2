"""Regions that close: refused at once on both sides, and nothing lands any more once close() has returned."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import transfer_engine as te

from .rig import POISON, SOON_S, Rig, eventually, on


@on(nics=(1, 3))
def test_a_closed_target_refuses_writes_with_a_typed_error(rig: Rig) -> None:
    used, fresh = rig.link(10_000), rig.link(10_000)
    used.write(0, 0, 10_000).wait(SOON_S)
    used.wait(1)
    for link in (used, fresh):  # known to the writer, and not yet
        rig.far.close_memory(link.memory)
        link.poison()
        for _ in range(3):
            with pytest.raises(te.RegionClosed) as caught:
                link.write(0, 0, 10_000).wait(SOON_S)
            assert caught.value.peer == str(rig.far.address())
        link.check([])
    rig.link(100).write(0, 0, 100).wait(SOON_S)


@on(nics=(1, 3))
def test_a_closed_source_refuses_writes_at_once(rig: Rig) -> None:
    link = rig.link(10_000)
    link.write(0, 0, 10_000).wait(SOON_S)
    link.wait(1)
    link.region.close(SOON_S)
    link.poison()
    for call in (
        lambda: link.write(0, 0, 10),
        lambda: link.pages([0], [0], 10),
        lambda: rig.near.write_batch([te.Write(link.region[:5], link.remote[:5])]),
    ):
        with pytest.raises(te.RegionClosed, match="this side"):
            call()
    link.check([], 1)


@on(nics=(1, 3))
def test_closing_the_source_waits_for_what_is_under_way(rig: Rig) -> None:
    rig.set_up(shard_bytes=10_000)
    size = 1 << 20
    target = rig.link(size)
    source = target.source.copy()
    region = rig.near.register(source)
    transfers = [rig.near.write(region, target.remote, notify=target.notify) for _ in range(8)]
    region.close(SOON_S)
    source[:] = 0  # the memory is free: nothing reads it any more
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert target.wait(8) == 8
    target.check([(0, 0, size)], 8)


@on(nics=(1, 3))
def test_nothing_lands_after_a_target_was_closed_under_load(rig: Rig) -> None:
    rig.set_up(shard_bytes=10_000)
    link, other = rig.link(200_000), rig.link(50_000)
    refused: list[te.TransferEngineError] = []
    under_way: list[te.Transfer] = []

    def load() -> None:
        for _ in range(100_000):
            try:
                under_way.append(link.write(0, 0, 200_000))
                if len(under_way) >= 8:
                    under_way.pop(0).wait(SOON_S)
            except te.TransferEngineError as error:
                refused.append(error)
                return

    thread = threading.Thread(target=load)
    thread.start()
    link.wait(5)
    rig.far.close_memory(link.memory)
    link.poison()
    thread.join(SOON_S)
    for transfer in under_way:
        assert isinstance(transfer.exception(SOON_S), te.RegionClosed | None)
        transfer.wait_quiesced(SOON_S)
    assert isinstance(refused[0], te.RegionClosed)
    for _ in range(10):
        other.write(0, 0, 50_000, flush=True).wait(SOON_S)
    link.check([])
    assert other.wait(10) == 10


@on(nics=(2,))
def test_a_descriptor_does_not_reach_the_next_region_of_the_same_memory(rig: Rig) -> None:
    link = rig.link(10_000)
    link.write(0, 0, 10_000).wait(SOON_S)
    link.wait(1)
    old = link.remote
    rig.far.close_memory(link.memory)
    if not rig.case.apart:
        again = rig.far.engine.register(rig.far.memories[link.memory])
        assert again.descriptor != old
        assert again.descriptor.serial > old.serial
    link.poison()
    with pytest.raises(te.RegionClosed):
        rig.near.write(link.region, old).wait(SOON_S)
    link.check([])


@on(nics=(2,))
def test_regions_close_while_others_are_in_use(rig: Rig) -> None:
    links = [rig.link(5000) for _ in range(20)]
    for link in links:
        link.write(0, 0, 5000)
    for link in links[::2]:
        link.wait(1)
        rig.far.close_memory(link.memory)
    for link in links[1::2]:
        link.write(0, 0, 5000).wait(SOON_S)
        assert link.wait(2) == 2
        link.check([(0, 0, 5000)])
    for link in links[::2]:
        with pytest.raises(te.RegionClosed):
            link.write(0, 0, 5000).wait(SOON_S)


@on(nics=(2,), apart=False)
def test_many_threads_may_close_one_region(rig: Rig) -> None:
    link = rig.link(10_000)
    link.write(0, 0, 10_000).wait(SOON_S)
    region = rig.far.regions[link.memory]
    errors: list[Exception] = []

    def close() -> None:
        try:
            region.close(SOON_S)
        except te.TransferEngineError as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert not errors
    assert rig.far.stats()["engine"]["regions"] == 0


@on(nics=(2,), faults=True)
def test_closing_a_target_waits_for_a_writer_that_is_slow_and_says_so(rig: Rig) -> None:
    link = rig.link(10_000)
    link.write(0, 0, 10_000).wait(SOON_S)
    link.wait(1)
    rig.near._inject("pause")
    transfer = link.write(0, 0, 10_000)
    eventually(lambda: sum(nic["in_flight"] for nic in rig.near.stats()["nics"].values()))
    with pytest.raises(te.TransferTimeout):
        rig.far.close_memory(link.memory, 0.05)
    rig.near._inject("resume")
    rig.far.close_memory(link.memory)
    link.poison()
    transfer.wait_quiesced(SOON_S)
    assert (np.frombuffer(rig.far.read(link.memory), np.uint8) == POISON).all()
