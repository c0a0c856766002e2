"""What the correctness sweep does: operations, sizes, counts, offsets, page tables, seeds. Pure: no engine, no I/O.

A Case is all that both sides need to know of one operation. From it each of them derives where every byte comes from
and where it must land, so that nothing but the case crosses the network.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .units import GIB, KIB, MIB

GUARD_BYTES = 4096  # before the first and behind the last byte of a target: a page, so that offset 0 is page-aligned
GAP_BYTES = 64  # guard between neighbouring targets of one case
OPERATIONS = ("write", "batch", "pages", "message")
_GUARD_SEED = 0x6775617264  # "guard"


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` contiguous bytes: from where in the source buffer, to where in the target buffer."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the target window and the pattern that it must hold at the end; `piece` is None for guards."""

    start: int
    length: int
    seed: int
    pattern_start: int
    piece: int | None


@dataclass(frozen=True, slots=True)
class Case:
    """One operation. Everything else follows from these fields.

    Attributes:
        operation: "write" (`count` writes in flight), "batch" (one batch of `count`), "pages" (one paged write), or
            "message" (`count` messages in order).
        size_bytes: length of the first piece, and of each page.
        count: pieces: writes, pages or messages.
        growth_bytes: piece i is `size_bytes + i * growth_bytes` long (not for pages).
        source_offset: where the source's first byte lies, from a page boundary.
        target_offset: the same for the target.
        source_stride: pages only: distance between page slots in the source; None is `size_bytes`.
        target_stride: the same for the target.
        index_bytes: pages only: 4 or 8, the width of the page indices.
        seed: names the pattern of its bytes, and the permutation of its pages.
    """

    operation: str
    size_bytes: int
    count: int = 1
    growth_bytes: int = 0
    source_offset: int = 0
    target_offset: int = 0
    source_stride: int | None = None
    target_stride: int | None = None
    index_bytes: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = [value for field, value in self.to_dict().items() if field != "operation" and value is not None]
        if self.operation not in OPERATIONS or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"no such case: {self.to_dict()}")
        if self.count < 1 or self.index_bytes not in (4, 8) or (self.is_paged and not self.size_bytes):
            raise ValueError(f"no such case: {self.to_dict()}")
        if self.is_paged and min(self.source_step, self.target_step) < self.size_bytes:
            raise ValueError(f"pages that overlap: {self.to_dict()}")
        if max(numbers, default=0) > GIB * GIB:
            raise ValueError(f"numbers out of proportion: {self.to_dict()}")

    @property
    def is_paged(self) -> bool:
        """One paged write."""
        return self.operation == "pages"

    @property
    def source_step(self) -> int:
        """Distance between page slots of the source."""
        return self.size_bytes if self.source_stride is None else self.source_stride

    @property
    def target_step(self) -> int:
        """Distance between page slots of the target."""
        return self.size_bytes if self.target_stride is None else self.target_stride

    @property
    def payload_bytes(self) -> int:
        """All bytes that one round moves."""
        return self.count * self.size_bytes + self.growth_bytes * self.count * (self.count - 1) // 2

    @property
    def notifications(self) -> int:
        """By how much one round raises the receiver's counter."""
        return 0 if self.operation == "message" else self.count

    def to_dict(self) -> dict[str, Any]:
        """For a control message."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Case:
        """The inverse of `to_dict`.

        Raises:
            ValueError, TypeError: not a case.
        """
        return cls(**values)


def page_tables(case: Case) -> tuple[list[int], list[int]]:
    """The slots of a paged case: source[i] goes to target[i]. Permuted, distinct, a quarter of the slots left out.

    A round over all pages in order would not tell a lost index from a kept one.
    """
    slots = case.count + max(1, case.count // 4)
    random = np.random.default_rng(case.seed)
    source, target = random.permutation(slots)[: case.count], random.permutation(slots)[: case.count]
    return source.tolist(), target.tolist()


def pieces(case: Case) -> list[Piece]:
    """Where every byte comes from and goes to, in the order of the operation."""
    source, target = case.source_offset, GUARD_BYTES + case.target_offset
    if case.is_paged:
        return [
            Piece(source + s * case.source_step, target + t * case.target_step, case.size_bytes)
            for s, t in zip(*page_tables(case), strict=True)
        ]
    found = []
    for i in range(case.count):
        length = case.size_bytes + i * case.growth_bytes
        found.append(Piece(source, target, length))
        source += length
        target += length + GAP_BYTES
    return found


def spans(case: Case) -> tuple[int, int]:
    """Bytes of the source and of the target buffer that the case looks at, guards included."""
    listed = pieces(case)
    source = max(piece.source + piece.length for piece in listed)
    target = max(piece.target + piece.length for piece in listed)
    return source, target + GUARD_BYTES


def segments(case: Case) -> Iterator[Segment]:
    """The whole target window from its first byte to its last, without holes or overlaps."""
    guard_seed = case.seed ^ _GUARD_SEED
    position = 0
    order = sorted(enumerate(pieces(case)), key=lambda entry: (entry[1].target, entry[1].length))
    for index, piece in order:
        if piece.target > position:
            yield Segment(position, piece.target - position, guard_seed, position, None)
        yield Segment(piece.target, piece.length, case.seed, piece.source, index)
        position = piece.target + piece.length
    yield Segment(position, GUARD_BYTES, guard_seed, position, None)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: `cases[0]` is measured, all are verified."""

    cases: tuple[Case, ...]

    @property
    def head(self) -> Case:
        """The case that is measured and gives the row its name."""
        return self.cases[0]


