from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_engine.tools import units


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        (1 << 30, "1 GiB"),
    ],
)
def test_lengths(length: int, text: str) -> None:
    assert units.size(length) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((2.5e-8,), "25 ns"),
        ((1.234e-5,), "12.3 µs"),
        ((1.2e-5, 1.34e-5), "12/13.4 µs"),
        ((4.8e-5, 2.17e-3), "48 µs / 2.17 ms"),
        ((2.0, None), "2/- s"),
        ((2e-3, None, 2.0), "2 ms / - / 2 s"),
        ((None, None), "-"),
        ((0.0,), "0 ns"),
    ],
)
def test_durations_share_a_unit_where_it_suits_all(values: tuple[float | None, ...], text: str) -> None:
    assert units.seconds(*values) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.234e9, 1.19e9), "1.23/1.19 GB/s"),
        ((1.234e9, 9.87e8), "1.23 GB/s / 987 MB/s"),
        ((12.3e6,), "12.3 MB/s"),
        ((999.0,), "999 B/s"),
        ((0.0,), "0 B/s"),
    ],
)
def test_bandwidths_share_a_unit_where_it_suits_all(values: tuple[float, ...], text: str) -> None:
    assert units.bandwidth(*values) == text


def test_rates() -> None:
    assert units.rate(1.5e6) == "1.5 M/s"


@given(st.floats(1e-9, 1e4))
def test_a_duration_is_shown_to_within_a_percent(value: float) -> None:
    digits, unit = units.seconds(value).split()
    scale = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert float(digits) * scale == pytest.approx(value, rel=0.01)
