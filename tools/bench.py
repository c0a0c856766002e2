"""Bandwidth, rate and latency by size."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from .loopback import Progress, measure, note, rounds_of, verify
from .results import DIRECTIONS, Exit, RowResult, TransportResult
from .session import Session
from .sweep import Case, Row
from .units import MIB

_WINDOW_BYTES = 64 * MIB  # of one round: the depth of large writes is cut to it


def plan(*, depth: int, most_bytes: int) -> list[Row]:
    """A row for each power of four from 1 byte to `most_bytes`: `depth` writes in a round where they fit."""
    sizes = [4**i for i in range(20) if 4**i <= most_bytes]
    counts = [max(1, min(depth, _WINDOW_BYTES // size)) for size in sizes]
    return [
        Row((Case("write", size, count, seed=i),)) for i, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def run_bench(
    session: Session,
    rows: list[Row],
    result: TransportResult,
    *,
    bidirectional: bool,
    measure_s: float,
    progress: Progress,
) -> None:
    """Measures every row in both directions, and both at once when `bidirectional`; fills in `result`.

    Latency is that of single writes, also where bandwidth and rate are those of many in flight. At last every byte of
    one more round is verified.

    Raises:
        TransferEngineError, RemoteFailure, ProtocolError: a step failed.
    """
    begin = time.monotonic()
    try:
        for finished, row in enumerate(rows):
            case = row.head
            found = RowResult(case.operation, case.size_bytes, case.count, 0)
            result.rows.append(found)
            for direction in DIRECTIONS:
                progress(direction, finished)
                single = measure(session, direction, replace(case, count=1), measure_s, result)
                many = measure(session, direction, case, measure_s, result)
                found.measured[direction] = {**many, "latency": single["latency"]}
            if bidirectional:
                progress("both at once", finished)
                found.measured["both"] = _both(session, case, found, measure_s, result)
            for direction in DIRECTIONS:
                verify(session, direction, case, found, result)
    finally:
        result.elapsed_s = time.monotonic() - begin
        if result.mismatches:
            result.status = Exit.WRONG_BYTES


def _both(session: Session, case: Case, found: RowResult, measure_s: float, result: TransportResult) -> dict[str, Any]:
    """Both sides send at once; together they have moved twice the bytes when the slower has ended."""
    for outgoing in (True, False):
        session.together(outgoing, "load", "prepare", case)
    seconds_a_round = case.payload_bytes / max(found.measured["outgoing"]["bytes_per_s"], 1.0)
    rounds = rounds_of(measure_s, seconds_a_round, 4)
    mine, theirs = session.together(True, "exchange", "exchange", case, rounds)
    for side, direction in ((mine, "incoming"), (theirs, "outgoing")):
        note(side["mismatch"], case, direction, result)
    elapsed = max(mine["seconds"], theirs["seconds"])
    return {
        "seconds": elapsed,
        "bytes_per_s": 2 * rounds * case.payload_bytes / elapsed,
        "operations_per_s": 2 * rounds * case.count / elapsed,
    }
