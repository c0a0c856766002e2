"""How results look: rich tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import transfer_engine as te

from . import units
from .loopback import Progress as Moved
from .results import DIRECTIONS, Exit, Mismatch, RowResult, TransportResult

_PLAIN_WIDTH = 120  # where there is no terminal whose width could be asked, and no COLUMNS
_ANY_WIDTH = 1000
_CLOSE = (0, 1, 0, 0)  # around cells: for 80 columns


class _Trimmed:
    """A text file that gets no blanks at the ends of lines: tables are filled up with them."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r"[ \t]+(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def console() -> Console:
    """For standard output; colours only on a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False, soft_wrap=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) else _PLAIN_WIDTH
    return Console(highlight=False, soft_wrap=False, width=width, file=cast(TextIO, _Trimmed(sys.stdout)))


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Moved]:
    """A function that moves the bar. Nothing is shown unless standard error is a terminal."""
    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda _text, _finished: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda text, finished: bar.update(task, description=f"{label}: {text}", completed=finished)


def show_loopback(out: Console, result: TransportResult) -> None:
    """The table of a sweep, its mismatches, and one line that sums up."""
    if result.rows:
        table = _loopback_table(result)
        _print_whole(out, table if _width_of(out, table) <= out.width else _narrow_table(result))
    for mismatch in result.mismatches:
        out.print(f"[bold red]wrong[/] {escape(mismatch_text(mismatch))}", soft_wrap=True)
    _last_line(out, result)


def _loopback_table(result: TransportResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=_title(result), title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("size", "count", "bandwidth out/in", "latency p50 out/in", "p99 out/in", "verified"):
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in result.rows:
        if before not in (None, row.operation):
            table.add_section()
        before = row.operation
        latency = [_measured(row, direction).get("latency", {}) for direction in DIRECTIONS]
        table.add_row(
            row.operation,
            size_text(row),
            str(row.count),
            _throughput(row, *DIRECTIONS),
            units.seconds(*(values.get("p50") for values in latency)),
            units.seconds(*(values.get("p99") for values in latency)),
            _verdict(row),
        )
    return table


def _narrow_table(result: TransportResult) -> Table:
    """The same with a line for each direction: for 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, title=_title(result), title_justify="left", title_style="bold", padding=_CLOSE)
    for name in ("", "size", "count", "way", "bandwidth", "latency\np50", "p99", "verified"):
        table.add_column(name, justify="left" if name in ("", "way") else "right", no_wrap=True)
    before = None
    for row in result.rows:
        if before not in (None, row.operation):
            table.add_section()
        before = row.operation
        for index, (direction, way) in enumerate(zip(DIRECTIONS, ("out", "in"), strict=True)):
            latency = _measured(row, direction).get("latency", {})
            first = index == 0
            table.add_row(
                *((row.operation, size_text(row), str(row.count)) if first else ("", "", "")),
                way,
                _throughput(row, direction),
                units.seconds(latency.get("p50")),
                units.seconds(latency.get("p99")),
                _verdict(row) if first else "",
            )
    return table


def _width_of(out: Console, table: Table) -> int:
    """Without its title, which may be wrapped."""
    title, table.title = table.title, None
    try:
        return Measurement.get(out, out.options.update(max_width=_ANY_WIDTH), table).maximum
    finally:
        table.title = title


def _print_whole(out: Console, table: Table) -> None:
    """Wider than the terminal rather than cut: the terminal breaks the lines then."""
    before, out.width = out.width, max(out.width, _width_of(out, table))
    out.print(table)
    out.width = before


def show_bench(out: Console, result: TransportResult) -> None:
    """One table a direction, and one line that sums up."""
    both = any("both" in row.measured for row in result.rows)
    for direction in DIRECTIONS if result.rows else ():
        table = Table(box=box.SIMPLE_HEAD, title=f"{_title(result)}: {direction}", title_justify="left", padding=_CLOSE)
        names = ("size", "in\nflight", "bandwidth", "rate", "latency\np50", "p99", "p99.9")
        for name in (*names, "both at\nonce") if both else names:
            table.add_column(name, justify="right", no_wrap=True)
        for row in result.rows:
            values = _measured(row, direction)
            latency = values.get("latency", {})
            cells = [units.size(row.size_bytes), str(row.count), units.bandwidth(values.get("bytes_per_s"))]
            cells.append(units.rate(values.get("operations_per_s")))
            cells += [units.seconds(latency.get(name)) for name in ("p50", "p99", "p99.9")]
            if both:
                cells.append(units.bandwidth(_measured(row, "both").get("bytes_per_s")))
            table.add_row(*cells)
        _print_whole(out, table)
    for mismatch in result.mismatches:
        out.print(f"[bold red]wrong[/] {escape(mismatch_text(mismatch))}", soft_wrap=True)
    _last_line(out, result)


