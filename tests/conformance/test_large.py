"""Lengths beyond 31 and 32 bits. The source is sparse: one pattern mapped again and again, with a mark in each piece
that says where it belongs, so that a piece in another's place is seen."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import POISON, SOON_S, Rig, on, pattern

PIECE = 16 << 20
GUARD = 4096
MARK_EVERY = 1 << 20
LENGTHS = [(1 << 31) - 1, (1 << 31) + 1, (1 << 32) + 4096]

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
FIXED = 0x10
NO_RESERVE = 0x4000


class Sparse:
    """`length` bytes in little memory: private mappings of one piece, of which only the marked pages are ours."""

    def __init__(self, length: int) -> None:
        self.mapped = (length + PIECE - 1) // PIECE * PIECE
        anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self.pointer = libc.mmap(None, self.mapped, mmap.PROT_READ | mmap.PROT_WRITE, anywhere, -1, 0)
        assert self.pointer not in (None, ctypes.c_void_p(-1).value)
        file = os.memfd_create("pattern")
        os.write(file, bytes(pattern(1, PIECE)))
        for at in range(0, self.mapped, PIECE):
            there = libc.mmap(
                self.pointer + at, PIECE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | FIXED, file, 0
            )
            assert there == self.pointer + at
        os.close(file)
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.mapped).from_address(self.pointer))
        self.bytes[: self.mapped].view(np.uint64)[:: MARK_EVERY // 8] = np.arange(self.mapped // MARK_EVERY)

    def close(self) -> None:
        del self.bytes
        libc.munmap(self.pointer, self.mapped)


@pytest.fixture
def sparse(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Sparse] = []

    def make(length: int) -> Sparse:
        made.append(Sparse(length))
        return made[-1]

    yield make
    for source in made:
        source.close()


def free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def write_and_check(rig: Rig, sparse: Any, length: int) -> None:
    if free_bytes() < length + (1 << 30):
        pytest.skip(f"{length} bytes of memory are not free")
    source = sparse(length)
    target = np.zeros(length + 2 * GUARD, np.uint8)
    target[:GUARD] = target[-GUARD:] = POISON
    region = rig.near.register((source.pointer, length, "cpu"))
    owner = rig.far.engine
    landing, counter = owner.register(target), owner.counter()
    transfer = rig.near.write(
        region, landing.descriptor[GUARD : GUARD + length], notify=counter.descriptor, timeout_s=100, flush=False
    )
    transfer.wait(100)
    assert counter.wait(1, timeout_s=SOON_S) == 1
    for at in range(0, length, 1 << 28):
        end = min(at + (1 << 28), length)
        assert np.array_equal(target[GUARD + at : GUARD + end], source.bytes[at:end]), f"between {at} and {end}"
    assert (target[:GUARD] == POISON).all()
    assert (target[-GUARD:] == POISON).all()
    region.close(SOON_S)
    landing.close(SOON_S)
    assert isinstance(counter, te.Counter)


@on(nics=(2,), apart=False, transports=("shm",))
def test_a_write_of_more_than_two_gigabytes_lands_whole(rig: Rig, sparse: Any) -> None:
    write_and_check(rig, sparse, LENGTHS[1])


@pytest.mark.soak
@on(nics=(1, 3), apart=False)
@pytest.mark.parametrize("length", LENGTHS)
def test_writes_around_and_beyond_31_and_32_bits_land_whole(rig: Rig, sparse: Any, length: int) -> None:
    write_and_check(rig, sparse, length)


@pytest.mark.soak
@on(nics=(2,), apart=False)
def test_pages_beyond_32_bits_of_offset_land_whole(rig: Rig, sparse: Any) -> None:
    length, page = LENGTHS[-1], 4096
    if free_bytes() < length + (1 << 30):
        pytest.skip(f"{length} bytes of memory are not free")
    source = sparse(length)
    target = np.zeros(length, np.uint8)
    region = rig.near.register((source.pointer, length, "cpu"))
    landing, counter = rig.far.engine.register(target), rig.far.engine.counter()
    last = length // page - 1
    sources = np.array([0, 1, last, last - 256, last // 2], np.int64)
    targets = np.array([last, last - 1, 0, 7, last // 2 + 1], np.int64)
    rig.near.write_pages(
        te.Pages(region, sources, page), te.Pages(landing.descriptor, targets, page), notify=counter.descriptor
    ).wait(SOON_S)
    assert counter.wait(5, timeout_s=SOON_S) == 5
    for s, t in zip(sources.tolist(), targets.tolist(), strict=True):
        assert np.array_equal(target[t * page :][:page], source.bytes[s * page :][:page])
    region.close(SOON_S)
