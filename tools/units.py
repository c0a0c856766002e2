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
    """Durations with one unit for all: "12.3/13.1 µs"."""
    known = [value for value in values if value is not None]
    scale, unit = 1.0, "s"
    for limit, factor, name in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if known and max(known) < limit:
            scale, unit = factor, name
            break
    return _joined([value if value is None else value * scale for value in values], unit)


def bandwidth(*values: float | None) -> str:
    """Bytes per second with one decimal unit for all: "1.23/1.19 GB/s"."""
    return _decimal(values, "B/s")


def rate(*values: float | None) -> str:
    """Operations per second: "1.23 M/s"."""
    return _decimal(values, "/s")


def _decimal(values: tuple[float | None, ...], unit: str) -> str:
    known = [value for value in values if value is not None]
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if known and max(known) >= factor:
            return _joined([value if value is None else value / factor for value in values], prefix + unit)
    return _joined(list(values), unit)


def _joined(values: list[float | None], unit: str) -> str:
    if all(value is None for value in values):
        return "-"
    return "/".join("-" if value is None else _digits(value) for value in values) + f" {unit}"


def _digits(value: float) -> str:
    """Three digits that count, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(decimals, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
