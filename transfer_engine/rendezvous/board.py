"""What the store holds: keys with values, who waits for which, which ranks are there. No sockets, no clock."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .wire import REPLY_BYTES, Answer, Ask, Presence, Reply, Request

_Waiter = TypeVar("_Waiter", bound=Hashable)


@dataclass
class _Wait:
    ask: Ask
    missing: set[str]
    deadline: float


@dataclass
class _Seat:
    presence: Presence
    since: float


@dataclass
class Board(Generic[_Waiter]):
    """The store's state. `_Waiter` stands for a connection.

    Attributes:
        most_bytes: of all keys and values together; what would exceed it is refused.
    """

    most_bytes: int
    _values: dict[str, bytes] = field(default_factory=dict)
    _bytes: int = 0
    _waits: dict[_Waiter, _Wait] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, _Waiter, _Wait]] = field(default_factory=list)  # a heap; some are void by now
    _serial: int = 0
    _waiters_of: defaultdict[str, set[_Waiter]] = field(default_factory=lambda: defaultdict(set))
    _seats: dict[tuple[str, int], _Seat] = field(default_factory=dict)

    # --- ranks ------------------------------------------------------------------------------------------------------

    def presence(self, job: str, rank: int) -> Presence | None:
        """What is known of a rank; None: it was never here."""
        seat = self._seats.get((job, rank))
        return seat.presence if seat else None

    def seat(self, job: str, rank: int, presence: Presence, now: float) -> None:
        """Notes that a rank came, left, or was lost."""
        self._seats[job, rank] = _Seat(presence, now)

    def _ranks(self, job: str, now: float) -> Answer:
        entries = (
            (rank, seat.presence, now - seat.since) for (other, rank), seat in self._seats.items() if other == job
        )
        return Answer(Reply.RANKS, ranks=tuple(sorted(entries)))

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, waiter: _Waiter, job: str, ask: Ask, now: float) -> list[tuple[_Waiter, Answer]]:
        """Carries out a request; returns the answers that are due now, also those of others who waited for it."""
        if ask.kind in (Request.GET, Request.WAIT):
            missing = {key for key in ask.keys if key not in self._values}
            if not missing:
                return [(waiter, self._found(ask))]
            wait = self._waits[waiter] = _Wait(ask, missing, now + ask.timeout_s)
            self._serial += 1
            heapq.heappush(self._deadlines, (wait.deadline, self._serial, waiter, wait))
            for key in missing:
                self._waiters_of[key].add(waiter)
            return []
        if ask.kind is Request.SET:
            return self._set(waiter, ask.keys[0], ask.value, Answer(Reply.DONE))
        if ask.kind is Request.ADD:
            return self._add(waiter, ask)
        if ask.kind is Request.CHECK:
            return [(waiter, Answer(Reply.FLAGS, flags=tuple(key in self._values for key in ask.keys)))]
        if ask.kind is Request.WHO:
            return [(waiter, self._ranks(job, now))]
        if ask.kind is Request.DELETE:
            value = self._values.pop(ask.keys[0], None)
            self._bytes -= 0 if value is None else _weight(ask.keys[0], value)
            return [(waiter, Answer(Reply.NUMBER, number=int(value is not None)))]
        return [(waiter, Answer(Reply.DONE))]  # BYE

    def late(self, now: float) -> list[tuple[_Waiter, Answer]]:
        """Those whose time is up."""
        expired = []
        while self._deadlines and (self._void(self._deadlines[0]) or self._deadlines[0][0] <= now):
            entry = heapq.heappop(self._deadlines)
            if not self._void(entry):
                self.forget(entry[2])
                expired.append((entry[2], Answer(Reply.LATE)))
        return expired

    def _void(self, entry: tuple[float, int, _Waiter, _Wait]) -> bool:
        return self._waits.get(entry[2]) is not entry[3]

    def next_deadline(self) -> float | None:
        """When `late` may have something to say, unless something happens before."""
        return self._deadlines[0][0] if self._deadlines else None

    def waits(self, waiter: _Waiter) -> bool:
        """An answer to it is still due."""
        return waiter in self._waits

    def forget(self, waiter: _Waiter) -> None:
        """It waits no longer."""
        wait = self._waits.pop(waiter, None)
        for key in wait.missing if wait else ():
            self._waiters_of[key].discard(waiter)
            if not self._waiters_of[key]:
                del self._waiters_of[key]

    def _add(self, waiter: _Waiter, ask: Ask) -> list[tuple[_Waiter, Answer]]:
        key = ask.keys[0]
        try:
            number = int(self._values.get(key, b"0")) + ask.number
        except ValueError:
            return [(waiter, Answer(Reply.FAILED, text=f"{key}: its value is no number"))]
        if not -(1 << 63) <= number < 1 << 63:
            return [(waiter, Answer(Reply.FAILED, text=f"{key}: the sum does not fit in 64 bits"))]
        return self._set(waiter, key, str(number).encode(), Answer(Reply.NUMBER, number=number))

    def _set(self, waiter: _Waiter, key: str, value: bytes, answer: Answer) -> list[tuple[_Waiter, Answer]]:
        before = self._values.get(key)
        grown = self._bytes + _weight(key, value) - (0 if before is None else _weight(key, before))
        if grown > self.most_bytes:
            text = (
                f"the store is full: {self._bytes} of {self.most_bytes} bytes are taken, {len(value)} more do not fit"
            )
            return [(waiter, Answer(Reply.FAILED, text=text))]
        self._values[key], self._bytes = value, grown
        return [(waiter, answer), *self._arrived(key)]

    def _arrived(self, key: str) -> Iterable[tuple[_Waiter, Answer]]:
        for waiter in self._waiters_of.pop(key, ()):
            wait = self._waits[waiter]
            wait.missing.discard(key)
            if not wait.missing:
                del self._waits[waiter]
                yield waiter, self._found(wait.ask)

    def _found(self, ask: Ask) -> Answer:
        """All keys are there. As many values as one answer holds; the client asks again for the others.

        A key may have been deleted while others were waited for: then the values end before it.
        """
        if ask.kind is Request.WAIT:
            return Answer(Reply.DONE)
        values: list[bytes] = []
        total = 0
        for key in ask.keys:
            value = self._values.get(key)
            total += 0 if value is None else len(value)
            if value is None or (values and total > REPLY_BYTES):
                break
            values.append(value)
        return Answer(Reply.VALUES, values=tuple(values))


def _weight(key: str, value: bytes) -> int:
    return len(key) + len(value) + 64
