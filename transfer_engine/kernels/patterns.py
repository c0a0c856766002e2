"""What pattern.cuh computes, for the host's side of tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

_MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finaliser of SplitMix64, of one word."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def pattern_word(seed: int, round_: int, index: int) -> int:
    """One word of the pattern."""
    return mixed((mixed((mixed(seed & _MASK) + round_) & _MASK) + index) & _MASK)


def pattern(seed: int, round_: int, words: int) -> numpy.ndarray[Any, numpy.dtype[Any]]:
    """The first `words` words of a round's pattern, as uint64."""
    import numpy as np

    start = mixed((mixed(seed & _MASK) + round_) & _MASK)
    x = np.arange(words, dtype=np.uint64) + np.uint64((start + 0x9E3779B97F4A7C15) & _MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
