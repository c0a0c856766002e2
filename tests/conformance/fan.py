"""What scenarios of peer groups stand on: a source here, and poisoned memory and a counter for each member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transfer_engine as te

from .rig import SOON_S, Far, Piece, Rig, pattern


class Home(Far):
    """An engine of this process as one more far side: the own engine may be among the members."""

    def __init__(self, engine: te.Engine) -> None:
        self.engine = engine
        self.memories, self.regions, self.counters = [], [], []


class Fan:
    """A group with a member for each of `fars` (which may repeat), a target, and what must have arrived so far."""

    def __init__(self, rig: Rig, fars: Sequence[Any], room: int, *, source: int | None = None, counted: bool = True):
        self.near = rig.near
        self.fars = list(fars)
        self.room = room
        self.seed = rig.next_seed()
        self.source_length = source or room
        self.source = pattern(self.seed, self.source_length).copy()
        self.region = self.near.register(self.source)
        self.memories: list[int] = []
        self.counters: list[int] = []
        self.remotes: list[te.RegionDescriptor] = []
        self.notify: list[te.CounterDescriptor] = []
        self.counts = [0] * len(self.fars)
        for far in self.fars:
            self._place(far)
        self.group = self.near.peer_group([remote.address for remote in self.remotes])
        self.target = self.group.target(self.remotes, notify=self.notify if counted else None)

    def _place(self, far: Any) -> None:
        memory, remote = far.memory(self.room)
        counter, notify = far.counter()
        self.memories.append(memory)
        self.counters.append(counter)
        self.remotes.append(te.RegionDescriptor.from_bytes(bytes(remote)))
        self.notify.append(te.CounterDescriptor.from_bytes(bytes(notify)))

    def settle(self, member: int, far: Any) -> None:
        """The member moves to another far side, with new memory and a new counter."""
        self.fars[member] = far
        self._place(far)
        for listed in (self.memories, self.counters, self.remotes, self.notify):
            listed[member] = listed.pop()  # type: ignore[index]
        self.counts[member] = 0

    def scatter(self, pieces: Sequence[Piece], **arguments: Any) -> te.Transfer:
        """One piece (target offset, source offset, length) for each member."""
        targets, sources, lengths = ([piece[k] for piece in pieces] for k in range(3))
        return self.target.scatter(self.region, src_offsets=sources, lengths=lengths, dst_offsets=targets, **arguments)

    def arrived(self, times: int = 1, *, but: Sequence[int] = ()) -> None:
        """Every counter (but some) stands that much higher than it did, and no higher."""
        for i, far in enumerate(self.fars):
            if i not in but:
                self.counts[i] += times
                assert far.wait(self.counters[i], self.counts[i], SOON_S) == self.counts[i], f"member {i}"

    def poison(self) -> None:
        for far, memory in zip(self.fars, self.memories, strict=True):
            far.poison(memory)

    def check(self, pieces: Sequence[Piece | None]) -> None:
        """Each member holds its piece and nothing else; None: it was not touched."""
        for i, (far, memory, piece) in enumerate(zip(self.fars, self.memories, pieces, strict=True)):
            difference = far.differs(memory, [] if piece is None else [piece], self.seed, self.source_length)
            assert difference is None, f"member {i}: {difference}"

    def counters_stand(self) -> None:
        """Nothing came since arrived() looked."""
        for i, far in enumerate(self.fars):
            assert far.value(self.counters[i]) == self.counts[i], f"member {i}"


def fars_of(rig: Rig, count: int, *, engines: int = 2, home: bool = False, **settings: Any) -> list[Any]:
    """Far sides for `count` members, over that many engines in turn, perhaps with the own engine among them."""
    sides = [rig.another_far(**settings) for _ in range(engines)]
    if home:
        sides.insert(1, Home(rig.near))
    return [sides[i % len(sides)] for i in range(count)]
