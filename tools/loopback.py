"""The correctness sweep: every case in both directions, first measured, then verified byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .results import DIRECTIONS, Exit, Mismatch, RowResult, TransportResult
from .session import Session
from .sweep import Case, Row

_MOST_MISMATCHES = 10  # then the sweep ends: more say nothing new
_PILOT_ROUNDS = 2
_MOST_ROUNDS = 2000

Progress = Callable[[str, int], None]


def run_sweep(
    session: Session, rows: list[Row], result: TransportResult, *, measure_s: float, progress: Progress
) -> None:
    """Runs the sweep and notes everything in `result`, also when it ends early.

    Args:
        session: to the other side.
        rows: of `sweep.plan`.
        result: is filled in.
        measure_s: about how long each of the two measurements of a row and direction may take.
        progress: called with what comes next and the number of finished verifications.

    Raises:
        TransferEngineError, RemoteFailure, ProtocolError: a step failed.
    """
    begin = time.monotonic()
    finished = 0
    try:
        for row in rows:
            head = row.head
            found = RowResult(head.operation, head.size_bytes, head.count, head.growth_bytes)
            result.rows.append(found)
            for direction in DIRECTIONS:
                progress(f"{head.operation} {direction}", finished)
                found.measured[direction] = measure(session, direction, head, measure_s, result)
            for case in row.cases:
                for direction in DIRECTIONS:
                    verify(session, direction, case, found, result)
                    finished += 1
                    progress(f"{head.operation} {direction}", finished)
                    if len(result.mismatches) >= _MOST_MISMATCHES:
                        return
    finally:
        result.elapsed_s = time.monotonic() - begin
        if result.mismatches:
            result.status = Exit.WRONG_BYTES


def measure(session: Session, direction: str, case: Case, measure_s: float, result: TransportResult) -> dict[str, Any]:
    """Latency of single rounds, then throughput of many in flight. Of the outcome only the counter is checked."""

    def step(name: str, rounds: int) -> dict[str, Any]:
        sent, received = session.together(direction == "outgoing", name, "absorb", case, rounds)
        note(received["mismatch"], case, direction, result)
        return sent

    session.together(direction == "outgoing", "load", "prepare", case)
    pilot = step("latency", _PILOT_ROUNDS)  # also connects, attaches, and fills caches
    latency = step("latency", rounds_of(measure_s, pilot["best"], 3))
    rate = step("bandwidth", rounds_of(measure_s, latency["p50"], 4))
    return {**rate, "latency": latency}


def rounds_of(budget_s: float, estimate_s: float, least: int) -> int:
    """As many rounds as take about `budget_s`, within limits."""
    return max(least, min(_MOST_ROUNDS, int(budget_s / max(estimate_s, 1e-7))))


def verify(session: Session, direction: str, case: Case, found: RowResult, result: TransportResult) -> None:
    """Poisons the target, runs one round, compares every byte, and notes what is wrong."""
    outgoing = direction == "outgoing"
    session.together(outgoing, "load", "prepare", case)
    sent, received = session.together(outgoing, "transmit", "verify", case)
    wrong = note(sent["mismatch"], case, direction, result) + note(received["mismatch"], case, direction, result)
    if wrong:
        found.wrong += 1
    else:
        found.verified_operations += case.count
        found.verified_bytes += case.payload_bytes


def note(mismatch: dict[str, Any] | None, case: Case, direction: str, result: TransportResult) -> int:
    """Keeps what a step found wrong. Returns how many findings that were."""
    if mismatch is None:
        return 0
    result.mismatches.append(Mismatch(case.to_dict(), direction, **mismatch))
    return 1
