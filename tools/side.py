"""One of the two sides of a session: its memory, and the steps that it takes as sender or receiver.

Both sides run this very code. A step takes a case and a number of rounds and returns plain JSON values; the side that
drives calls its own steps and asks the other for the counterparts. Measuring steps touch no payload byte; `load`,
`prepare` and `verify` do, and are never timed.
"""

from __future__ import annotations

import base64
import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import transfer_engine as te

from . import patterns
from .protocol import Channel
from .sweep import GUARD_BYTES, Case, Segment, page_tables, pieces, segments, spans
from .units import MIB

_IN_FLIGHT_BYTES = 64 * MIB  # of measured rounds, unless one round has more
_SHOWN = 16  # bytes of evidence
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}

STEPS = ("load", "prepare", "latency", "bandwidth", "absorb", "exchange", "transmit", "verify")

Step = Callable[[Case, int], dict[str, Any]]
Submit = Callable[[], list[te.Transfer]]


class Side:
    """Memory, counters and steps of one side.

    Args:
        channel: to the other side.
        source_bytes: length of the buffer that is sent from.
        target_bytes: length of the buffer that is written to.
        timeout_s: bound of every wait.
        flip: a test hook: one byte is damaged before the first verification of this operation, or of a "guard".
    """

    def __init__(
        self, channel: Channel, *, source_bytes: int, target_bytes: int, timeout_s: float, flip: str | None = None
    ) -> None:
        self._channel = channel
        self._engine = channel.engine
        self._timeout_s = timeout_s
        self._flip = flip
        self._source = self._engine.allocate(source_bytes)
        self._target = self._engine.allocate(target_bytes)
        self._source_bytes = self._source.as_numpy()
        self._target_bytes = self._target.as_numpy()
        self._counter = self._engine.counter()  # arrivals of the writes under test
        self._acknowledged = self._engine.counter()  # the other side has seen all of ours
        self._arrivals = 0  # what _counter must show
        self._surplus: dict[str, Any] | None = None  # found between two steps
        self._acknowledgements = 0
        self._remote: te.RegionDescriptor
        self._notify: te.CounterDescriptor
        self._acknowledge: te.CounterDescriptor

    def step(self, name: str) -> Step:
        """One of `STEPS`, bound to this side. Kept bound they would make a cycle, and memory would outlive its use.

        Raises:
            ValueError: no such step.
        """
        if name not in STEPS:
            raise ValueError(f"no such step: {name!r}")
        step: Step = getattr(self, name)
        return step

    def offer(self) -> dict[str, str]:
        """What the other side needs in order to write here."""
        parts = {
            "region": bytes(self._target.region.descriptor),
            "counter": bytes(self._counter.descriptor),
            "acknowledge": bytes(self._acknowledged.descriptor),
        }
        return {name: base64.b64encode(data).decode() for name, data in parts.items()}

    def accept(self, offer: dict[str, str]) -> None:
        """Takes the other side's offer.

        Raises:
            DescriptorError, KeyError, ValueError: not an offer.
        """
        region, counter, acknowledge = (base64.b64decode(offer[name]) for name in ("region", "counter", "acknowledge"))
        self._remote = te.RegionDescriptor.from_bytes(region)
        self._notify = te.CounterDescriptor.from_bytes(counter)
        self._acknowledge = te.CounterDescriptor.from_bytes(acknowledge)

    def ensure_fits(self, case: Case) -> None:
        """Raises ValueError when the case reaches beyond this side's buffers."""
        for need, have in zip(spans(case), (len(self._source), len(self._target)), strict=True):
            if need > have:
                raise ValueError(f"the case needs {need} bytes of a buffer of {have}")

    def close(self) -> None:
        """Lets go of memory and counters; raises what closing them raises."""
        for part in (self._source, self._target, self._counter, self._acknowledged):
            part.close()

    # --- bytes ------------------------------------------------------------------------------------------------------

    def load(self, case: Case, rounds: int) -> dict[str, Any]:
        """Sender: puts the case's pattern into the source buffer."""
        patterns.fill(self._source_bytes[: spans(case)[0]], case.seed)
        return {}

    def prepare(self, case: Case, rounds: int) -> dict[str, Any]:
        """Receiver: poisons every byte that is to come, and puts guards around and between."""
        self._surplus = self._too_many(self._counter.value)  # of the step before: nothing is under way now
        if case.notifications:
            for part in segments(case):
                patterns.fill(self._view(part), part.seed, part.pattern_start, invert=part.piece is not None)
        return {}

    def transmit(self, case: Case, rounds: int) -> dict[str, Any]:
        """Sender: one round; afterwards the source must be what it was."""
        self._finish(self._submitter(case)())
        source = self._source_bytes[: spans(case)[0]]
        wrong = patterns.first_wrong(source, case.seed)
        if wrong is None:
            return {"mismatch": None}
        place = "the source buffer, which a transfer must not change"
        return {"mismatch": _evidence(place, wrong, source, case.seed, wrong)}

    def verify(self, case: Case, rounds: int) -> dict[str, Any]:
        """Receiver: waits for the round, then looks at every byte and at the counter."""
        if case.operation == "message":
            return {"mismatch": self._verify_messages(case)}
        surplus, self._surplus = self._surplus, None
        found = self._await_arrivals(case.notifications) or surplus
        for part in segments(case):
            view = self._view(part)
            if self._flip == ("guard" if part.piece is None else case.operation) and part.length:
                view[part.length // 2] ^= 0x01
                self._flip = None
            wrong = patterns.first_wrong(view, part.seed, part.pattern_start)
            if wrong is not None:
                unit = "page" if case.is_paged else "write"
                place = "guard bytes" if part.piece is None else f"{unit} {part.piece + 1} of {case.count}"
                return {"mismatch": _evidence(place, wrong, view, part.seed, part.start + wrong, part.pattern_start)}
        return {"mismatch": found}

    def _verify_messages(self, case: Case) -> dict[str, Any] | None:
        found = None
        for i, piece in enumerate(pieces(case)):
            data = np.frombuffer(self._channel.receive_bytes(timeout_s=self._timeout_s), np.uint8)
            if self._flip == "message" and len(data):
                data = data.copy()
                data[len(data) // 2] ^= 0x01
                self._flip = None
            place = f"message {i + 1} of {case.count}"
            if len(data) != piece.length:
                found = found or {"where": f"{place}: {len(data)} bytes came, not {piece.length}"}
                continue
            wrong = patterns.first_wrong(data, case.seed, piece.source)
            if wrong is not None:
                found = found or _evidence(place, wrong, data, case.seed, wrong, piece.source)
        return found  # all were taken from the queue, also behind a wrong one

    def _view(self, part: Segment) -> patterns.Bytes:
        return self._target_bytes[part.start : part.start + part.length]

    # --- measuring --------------------------------------------------------------------------------------------------

    def latency(self, case: Case, rounds: int) -> dict[str, Any]:
        """Sender: one round after the other, each from before its submission to the return of its wait."""
        submit = self._submitter(case)
        samples = np.empty(rounds)
        clock = time.perf_counter_ns
        for i in range(rounds):
            begin = clock()
            self._finish(submit())
            samples[i] = (clock() - begin) / 1e9
        self._await_acknowledgement()
        # "higher" never reports less than was seen: of few samples the 99th percentile is the worst.
        found = {name: float(np.percentile(samples, at, method="higher")) for name, at in PERCENTILES.items()}
        return {
            "samples": rounds,
            "mean": float(samples.mean()),
            "best": float(samples.min()),
            "worst": float(samples.max()),
            **found,
        }

    def bandwidth(self, case: Case, rounds: int) -> dict[str, Any]:
        """Sender: many rounds in flight, until the last is done and the receiver has counted all of them."""
        submit = self._submitter(case)
        begin = time.perf_counter_ns()
        self._stream(case, submit, rounds)
        self._await_acknowledgement()
        return _throughput(case, rounds, begin)

    def absorb(self, case: Case, rounds: int) -> dict[str, Any]:
        """Receiver: waits until all rounds have come, and says so to the sender."""
        found = None
        if case.operation == "message":
            for _ in range(rounds * case.count):
                self._channel.receive_bytes(timeout_s=self._timeout_s)
        else:
            found = self._await_arrivals(rounds * case.notifications)
        nothing = self._source.region[0:0], self._remote[0:0]
        self._engine.write(*nothing, notify=self._acknowledge, timeout_s=self._timeout_s).wait()
        return {"mismatch": found}

    def exchange(self, case: Case, rounds: int) -> dict[str, Any]:
        """Both at once: sends all rounds and waits for as many."""
        submit = self._submitter(case)
        begin = time.perf_counter_ns()
        self._stream(case, submit, rounds)
        found = self._await_arrivals(rounds * case.notifications)
        return {"mismatch": found, **_throughput(case, rounds, begin)}

    def _stream(self, case: Case, submit: Submit, rounds: int) -> None:
        depth = max(2, min(-(-16 // case.count), _IN_FLIGHT_BYTES // max(case.payload_bytes, 1)))
        under_way: collections.deque[list[te.Transfer]] = collections.deque()
        for _ in range(rounds):
            if len(under_way) == depth:
                self._finish(under_way.popleft())
            under_way.append(submit())
        for transfers in under_way:
            self._finish(transfers)

    # --- the engine -------------------------------------------------------------------------------------------------

    def _submitter(self, case: Case) -> Submit:
        """Starts one round of the case; all that can be made beforehand is made here."""
        engine, notify, limit = self._engine, self._notify, self._timeout_s
        region, remote = self._source.region, self._remote
        listed = pieces(case)
        if case.operation == "message":
            texts = [self._source_bytes[p.source : p.source + p.length].tobytes() for p in listed]
            return lambda: [engine.send(self._channel.peer, text, timeout_s=limit) for text in texts]
        if case.is_paged:
            source, target = self._pages(case)
            return lambda: [engine.write_pages(source, target, notify=notify, timeout_s=limit)]
        ends = [(region[p.source : p.source + p.length], remote[p.target : p.target + p.length]) for p in listed]
        if case.operation == "batch":
            batch = [te.Write(source, target, notify=notify) for source, target in ends]
            return lambda: [engine.write_batch(batch, timeout_s=limit)]
        return lambda: [engine.write(source, target, notify=notify, timeout_s=limit) for source, target in ends]

    def _pages(self, case: Case) -> tuple[te.Pages, te.Pages]:
        dtype = np.int32 if case.index_bytes == 4 else np.int64
        source, target = (np.array(table, dtype) for table in page_tables(case))
        return (
            te.Pages(self._source.region, source, case.size_bytes, case.source_step, case.source_offset),
            te.Pages(self._remote, target, case.size_bytes, case.target_step, GUARD_BYTES + case.target_offset),
        )

    def _finish(self, transfers: list[te.Transfer]) -> None:
        for transfer in transfers:
            transfer.wait()  # their own deadline bounds it

    def _await_arrivals(self, more: int) -> dict[str, Any] | None:
        """Waits for `more` arrivals. Too many are found here or, if they come later, by the next `prepare`."""
        self._arrivals += more
        return self._too_many(self._counter.wait(self._arrivals, timeout_s=self._timeout_s, peers=[self._channel.peer]))

    def _too_many(self, value: int) -> dict[str, Any] | None:
        surplus = value - self._arrivals
        if surplus <= 0:
            return None
        found = {"where": f"the receiver's counter shows {value}, not {self._arrivals}: {surplus} too many"}
        self._arrivals = value
        return found

    def _await_acknowledgement(self) -> None:
        self._acknowledgements += 1
        self._acknowledged.wait(self._acknowledgements, timeout_s=self._timeout_s, peers=[self._channel.peer])


def _throughput(case: Case, rounds: int, begin_ns: int) -> dict[str, Any]:
    elapsed = max((time.perf_counter_ns() - begin_ns) / 1e9, 1e-9)
    return {
        "seconds": elapsed,
        "bytes_per_s": rounds * case.payload_bytes / elapsed,
        "operations_per_s": rounds * case.count / elapsed,
    }


def _evidence(
    place: str, wrong: int, view: patterns.Bytes, seed: int, offset: int, pattern_start: int = 0
) -> dict[str, Any]:
    """What is wrong: where, the first wrong bytes, and what they should be."""
    actual = view[wrong : wrong + _SHOWN]
    return {
        "where": place,
        "offset": wrong,
        "buffer_offset": offset,
        "wrong_bytes": patterns.count_wrong(view, seed, pattern_start),
        "expected": patterns.pattern(seed, len(actual), pattern_start + wrong).tobytes().hex(),
        "actual": actual.tobytes().hex(),
    }
