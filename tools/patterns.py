"""Seeded byte patterns: filling, inverting and checking memory. Pure: no engine, no I/O.

Byte i of pattern `seed` depends on i as a whole, so bytes that arrive at a wrong place do not match, however the place
is wrong. A word of eight bytes is a finalised multiplicative hash of its index and the seed (the constants are those of
splitmix64), and patterns are produced in chunks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_CHUNK_WORDS = 1 << 15
_INDEX = np.arange(_CHUNK_WORDS + 1, dtype=np.uint64)
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _scrambled(seed: int) -> int:
    """Neighbouring seeds give unrelated patterns."""
    word = ((seed & _MASK) + _GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


def chunks(seed: int, start: int, length: int) -> Iterator[tuple[int, Bytes]]:
    """Bytes start .. start + length of pattern `seed`, as pairs of (offset from start, bytes)."""
    base = _scrambled(seed)
    done = 0
    while done < length:
        first = start + done
        word, skip = divmod(first, 8)
        count = min(length - done, _CHUNK_WORDS * 8 - skip)
        words = _INDEX[: (skip + count + 7) // 8] * np.uint64(_GAMMA)
        words += np.uint64((base + word * _GAMMA) & _MASK)
        words ^= words >> np.uint64(30)
        words *= np.uint64(_MIX_1)
        words ^= words >> np.uint64(31)
        yield done, words.astype("<u8", copy=False).view(np.uint8)[skip : skip + count]
        done += count


def pattern(seed: int, length: int, start: int = 0) -> Bytes:
    """The bytes themselves, as a new array."""
    out = np.empty(length, np.uint8)
    fill(out, seed, start)
    return out


def fill(view: Bytes, seed: int, start: int = 0, *, invert: bool = False) -> None:
    """Writes bytes start.. of pattern `seed` over `view`.

    Args:
        view: one-dimensional.
        seed: names the pattern.
        start: the index of its first byte.
        invert: writes the complement: poison of which no byte passes for the pattern, not even by chance.
    """
    for offset, data in chunks(seed, start, len(view)):
        target = view[offset : offset + len(data)]
        if invert:
            np.invert(data, out=target)
        else:
            target[:] = data


def first_wrong(view: Bytes, seed: int, start: int = 0) -> int | None:
    """The offset of the first byte of `view` that differs from the pattern; None when all are right."""
    for offset, data in chunks(seed, start, len(view)):
        actual = view[offset : offset + len(data)]
        if not np.array_equal(actual, data):
            return offset + int(np.argmax(actual != data))
    return None


def count_wrong(view: Bytes, seed: int, start: int = 0) -> int:
    """How many bytes of `view` differ from the pattern."""
    wrong = 0
    for offset, data in chunks(seed, start, len(view)):
        wrong += int(np.count_nonzero(view[offset : offset + len(data)] != data))
    return wrong
