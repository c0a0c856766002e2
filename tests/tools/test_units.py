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
        ((1.2e-5, 1.5e-3), "0.012/1.5 ms"),
        ((2.0, None), "2/- s"),
        ((None, None), "-"),
        ((0.0,), "0 ns"),
    ],
)
def test_durations_share_one_unit(values: tuple[float | None, ...], text: str) -> None:
    assert units.seconds(*values) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [((1.234e9, 9.87e8), "1.23/0.987 GB/s"), ((12.3e6,), "12.3 MB/s"), ((999.0,), "999 B/s"), ((0.0,), "0 B/s")],
)
def test_bandwidths_share_one_unit(values: tuple[float, ...], text: str) -> None:
    assert units.bandwidth(*values) == text


def test_rates() -> None:
    assert units.rate(1.5e6) == "1.5 M/s"


@given(st.floats(1e-9, 1e4))
def test_a_duration_is_shown_to_within_a_percent(value: float) -> None:
    digits, unit = units.seconds(value).split()
    scale = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert float(digits) * scale == pytest.approx(value, rel=0.01)
