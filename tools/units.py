"""Numbers for human eyes. Pure."""

from __future__ import annotations

import math

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def size(length: int) -> str:
    """A length in bytes, exactly where it is a round one: "0 B", "257 B", "64 KiB", "1.5 MiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if length >= unit:
            return f"{_digits(length / unit)} {name}"
    return f"{length} B"


def seconds(*values: float | None) -> str:
    """Durations, each in the unit that suits it: "12.3/13.1 µs", "48 µs / 2.17 ms"."""
    return _joined([_scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))) for value in values])


def bandwidth(*values: float | None) -> str:
    """Bytes per second, each in its decimal unit: "1.23/1.19 GB/s", "1.23 GB/s / 987 MB/s"."""
    return _joined([_scaled(value, _decimal("B/s")) for value in values])


def rate(*values: float | None) -> str:
    """Operations per second: "1.23 M/s"."""
    return _joined([_scaled(value, _decimal("/s")) for value in values])


_Units = tuple[tuple[float, str], ...]


def _decimal(unit: str) -> _Units:
    return (1e9, f"G{unit}"), (1e6, f"M{unit}"), (1e3, f"k{unit}"), (1.0, unit)


def _scaled(value: float | None, units: _Units) -> tuple[str, str] | None:
    """Digits and unit, the largest of which the value is at least one; below all of them the last."""
    if value is None:
        return None
    factor, unit = next((entry for entry in units if value >= entry[0]), units[-1])
    return _digits(value / factor), unit


def _joined(texts: list[tuple[str, str] | None]) -> str:
    """With one unit at the end where all have the same."""
    names = {text[1] for text in texts if text}
    if not names:
        return "-"
    if len(names) == 1:
        return "/".join(text[0] if text else "-" for text in texts) + f" {names.pop()}"
    return " / ".join(" ".join(text) if text else "-" for text in texts)


def _digits(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(decimals, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
