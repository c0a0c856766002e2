"""Sets of CPUs in the two notations that Linux and hwloc use. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MOST_CPUS = 1 << 16  # far above any machine; a set that claims more is damaged


def from_list(text: str) -> frozenset[int]:
    """Linux's notation: "0-3,8,10-11".

    Raises:
        ValueError: not such a list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < MOST_CPUS:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def to_list(cpus: Iterable[int]) -> str:
    """The inverse: {0, 1, 2, 8} becomes "0-2,8"; nothing becomes "none"."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges) or "none"


def from_bitmap(text: str) -> frozenset[int]:
    """Notation of hwloc: words of 32 bits, the highest first, zero words left empty: "0x0000ffff,,0x00000003".

    Raises:
        ValueError: not such a bitmap, or one without end ("0xf...f").
    """
    words = text.strip().split(",")
    if len(words) > MOST_CPUS // 32:
        raise ValueError("a bitmap of that many CPUs is damaged")
    cpus: set[int] = set()
    for position, word in enumerate(reversed(words)):
        bits = int(word, 16) if word else 0
        if not 0 <= bits < 1 << 32:
            raise ValueError(f"{word!r} is no word of 32 bits")
        cpus.update(32 * position + bit for bit in range(32) if bits >> bit & 1)
    return frozenset(cpus)
