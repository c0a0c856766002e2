from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_engine.tools import patterns

SEEDS = st.integers(0, (1 << 64) - 1)
CHUNK = 8 << 15  # bytes that are produced at a time


@given(SEEDS, st.integers(0, 1 << 40), st.integers(0, 300), st.integers(0, 300))
def test_a_part_of_a_pattern_is_the_pattern_from_there_on(seed: int, start: int, skip: int, length: int) -> None:
    whole = patterns.pattern(seed, skip + length, start)
    np.testing.assert_array_equal(patterns.pattern(seed, length, start + skip), whole[skip:])


@pytest.mark.parametrize("start", [0, 1, 7, CHUNK - 1])
def test_chunks_join_without_a_seam(start: int) -> None:
    whole = patterns.pattern(5, 2 * CHUNK + 9, start)
    for at in (CHUNK - 8, CHUNK - 1, CHUNK, 2 * CHUNK - 3, 2 * CHUNK):
        np.testing.assert_array_equal(patterns.pattern(5, 9, start + at), whole[at : at + 9])


@given(SEEDS, st.integers(0, 100), st.integers(1, 300), st.data())
def test_any_changed_byte_is_found(seed: int, start: int, length: int, data: st.DataObject) -> None:
    view = patterns.pattern(seed, length, start)
    assert patterns.first_wrong(view, seed, start) is None
    assert patterns.count_wrong(view, seed, start) == 0
    at = data.draw(st.integers(0, length - 1))
    view[at] ^= data.draw(st.integers(1, 255))
    assert patterns.first_wrong(view, seed, start) == at
    assert patterns.count_wrong(view, seed, start) == 1


@given(SEEDS, st.integers(0, 100), st.integers(1, 300))
def test_no_byte_of_poison_passes_for_the_pattern(seed: int, start: int, length: int) -> None:
    view = np.empty(length, np.uint8)
    patterns.fill(view, seed, start, invert=True)
    assert patterns.count_wrong(view, seed, start) == length


@given(SEEDS, st.integers(1, 1 << 20))
def test_bytes_of_another_place_or_seed_do_not_match(seed: int, shift: int) -> None:
    view = patterns.pattern(seed, 64, shift)
    assert patterns.first_wrong(view, seed) is not None
    assert patterns.first_wrong(patterns.pattern(seed ^ shift, 64), seed) is not None


def test_every_byte_value_is_about_as_frequent() -> None:
    counts = np.bincount(patterns.pattern(3, 1 << 18), minlength=256)
    assert counts.min() > 850
    assert counts.max() < 1200
