"""What the commands found, as plain values: the JSON documents are these, and the tables show them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

DIRECTIONS = ("outgoing", "incoming")


class Exit:
    """Exit statuses of the command line. Of several transports the gravest counts, in the order of `GRAVITY`."""

    OK = 0
    WRONG_BYTES = 1
    USAGE = 2
    UNAVAILABLE = 3
    BROKEN = 4  # the other side was lost, a time-out, a failing transport: nothing is known about the bytes
    INTERRUPTED = 130

    GRAVITY = (INTERRUPTED, WRONG_BYTES, USAGE, BROKEN, UNAVAILABLE, OK)

    @classmethod
    def gravest(cls, statuses: list[int]) -> int:
        """The one to exit with."""
        return min(statuses, key=cls.GRAVITY.index, default=cls.OK)


@dataclass
class Mismatch:
    """Bytes, or a counter, that are not what they should be.

    Attributes:
        case: the fields of the sweep's case.
        direction: "outgoing" (from this side) or "incoming".
        where: a piece of the target, its guards, the source, or the counter.
        offset: of the first wrong byte in that piece; None for counters.
        buffer_offset: the same from the start of the whole buffer.
        wrong_bytes: how many of the piece are wrong.
        expected: up to 16 bytes from the first wrong one on, in hexadecimal digits.
        actual: what is there instead.
    """

    case: dict[str, Any]
    direction: str
    where: str
    offset: int | None = None
    buffer_offset: int | None = None
    wrong_bytes: int | None = None
    expected: str | None = None
    actual: str | None = None


@dataclass
class RowResult:
    """One row of the table.

    Attributes:
        operation: "write", "batch", "pages" or "message".
        size_bytes: length of a piece.
        count: pieces in one round.
        growth_bytes: piece i is `size_bytes + i * growth_bytes` long.
        measured: by direction: {"bytes_per_s", "operations_per_s", "latency": {"p50", "p99", ... in s}}.
        verified_operations: pieces whose every byte was compared and right, both directions.
        verified_bytes: the same in bytes.
        wrong: verifications that failed.
    """

    operation: str
    size_bytes: int
    count: int
    growth_bytes: int
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    verified_operations: int = 0
    verified_bytes: int = 0
    wrong: int = 0


@dataclass
class TransportResult:
    """All about one transport. `status` is one of `Exit`."""

    transport: str
    status: int = Exit.OK
    local: dict[str, Any] = field(default_factory=dict)
    remote: dict[str, Any] = field(default_factory=dict)
    rows: list[RowResult] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    error: dict[str, str] | None = None
    elapsed_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For the JSON document."""
        return {"ok": self.status == Exit.OK, **dataclasses.asdict(self)}
