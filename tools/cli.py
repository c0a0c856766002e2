"""`transfer-engine`: the command line that proves that two nodes, or two processes, can talk."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from rich.console import Console

import transfer_engine as te

from . import bench as benchmark
from . import plot, reach, report, sweep
from .doctor.command import doctor
from .loopback import Progress, run_sweep
from .results import Exit, TransportResult
from .runner import Options, chosen_transports, refuse_one_process, run_transport
from .serve import serve_clients
from .session import Session
from .sweep import Row
from .topo import topo
from .wording import told

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Show = Callable[[Console, TransportResult], None]


class _Work(Protocol):
    """What a command does in a session."""

    def __call__(self, session: Session, result: TransportResult, *, progress: Progress) -> None: ...


def _address(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> te.Address | None:
    """The address, alone or in the whole line that `serve` printed."""
    given = [word for text in words for word in text.split() if word not in _OF_THE_LINE]
    if not given:
        if words:
            raise click.BadParameter(f"{' '.join(words)!r} has no address. {_WHOLE_LINE}", ctx, param)
        return None
    if len(given) > 1:
        raise click.BadParameter(
            f"one address, not {len(given)} words: {' '.join(given)[:80]}. {_WHOLE_LINE}", ctx, param
        )
    [text] = given
    if not text.startswith("te1:"):
        more = " A name or an IP address is not enough: it says nothing of ports and engine." if _is_host(text) else ""
        raise click.BadParameter(f"{text[:40]!r} is no address of this kind.{more} {_WHOLE_LINE}", ctx, param)
    try:
        return te.Address.from_text(text)
    except te.TransferEngineError as error:
        raise click.BadParameter(f"{error.message}. {_WHOLE_LINE}", ctx, param) from None


_OF_THE_LINE = ("transfer-engine", "loopback", "bench")
_WHOLE_LINE = "Copy the whole line that `transfer-engine serve` printed on the other node: addresses begin with te1:"


def _is_host(text: str) -> bool:
    return "." in text or ":" in text or text.isalnum()


class _Bytes(click.IntRange):
    """A number of bytes, as settings take it: K, M or G behind it is a power of 1024."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str):
            shift = {"K": 10, "M": 20, "G": 30}.get(value[-1:].upper(), 0)
            if shift and value[:-1].isdecimal():
                value = int(value[:-1]) << shift
        return int(super().convert(value, param, ctx))


class _Seconds(click.FloatRange):
    """A range of seconds. Comparisons let nan pass: here it is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return seconds


_EXIT_STATUSES = """\b
Exit status:
    0  all was right, every byte
    1  wrong bytes
    2  wrong usage or settings
    3  a transport is not available
    4  the other side was lost or fell silent, or the transport failed
  130  interrupted
"""

_LOOPBACK_JSON = """\b
The document that --json prints; times are in seconds:
{"schema": "transfer-engine/loopback/1", "version", "ok", "status", "transports": [
  {"transport", "ok", "status", "elapsed_s", "error": null | {"kind", "message"},
   "local" and "remote": {"version", "transport", "provider", "library", "nics"},
   "rows": [
     {"operation", "size_bytes", "count", "growth_bytes",
      "measured": {"outgoing" and "incoming": {
        "seconds", "bytes_per_s", "operations_per_s",
        "latency": {"samples", "mean", "best", "p50", "p90", "p99", "p99.9", "worst"}}},
      "verified_operations", "verified_bytes", "wrong"}],
   "mismatches": [
     {"case", "direction", "where", "offset", "buffer_offset", "wrong_bytes",
      "expected", "actual"}]}]}
