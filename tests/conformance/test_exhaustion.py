"""What is given back can be had again, however often; what runs out says so and harms nothing."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Rig, eventually, on

FEW = {"max_regions": 64, "max_counters": 64}


def registers_closes_and_writes(rig: Rig, rounds: int) -> None:
    for _ in range(rounds):
        link = rig.link(1000)
        link.write(0, 0, 1000).wait(SOON_S)
        assert link.wait(1) == 1
        rig.far.close_memory(link.memory)
        rig.far.close_counter(link.counter)
        link.region.close(SOON_S)
    for stats in (rig.near.stats()["engine"], rig.far.stats()["engine"]):
        assert stats["regions"] == stats["counters"] == 0
    eventually(lambda: rig.near.stats()["engine"]["remote_regions"] == 0)


@on(nics=(2,))
def test_regions_and_counters_that_closed_make_room_for_others(rig: Rig) -> None:
    rig.set_up(**FEW)
    registers_closes_and_writes(rig, 300)


@pytest.mark.soak
@on(nics=(1, 3))
def test_tens_of_thousands_of_regions_and_counters_may_come_and_go(rig: Rig) -> None:
    registers_closes_and_writes(rig, 70_000)


@on(nics=(1,), apart=False, transports=("sim",))
def test_a_place_in_a_table_can_be_used_again_thousands_of_times(rig: Rig) -> None:
    rig.set_up(max_regions=1, max_counters=1)
    memory = bytearray(8)
    for _ in range(5000):  # handles count 4094 lives of a place
        rig.near.counter().close(SOON_S)
        rig.near.register(memory).close(SOON_S)
    assert rig.near.counter().value == 0


@on(nics=(2,))
def test_descriptors_used_after_their_close_use_up_nothing(rig: Rig) -> None:
    rig.set_up(**FEW)
    for _ in range(150):
        link = rig.link(100)
        link.write(0, 0, 100).wait(SOON_S)
        rig.far.close_memory(link.memory)
        rig.far.close_counter(link.counter)
        for call in (
            lambda link=link: link.write(0, 0, 100, notify=False),
            lambda link=link: rig.near.write(link.region[:0], link.remote[:0], notify=link.notify),
        ):
            with pytest.raises(te.RegionClosed):
                call().wait(SOON_S)
        link.region.close(SOON_S)


@on(nics=(2,))
@pytest.mark.parametrize("how", ["parting", "fence"])
def test_descriptors_known_before_a_parting_use_up_nothing(rig: Rig, how: str) -> None:
    rig.set_up(**FEW)
    for _ in range(100):
        link = rig.link(100)
        link.write(0, 0, 100).wait(SOON_S)
        assert link.wait(1) == 1
        if how == "parting":
            rig.near.disconnect(rig.far.address()).wait(SOON_S)
        else:
            rig.far.fence(rig.near.address)
        rig.far.close_memory(link.memory)
        rig.far.close_counter(link.counter)
        link.region.close(SOON_S)


@on(nics=(1,), apart=False)
def test_a_full_table_is_a_typed_error_that_names_its_setting(rig: Rig) -> None:
    rig.set_up(max_regions=4, max_counters=3)
    regions = [rig.near.register(bytearray(8)) for _ in range(4)]
    with pytest.raises(te.ResourceExhausted, match="max_regions"):
        rig.near.register(bytearray(8))
    regions.pop().close(SOON_S)
    rig.near.register(bytearray(8))
    counters = [rig.near.counter() for _ in range(3)]
    with pytest.raises(te.ResourceExhausted, match="max_counters"):
        rig.near.counter()
    counters.pop().close(SOON_S)
    rig.near.counter()


@on(nics=(1,))
def test_many_regions_and_counters_may_be_open_at_once(rig: Rig) -> None:
    size, count = 64, 500
    links = [rig.link(size) for _ in range(count)]
    transfers = [link.write(0, 0, size) for link in links]
    for transfer in transfers:
        transfer.wait(SOON_S)
    for link in links[:: count // 50]:
        assert link.wait(1) == 1
        link.check([(0, 0, size)], 1)
    rig.near.disconnect(rig.far.address()).wait(SOON_S)
    links[0].write(0, 0, size).wait(SOON_S)
    assert links[0].wait(2) == 2


@on(nics=(2,), apart=False)
def test_engines_that_closed_leave_no_descriptors_and_no_files(rig: Rig) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def shared() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"te-*-{os.getpid()}-*")}

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def one_life() -> None:
        a, b = rig.engine(), rig.engine()
        memory = bytearray(100)
        a.write(a.register(b"x" * 100), b.register(memory).descriptor, flush=True).wait(SOON_S)
        done = a.counter().reached(0)
        done.add_done_callback(lambda _: None)
        a.close(SOON_S)
        b.close(SOON_S)
        assert memory == b"x" * 100

    one_life()
    gc.collect()
    before = open_files(), threads(), shared()
    for _ in range(8):
        one_life()
    rig._engines.clear()
    gc.collect()
    assert open_files() <= before[0] + 2
    assert threads() <= before[1]
    assert shared() <= before[2]


# --- endurance -------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def transfers_and_events(rig: Rig, link: Any, count: int) -> None:
    """Writes of all sizes, page lists and messages; at most 64 under way."""
    under_way: list[te.Transfer] = []
    targets = np.arange(16)[::-1].copy()
    for i in range(count):
        if i % 100 == 7:
            under_way.append(link.pages(targets, targets, 100))
        elif i % 100 == 13:
            under_way.append(rig.near.send(rig.far.address(), b"x" * (i % 5000)))
            rig.far.receive()
        else:
            under_way.append(link.write(0, 0, (i * 37) % 300 if i % 50 else 20_000))
        if len(under_way) >= 64:
            for transfer in under_way:
                transfer.wait(SOON_S)
            under_way.clear()
    for transfer in under_way:
        transfer.wait(SOON_S)


@on(nics=(2,), apart=False)
def test_a_hundred_thousand_writes_do_not_grow_memory(rig: Rig) -> None:
    rig.set_up(shard_bytes=5000)
    link = rig.link(1 << 16)
    transfers_and_events(rig, link, 20_000)
    gc.collect()
    before, alive = resident_bytes(), rig.near.stats()["engine"]["transfers_alive"]
    transfers_and_events(rig, link, 100_000)
    gc.collect()
    grown = resident_bytes() - before
    assert grown < 4 << 20, f"{grown} bytes more"
    stats = rig.near.stats()["engine"]
    assert stats["transfers_alive"] <= alive
    eventually(lambda: rig.near.stats()["engine"]["operations_in_use"] == 0)
    counted = sum(16 if i % 100 == 7 else 0 if i % 100 == 13 else 1 for i in range(100_000))
    warm_up = sum(16 if i % 100 == 7 else 0 if i % 100 == 13 else 1 for i in range(20_000))
    assert link.wait(counted + warm_up) == counted + warm_up


@pytest.mark.soak
@on(nics=(1, 3), apart=False)
def test_three_million_writes_do_not_grow_memory(rig: Rig) -> None:
    link = rig.link(1 << 16)
    transfers_and_events(rig, link, 100_000)
    gc.collect()
    before = resident_bytes()
    transfers_and_events(rig, link, 3_000_000)
    gc.collect()
    assert resident_bytes() - before < 8 << 20


@on(nics=(1,), apart=False, transports=("sim",))
def test_a_closed_region_or_counter_never_lends_its_place_to_a_later_one(rig: Rig) -> None:
    """Far more openings than a narrow reuse count tells apart; the first descriptors stay dead, cached or not."""
    near, far = rig.engine(), rig.engine()
    source = near.register(bytearray(8))

    def open_and_use() -> tuple[te.Region, te.Counter]:
        region, counter = far.register(bytearray(8)), far.counter()
        near.write(source, region.descriptor, notify=counter.descriptor).wait(SOON_S)
        return region, counter

    first = open_and_use()
    for part in first:
        part.close(SOON_S)
    for _ in range(4200):
        for part in open_and_use():
            part.close(SOON_S)
    survivors = [open_and_use() for _ in range(3)]
    with pytest.raises(te.TransferEngineError):
        print(first[1].value)
    for part in first:
        part.close(SOON_S)  # closing twice closes nothing else
    for target, notify in ((first[0].descriptor, None), (survivors[0][0].descriptor, first[1].descriptor)):
        with pytest.raises(te.RegionClosed):
            near.write(source, target, notify=notify).wait(SOON_S)
    assert [counter.wait(1, timeout_s=SOON_S) for _, counter in survivors] == [1, 1, 1]


@on(nics=(1,), apart=False, transports=("sim", "tcp"))
def test_peers_that_parted_make_room_for_others(rig: Rig) -> None:
    rig.set_up(max_peers=1)
    for i in range(40):
        other = rig.engine()
        rig.near.connect(other.address).wait(SOON_S)
        other.send(rig.near.address, str(i).encode()).wait(SOON_S)
        if i % 2:
            rig.near.disconnect(other.address).wait(SOON_S)
        other.close()
        assert rig.near.receive(SOON_S).data == str(i).encode()  # also when its sender has gone


@on(nics=(2,), apart=False)
def test_an_engine_may_disconnect_from_itself_while_it_writes(rig: Rig) -> None:
    rig.clean = False  # cancelled writes may have landed
    engine = rig.near
    source, target, counter = engine.register(bytearray(4096)), engine.register(bytearray(4096)), engine.counter()
    for _ in range(5):
        transfers = [engine.write(source, target.descriptor, notify=counter.descriptor) for _ in range(50)]
        engine.disconnect(engine.address).wait(SOON_S)
        later = engine.write(source, target.descriptor, notify=counter.descriptor)
        for transfer in transfers:
            assert isinstance(transfer.exception(SOON_S), (type(None), te.TransferCancelled))
        later.wait(SOON_S)
    target.close(SOON_S)
    counter.close(SOON_S)
