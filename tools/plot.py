"""A picture of a bench: bandwidth and latency by size, one panel each, all transports together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transfer_engine as te

from . import units
from .results import RowResult, TransportResult

_COLOURS = ("#1f5fa8", "#c8553d", "#3a7d44", "#7b5ea7")
_WAYS = (("outgoing", "out", "-"), ("incoming", "in", "--"), ("both", "both at once", ":"))


def require() -> Any:
    """Matplotlib's pyplot, drawing without a display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise te.ConfigError(
            "a picture needs matplotlib, which is not installed",
            operation="--plot",
            hint="pip install 'transfer_engine[plot]', or use --json and a program of your own",
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def check_target(path: Path) -> None:
    """Raises ConfigError when no picture can be written there: known before the measuring, not after it."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise te.ConfigError(f"{path}: a picture's name ends in .png, .svg or .pdf", operation="--plot")
    if not path.parent.is_dir():
        raise te.ConfigError(f"{path}: there is no folder {path.parent}", operation="--plot")


def draw(path: Path, results: Sequence[TransportResult]) -> None:
    """Writes the picture. Transports that measured nothing are left out.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    pyplot = require()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for result, colour in zip(results, _COLOURS * len(results), strict=False):
        rows = [row for row in result.rows if row.measured]
        for way, label, style in _WAYS:
            _line(left, rows, result.transport, way, "bytes_per_s", None, f"{label}", colour, style)
        for name, style in (("p50", "-"), ("p99", "--")):
            _line(right, rows, result.transport, "outgoing", "latency", name, name, colour, style)
    _finish(left, "Bandwidth", "bandwidth", lambda value, _: units.bandwidth(value) if value else "")
    _finish(
        right, "Latency of one write, out", "submission to the return of wait()", lambda value, _: units.seconds(value)
    )
    figure.suptitle(_title(results), fontsize=10, color="#444444")
    try:
        figure.savefig(path, dpi=150)
    except OSError as cause:
        raise te.ConfigError(f"{path}: {cause.strerror or cause}", operation="--plot") from None
    finally:
        pyplot.close(figure)


def _line(
    axes: Any, rows: list[RowResult], transport: str, way: str, field: str, name: str | None, label: str, colour: str,
    style: str,
) -> None:  # fmt: skip
    points = []
    for row in rows:
        value = row.measured.get(way, {}).get(field)
        value = value.get(name) if isinstance(value, dict) else value
        if value:
            points.append((row.size_bytes, value))
    if points:
        sizes, values = zip(*points, strict=True)
        axes.plot(
            sizes, values, style, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=f"{transport}, {label}"
        )


def _finish(axes: Any, title: str, label: str, text: Any) -> None:
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("bytes of one write")
    axes.set_ylabel(label)
    axes.xaxis.set_major_formatter(lambda value, _: units.size(int(value)) if value >= 1 else "")
    axes.yaxis.set_major_formatter(text)
    axes.yaxis.set_minor_formatter(lambda _value, _position: "")
    axes.tick_params(axis="x", labelrotation=45)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)


def _title(results: Sequence[TransportResult]) -> str:
    parts = []
    for result in results:
        if result.local:
            nics = ", ".join(result.local.get("nics", ()))
            parts.append(
                f"{result.transport}: {result.local.get('provider')}, {result.local.get('library')}, NICs {nics}"
            )
    return f"transfer_engine {te.__version__}   " + "   ".join(parts)