"""


def _count_or_names(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    return int(value) if value is not None and value.isdecimal() else value


_nics = click.option(
    "--nics",
    callback=_count_or_names,
    metavar="N|NAMES",
    help="How many NICs to use, or their names, separated by commas.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")


def _common(function: _Function) -> _Function:
    """What all measuring commands take."""
    options = (
        click.argument("address", nargs=-1, callback=_address, metavar="[ADDRESS]"),
        click.option(
            "--transport", "transports", multiple=True, metavar="NAME",
            help="efa, cx7, tcp or shm; may be repeated.  [default: $TE_TRANSPORT, else tcp and shm]",
        ),
        _nics,
        click.option(
            "--timeout", "timeout_s", type=_Seconds(0.5, 3600), default=30.0, show_default=True,
            help="Seconds after which a single step counts as failed.",
        ),
        _as_json,
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=_EXIT_STATUSES)
@click.version_option(te.__version__, prog_name="transfer-engine")
def group() -> None:
    """Prove and measure what transfer_engine does between two processes or two nodes."""


@group.command(epilog=_LOOPBACK_JSON)
@_common
@click.option("--quick", is_flag=True, help="Fewer sizes: for continuous integration.")
@click.option(
    "--max-size", "most_bytes", type=_Bytes(1), default=None, metavar="BYTES",
    help="Bytes that one operation moves at most: leaves out larger ones, for slow networks. K, M or G may stand "
    "behind the number.  [default: all]",
)  # fmt: skip
@click.option(
    "--flip-byte", "flip", type=click.Choice((*sweep.OPERATIONS, "guard")), is_flag=False, flag_value="write",
    hidden=True, help="A test hook: damage one received byte before it is verified.",
)  # fmt: skip
def loopback(
    address: te.Address | None,
    transports: tuple[str, ...],
    nics: int | str | None,
    timeout_s: float,
    as_json: bool,
    quick: bool,
    most_bytes: int | None,
    flip: str | None,
) -> int:
    """Write both ways between two processes, and compare every byte.

    Contiguous writes, batches, paged writes and messages of many lengths. Without ADDRESS a second process is started
    on this machine. With the ADDRESS that `transfer-engine serve` printed on another node, the two nodes are tested.

    Columns: "out" is from this side to the other, "in" the reverse. Latency is from submission to the return of
    wait(), of all pieces of a round; bandwidth is of several rounds in flight, up to the last completion and the
    receiver's counter. "verified" counts the operations of which every byte was compared, also at the odd sizes and
    offsets that a row covers besides its own.
    """
    flip = flip or _flip_of(os.environ.get("TE_TEST_FLIP_BYTE"))
    options = Options(address, chosen_transports(transports, address), nics, timeout_s, flip)
    rows = sweep.plan(quick=quick, most_bytes=most_bytes)
    steps = 2 * sum(len(row.cases) for row in rows)

    def work(session: Session, result: TransportResult, *, progress: Progress) -> None:
        run_sweep(session, rows, result, measure_s=0.02 if quick else 0.08, progress=progress)

    return _run("loopback", options, rows, steps, work, None if as_json else report.show_loopback)


@group.command()
@_common
@click.option("--depth", type=click.IntRange(1, 1024), default=16, show_default=True, help="Writes in flight.")
@click.option(
    "--max-size", "most_bytes", type=_Bytes(1, 1 << 30), default=64 << 20, show_default="64M", metavar="BYTES",
    help="Bytes of the largest write; K, M or G may stand behind the number.",
)  # fmt: skip
@click.option("--seconds", type=_Seconds(0.01, 60), default=0.2, show_default=True, help="For each measurement.")
@click.option("--bidirectional", is_flag=True, help="Measure both directions at once, too.")
@click.option(
    "--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png",
    help="Draw bandwidth and latency by size (needs matplotlib).",
)  # fmt: skip
def bench(
    address: te.Address | None,
    transports: tuple[str, ...],
    nics: int | str | None,
    timeout_s: float,
    as_json: bool,
    depth: int,
    most_bytes: int,
    seconds: float,
    bidirectional: bool,
    picture: Path | None,
) -> int:
    """Measure bandwidth, rate and latency by size, in both directions.

    Without ADDRESS a second process is started on this machine. With the ADDRESS that `transfer-engine serve` printed
    on another node, the two nodes are measured. Latency is of one write at a time, from submission to the return of
    wait(). One round of each size is verified byte by byte.

    --json prints one document as `loopback` does, of schema "transfer-engine/bench/1"; with --bidirectional, "measured"
    has "both" as well, which counts the bytes of both directions.
    """
    if picture is not None:
        plot.check_target(picture)
        plot.require()
    options = Options(address, chosen_transports(transports, address), nics, timeout_s)
    rows = benchmark.plan(depth=depth, most_bytes=most_bytes)

    def work(session: Session, result: TransportResult, *, progress: Progress) -> None:
        benchmark.run_bench(session, rows, result, bidirectional=bidirectional, measure_s=seconds, progress=progress)

    return _run("bench", options, rows, len(rows), work, None if as_json else report.show_bench, picture)


@group.command()
@click.option("--transport", metavar="NAME", help="efa, cx7, tcp or shm.  [default: the best that works here]")
@_nics
@click.option(
    "--host", metavar="NAME", help="A name or IP address of this host that other nodes reach; it chooses the NIC (tcp)."
)
@click.option("--once", is_flag=True, help="End after the first client.")
@_as_json
def serve(transport: str | None, nics: int | str | None, host: str | None, once: bool, as_json: bool) -> int:
    """Wait for `loopback` and `bench` on other nodes.

    One client at a time. The first line of standard output is the command to paste there, the second says where this
    side listens; with --json, one line: {"address": "te1:...", "transport", "nics", "listens"}. Ports are free ones,
    and part of that address; TE_PORTS=LOW-HIGH keeps them in a range, for firewalls.
    """
    if host is not None:
        if nics is not None:
            raise click.UsageError("--host and --nics both choose the NIC: give one of them")
        transport, nics = transport or "tcp", reach.advertised(host)
    refuse_one_process(transport or os.environ.get("TE_TRANSPORT"))
    with te.Engine(transport, nics=nics) as engine:
        address = str(engine.address)
        if reach.only_here(engine.address):
            click.echo(f"note: only this host can reach {engine.address.nics[0]} (loopback)", err=True)
        if as_json:
            listens = list(engine.address.nics)
            document = {
                "address": address,
                "transport": engine.transport,
                "nics": list(engine.nics),
                "listens": listens,
            }
            click.echo(json.dumps(document))
        else:
            click.echo(f"transfer-engine loopback {address}")
            places = zip(engine.nics, engine.address.nics, strict=True)
            click.echo(f"serving {engine.transport} on {', '.join(f'{nic} at {place}' for nic, place in places)}")
        sys.stdout.flush()
        return serve_clients(engine, once=once, log=lambda text: click.echo(text, err=True))


group.add_command(doctor)
group.add_command(topo)


def _run(
    command: str,
    options: Options,
    rows: list[Row],
    steps: int,
    work: _Work,
    show: _Show | None,
    picture: Path | None = None,
) -> int:
    """Each transport in turn, then the verdict; without `show` a JSON document at the end."""
    out = report.console()
    results: list[TransportResult] = []
    for transport in options.transports:
        with report.progress_bar(transport, steps) as progress:
            step = functools.partial(work, progress=progress)
            result = run_transport(options, transport, sweep.buffer_bytes(rows), step)
        results.append(result)
        if show is not None:
            show(out, result)
        elif result.error is not None and result.status != Exit.INTERRUPTED:
            click.echo(f"error: {transport}: {result.error['message']}", err=True)
        if result.status in (Exit.INTERRUPTED, Exit.USAGE):
            break
    if picture is not None and any(result.rows for result in results):
        plot.draw(picture, results)
        click.echo(f"picture: {picture}", err=True)
    status = Exit.gravest([result.status for result in results])
    if show is None:
        report.print_document(command, status, [result.to_dict() for result in results])
    return status


def _flip_of(value: str | None) -> str | None:
    """The environment's form of --flip-byte: "1", or what to damage."""
    return None if value in (None, "", "0") else "write" if value == "1" else value


def main() -> None:
    """The console script."""
    try:
        status = group.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.USAGE)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(Exit.INTERRUPTED)
    except te.TransferEngineError as error:
        click.echo(f"error: {told(error)}", err=True)
        sys.exit(Exit.UNAVAILABLE if isinstance(error, te.TransportUnavailable) else Exit.USAGE)
    sys.exit(status if isinstance(status, int) else Exit.OK)


if __name__ == "__main__":
    main()