def plan(*, quick: bool, seed: int = 1, most_bytes: int | None = None) -> list[Row]:
    """The sweep: a subset that still has every kind of operation when `quick`; no row of more than `most_bytes`."""
    seeds = itertools.count(seed * 1_000_003)
    rows = [*_writes(quick), *_in_flight(quick), *_paged(quick), *_messages(quick)]
    if most_bytes is not None:
        rows = [cases for cases in rows if cases[0].payload_bytes <= most_bytes]
    return [Row(tuple(dataclasses.replace(case, seed=next(seeds)) for case in row)) for row in rows]


def buffer_bytes(rows: list[Row]) -> tuple[int, int]:
    """Lengths of the source and target buffers in which all cases of a sweep fit."""
    needs = [spans(case) for row in rows for case in row.cases]
    return max(source for source, _ in needs), max(target for _, target in needs)


def _writes(quick: bool) -> Iterator[list[Case]]:
    """One write at a time. A row is named for its power of two and takes in the sizes down to the row before."""
    yield [Case("write", 0), Case("write", 0, source_offset=5, target_offset=3)]
    steps = (1, 256, 4 * KIB, 64 * KIB, MIB, 8 * MIB) if quick else tuple(4**i for i in range(14))
    before = 0
    for top in steps:
        cases = [Case("write", top)]
        if top > 1:
            cases.append(Case("write", top, source_offset=1, target_offset=3))
        if top <= 16 * MIB:
            cases.append(Case("write", top + 1, source_offset=7))
        if top > 4:
            cases.append(Case("write", top - 1, target_offset=5))
        half = top // 2
        if half > before and not quick:
            cases += [Case("write", half), Case("write", half + 1, source_offset=2, target_offset=1)]
            cases.append(Case("write", half * 3 // 2 + 1, source_offset=13, target_offset=11))
        before = top
        yield cases


def _in_flight(quick: bool) -> Iterator[list[Case]]:
    """Several writes at once, on their own and as batches."""
    shapes = [(256, 64), (64 * KIB, 16)] if quick else [(1, 3), (256, 256), (4 * KIB, 64), (64 * KIB, 32), (MIB, 16)]
    for operation in ("write", "batch"):
        for size, count in shapes:
            cases = [Case(operation, size, count), Case(operation, size - 1, count, source_offset=3, target_offset=1)]
            if size < MIB and not quick:
                cases += [Case(operation, size + 1, few, source_offset=few) for few in (2, 7)]
            yield cases
        yield [Case(operation, 0, 33, growth_bytes=257), Case(operation, 0, 20, growth_bytes=1, target_offset=1)]


def _paged(quick: bool) -> Iterator[list[Case]]:
    """Permuted page tables; page slots further apart than a page, at odd distances too."""
    shapes = [(4 * KIB, 64), (32 * KIB, 16)] if quick else [(1, 100), (576, 512), (4 * KIB, 512), (32 * KIB, 128)]
    for size, count in shapes:
        yield [
            Case("pages", size, count),
            Case("pages", size, count, source_stride=size + 3, target_stride=size + 13, index_bytes=4),
            Case("pages", size, count, target_stride=2 * size, source_offset=9, target_offset=5),
            *([] if quick else [Case("pages", size + 1, count, source_offset=1, index_bytes=4)]),
            *([] if quick else [Case("pages", size, few, target_offset=few) for few in (1, 2, 17)]),
        ]
    if not quick:
        yield [
            Case("pages", MIB, 16),
            Case("pages", MIB - 1, 16, source_stride=MIB + 1, target_stride=MIB + 7),
            Case("pages", MIB, 3, source_offset=1, target_offset=1, index_bytes=4),
        ]


def _messages(quick: bool) -> Iterator[list[Case]]:
    """In order, one after the other."""
    shapes = [(0, 16), (1024, 16), (MIB, 2)] if quick else [(0, 64), (1, 64), (KIB, 64), (64 * KIB, 32), (MIB, 8)]
    for size, count in shapes:
        cases = [Case("message", size, count)]
        if size > 1:
            cases.append(Case("message", size - 1, min(count, 3)))
        if 1 < size < MIB:
            cases.append(Case("message", size + 1, min(count, 5)))
        yield cases
    yield [Case("message", 0, 60, growth_bytes=701)]