def size_text(row: RowResult) -> str:
    """A length, or the range of lengths of a mixed row."""
    if not row.growth_bytes:
        return units.size(row.size_bytes)
    return f"{units.size(row.size_bytes)}..{units.size(row.size_bytes + row.growth_bytes * (row.count - 1))}"


def _verdict(row: RowResult) -> str:
    if row.wrong:
        return f"[bold red]{row.wrong} WRONG[/]"
    return f"{row.verified_operations} [green]ok[/]" if row.verified_operations else "-"


def _throughput(row: RowResult, *directions: str) -> str:
    """Bandwidth; where nothing but notifications moves, their rate."""
    if row.size_bytes or row.growth_bytes:
        return units.bandwidth(*(_measured(row, direction).get("bytes_per_s") for direction in directions))
    return units.rate(*(_measured(row, direction).get("operations_per_s") for direction in directions))


def _measured(row: RowResult, direction: str) -> dict[str, Any]:
    return row.measured.get(direction, {})


def _title(result: TransportResult) -> str:
    nics = ", ".join(result.local.get("nics", ()))
    return f"{result.transport} ({result.local.get('provider')}, {result.local.get('library')}), nics {escape(nics)}"


def _last_line(out: Console, result: TransportResult) -> None:
    """Failures go to standard error."""
    failed = result.error is not None and result.status != Exit.INTERRUPTED
    (Console(stderr=True, highlight=False) if failed else out).print(_summary(result), soft_wrap=True)


def _summary(result: TransportResult) -> str:
    operations = sum(row.verified_operations for row in result.rows)
    length = units.size(sum(row.verified_bytes for row in result.rows))
    done = f"{operations} operations, {length} verified in {result.elapsed_s:.1f} s"
    if result.status == Exit.OK:
        return f"[bold]{result.transport}[/]: [bold green]ok[/]: every byte right: {done}"
    if result.status == Exit.WRONG_BYTES:
        places = len(result.mismatches)
        return f"[bold]{result.transport}[/]: [bold red]WRONG BYTES[/] in {places} places; otherwise {done}"
    if result.status == Exit.INTERRUPTED:
        return f"[bold]{result.transport}[/]: interrupted; {done} before"
    reason = escape(result.error["message"]) if result.error else "unknown"
    word = "unavailable" if result.status == Exit.UNAVAILABLE else "FAILED"
    return f"[bold]{result.transport}[/]: [bold red]{word}[/]: {reason}" + (
        f"\n  before that: {done}" if operations else ""
    )


def mismatch_text(mismatch: Mismatch) -> str:
    """All that is known of a mismatch, on up to three lines."""
    case = {name: value for name, value in mismatch.case.items() if name not in ("operation", "size_bytes", "count")}
    details = ", ".join(f"{name}={value}" for name, value in case.items() if value)
    head = (
        f"{mismatch.case['operation']} of {mismatch.case['size_bytes']} bytes x {mismatch.case['count']}, "
        f"{mismatch.direction}: {mismatch.where}"
    )
    if mismatch.offset is None:
        return f"{head} ({details})"
    return (
        f"{head}: first wrong byte at offset {mismatch.offset} (of the buffer: {mismatch.buffer_offset}), "
        f"{mismatch.wrong_bytes} wrong\n  expected {_spaced(mismatch.expected)}\n  actual   {_spaced(mismatch.actual)}"
        f"\n  case: {details}"
    )


def _spaced(digits: str | None) -> str:
    return bytes.fromhex(digits or "").hex(" ")


def print_document(command: str, status: int, results: list[dict[str, Any]], **more: Any) -> None:
    """The one JSON document of a command."""
    document = {
        "schema": f"transfer-engine/{command}/1",
        "version": te.__version__,
        "ok": status == Exit.OK,
        "status": status,
        **more,
        "transports": results,
    }
    click.echo(json.dumps(document, indent=2))
