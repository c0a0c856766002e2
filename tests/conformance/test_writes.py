"""Contiguous writes: whole, exact, and counted once, whatever the length and however they are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .rig import SOON_S, Link, Rig, eventually, laid_out, on

EVERY_COUNT = (1, 2, 3, 8)


def write_all(link: Link, pieces: Any, **arguments: Any) -> None:
    """All at once; then every byte and the count are looked at."""
    transfers = [link.write(*piece, **arguments) for piece in pieces]
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(len(pieces)) == len(pieces)
    link.check(pieces, len(pieces))


@on(nics=EVERY_COUNT)
def test_every_short_length_lands_whole_between_untouched_guards_and_counts_once(rig: Rig) -> None:
    pieces, size = laid_out(range(131))
    write_all(rig.link(size), pieces)


@on(nics=EVERY_COUNT, nics_apart=(1, 3))
def test_lengths_around_powers_of_two_land_whole(rig: Rig) -> None:
    lengths = [(1 << power) + off for power in range(7, 23) for off in (-1, 0, 1)]
    pieces, size = laid_out(lengths)
    write_all(rig.link(size), pieces)


@on(nics=(1, 3, 8), nics_apart=(3,))
@pytest.mark.parametrize(("chunk", "shard"), [(1000, 256), (64, 1), (4096, 4096), (1 << 40, 64)])
def test_lengths_around_every_boundary_of_chunks_parts_and_nics_land_whole(rig: Rig, chunk: int, shard: int) -> None:
    rig.set_up(chunk_bytes=chunk, shard_bytes=shard)
    nics = rig.case.nics
    edges = {k * shard for k in range(1, nics + 2)} | {k * 64 * nics for k in (1, 2, 3)} | {64, 128, 192}
    if chunk < 1 << 20:
        edges |= {k * chunk for k in (1, 2, 3)} | {k * chunk * nics for k in (1, 2)}
    lengths = sorted({max(edge + off, 0) for edge in edges if edge <= 1 << 17 for off in (-1, 0, 1)})
    pieces, size = laid_out(lengths)
    write_all(rig.link(size), pieces)


@on(nics=[(1, 8), (8, 1), (3, 2), (2, 3)])
def test_engines_with_different_numbers_of_nics_write_to_each_other(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    pieces, size = laid_out([0, 1, 999, 1000, 2000, 3001, 8000, 9001, 100_000])
    link = rig.link(size)
    write_all(link, pieces)

    back = np.full(size, 0x11, np.uint8)
    region, counter = rig.near.register(back), rig.near.counter()
    rig.far.push(link.memory, region.descriptor, counter.descriptor, 5)
    assert counter.wait(5) == 5
    assert bytes(back) == rig.far.read(link.memory)


@on(nics=(1, 3), nics_apart=(2,))
@pytest.mark.parametrize("misaligned", [1, 7, 63])
def test_bytes_land_where_they_belong_from_and_to_any_offset(rig: Rig, misaligned: int) -> None:
    rig.set_up(shard_bytes=64, chunk_bytes=500)
    link = rig.link(20_000)
    pieces = [(misaligned + k * 5000, 3 * misaligned + k, 4000 + k) for k in range(4)]
    write_all(link, pieces)


@on(nics=(1, 3))
def test_a_flushed_write_is_visible_when_it_is_done_without_a_counter(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(100_000)
    for length in (1, 64, 5000, 100_000, 0):
        link.poison()
        link.write(0, 0, length, notify=False, flush=True).wait(SOON_S)
        link.check([(0, 0, length)], 0)


@on(nics=(1, 3))
def test_a_write_that_is_done_is_in_memory_where_the_transport_says_so(rig: Rig) -> None:
    link = rig.link(200_000)
    pieces = [(0, 0, 200_000)]
    link.write(*pieces[0], notify=False).wait(SOON_S)
    if rig.near.describe()["delivery_complete"]:
        link.check(pieces)
    else:
        eventually(lambda: link.holds(pieces))


@on(nics=(1, 3))
def test_thousands_of_writes_in_flight_count_exactly(rig: Rig) -> None:
    link = rig.link(3000 * 20)
    pieces = [(20 * i, 20 * (i * 7 % 3000), 20) for i in range(3000)]
    write_all(link, pieces)


@on(nics=(1, 3))
def test_whole_regions_need_no_slices(rig: Rig) -> None:
    link = rig.link(70_000)
    rig.near.write(link.region, link.remote, notify=link.notify).wait(SOON_S)
    link.wait(1)
    link.check([(0, 0, 70_000)], 1)


@on(nics=(1, 3))
def test_both_sides_write_at_once(rig: Rig) -> None:
    rig.set_up(shard_bytes=10_000)
    link = rig.link(50_000)
    back = np.zeros(50_000, np.uint8)
    region, counter = rig.near.register(back), rig.near.counter()
    memory, _ = rig.far.memory(50_000)
    rig.far.load(memory, 77)
    transfers = [link.write(0, 0, 50_000) for _ in range(50)]
    rig.far.push(memory, region.descriptor, counter.descriptor, 50)
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(50) == 50
    link.check([(0, 0, 50_000)], 50)
    assert counter.wait(50) == 50
    assert bytes(back) == rig.far.read(memory)


@on(nics=(1, 2), apart=False)
def test_an_engine_writes_into_its_own_memory(rig: Rig) -> None:
    source = np.arange(10_000, dtype=np.uint16).view(np.uint8)
    target = np.zeros_like(source)
    counter = rig.near.counter()
    region = rig.near.register(source)
    remote = rig.near.register(target).descriptor
    for _ in range(3):
        rig.near.write(region, remote, notify=counter.descriptor).wait(SOON_S)
    assert counter.wait(3) == 3
    np.testing.assert_array_equal(target, source)


@pytest.mark.soak
@on(nics=EVERY_COUNT)
def test_long_lengths_around_powers_of_two_land_whole(rig: Rig) -> None:
    for power in range(23, 29):
        lengths = [(1 << power) + off for off in (-1, 0, 1)]
        pieces, size = laid_out(lengths)
        link = rig.link(size)
        write_all(link, pieces)
        rig.far.close_memory(link.memory)


@pytest.mark.soak
@on(nics=EVERY_COUNT)
def test_every_length_up_to_ten_thousand_lands_whole(rig: Rig) -> None:
    rig.set_up(shard_bytes=512, chunk_bytes=1500)
    for start in range(0, 10_000, 500):
        pieces, size = laid_out(range(start, start + 500))
        link = rig.link(size)
        write_all(link, pieces)
        rig.far.close_memory(link.memory)
