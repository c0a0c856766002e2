"""map_peers: every rank maps what every other rank allocated.

1. Each rank tells the others about its buffer (a Card), or that it has none to offer, so that nobody waits for it.
2. Each rank fetches and maps the memory of each other one: by a descriptor on the same host, else by a fabric handle.
3. Each rank tells how that went. Only when all is well everywhere anybody returns with a mapping; else all undo it.

A descriptor keeps the physical memory alive, whoever exported it. So once mapped, nothing that a peer does (close its
buffer, end, be killed) takes memory away from under this process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

from ..errors import (
    ArgumentTypeError,
    ConfigError,
    EngineClosed,
    PeerError,
    PeerLost,
    RegistrationError,
    TransferEngineError,
    TransferTimeout,
    refuse_pickle,
)
from ..rendezvous import Rendezvous
from .card import Card, here, ways
from .memory import DeviceBuffer, DeviceMemory, PeerMemory
from .passing import Counter, PassingError, fetch

_OPERATION = "map_peers"
_FAREWELL_S = 2.0  # how long to tell the others about a peer that is gone: it will not answer either


class Mapped(Mapping[int, DeviceMemory]):
    """The buffers of all ranks, by rank; `mapped[rank]` has `pointer`, `nbytes` and `as_torch()`. A context manager.

    The own buffer is among them and stays the caller's.
    """

    def __init__(self, memories: dict[int, DeviceMemory], rank: int) -> None:
        self._memories = memories
        self.rank = rank
        self._closed = False

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._memories)

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._closed

    def __getitem__(self, rank: int) -> DeviceMemory:
        if self._closed:
            raise EngineClosed("this mapping was closed", operation=_OPERATION, hint="use it before it is closed")
        return self._memories[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._memories))

    def __len__(self) -> int:
        return len(self._memories)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def close(self) -> None:
        """Unmaps the peers' memory; kernels that use it must have ended. Idempotent; no rank waits for another."""
        self._closed = True
        with contextlib.ExitStack() as all_of_them:
            for rank, memory in self._memories.items():
                if rank != self.rank:
                    all_of_them.callback(memory.close)

    def __enter__(self) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "each process maps its peers by te.nvlink.map_peers()")

    def __repr__(self) -> str:
        return f"<te.nvlink.Mapped: {len(self)} ranks, this is {self.rank}{', closed' if self._closed else ''}>"


def map_peers(buffer: DeviceBuffer, rendezvous: Rendezvous, *, timeout_s: float | None = None) -> Mapped:
    """Maps the buffers of all ranks for the own device. All ranks of the rendezvous call it; lengths may differ.

    Afterwards ranks may close buffers and mappings in any order, and end.

    Args:
        buffer: of `allocate()`.
        rendezvous: the ranks, which all reach each other by NVLink (or are on one GPU).
        timeout_s: seconds; None: that of the rendezvous.

    Raises:
        ConfigError: ranks on other hosts without fabric handles, devices without access to each other.
        RegistrationError: memory that cannot be shared; it must come from `allocate()`.
        PeerLost: a rank ended meanwhile.
        PeerError: another rank failed; its reason is in the message.
        TransferTimeout: ranks were late; the error names them. The rendezvous is then of no further use.
        ArgumentTypeError: no buffer, or no rendezvous.
    """
    if not isinstance(rendezvous, Rendezvous):
        raise ArgumentTypeError(
            f"rendezvous must be a te.Rendezvous, not {type(rendezvous).__name__}", operation=_OPERATION
        )
    deadline = time.monotonic() + (rendezvous._timeout_s if timeout_s is None else float(timeout_s))
    with contextlib.ExitStack() as serving, contextlib.ExitStack() as undo:
        card, problem = _offered(buffer, serving)
        cards = _told(rendezvous, card, deadline)
        memories: dict[int, DeviceMemory] = {}
        if problem is None:
            try:
                _ensure_offers(cards, rendezvous.rank)
                memories = _mapped(buffer, cards, rendezvous.rank, deadline, undo)
            except TransferEngineError as cause:
                problem = cause
        _agree(rendezvous, problem, deadline)
        undo.pop_all()
        return Mapped(memories, rendezvous.rank)


def _offered(buffer: Any, serving: contextlib.ExitStack) -> tuple[Card, TransferEngineError | None]:
    """What to tell the others, and why there is nothing to offer. `serving` ends what was begun."""
    host = here()
    try:
        _ensure_shareable(buffer)
        driver, physical = buffer._driver, buffer._physical
        counter = Counter(driver.export_descriptor(physical.handle))
        serving.callback(counter.close)
        fabric = driver.export_fabric(physical.handle) if physical.fabric else b""
        identity = driver.identity(buffer._index)
    except TransferEngineError as cause:
        return Card(host, problem=cause.message), cause
    except OSError as cause:
        error = ConfigError(f"no Unix socket: {cause}", operation=_OPERATION)
        return Card(host, problem=error.message), error
    return Card(host, buffer.nbytes, physical.length, identity, counter.ticket, fabric), None


def _ensure_shareable(buffer: Any) -> None:
    hint = "allocate it with te.nvlink.allocate()"
    if isinstance(buffer, DeviceBuffer):
        if buffer.closed:
            raise EngineClosed(f"{buffer!r}", operation=_OPERATION, hint=hint)
        return
    kind = type(buffer).__name__
    if any(hasattr(buffer, name) for name in ("__cuda_array_interface__", "data_ptr", "__dlpack__")):
        raise RegistrationError(f"memory of a {kind} cannot be mapped by peers", operation=_OPERATION, hint=hint)
    raise ArgumentTypeError(f"buffer must be a te.nvlink.DeviceBuffer, not {kind}", operation=_OPERATION, hint=hint)


def _told(rendezvous: Rendezvous, card: Card, deadline: float) -> list[Card]:
    """Everybody's cards. After a time-out there is nothing to agree about: nobody has all of them."""
    data = rendezvous.all_gather(bytes(card), timeout_s=max(0.0, deadline - time.monotonic()))
    cards = []
    for text in data:
        try:
            cards.append(Card.from_bytes(text))
        except ValueError as cause:
            cards.append(Card(card.host, problem=f"what it says is not understood: {cause}"))
    return cards


def _ensure_offers(cards: list[Card], rank: int) -> None:
    for other, card in enumerate(cards):
        if card.problem and other != rank:
            raise _failed(other, card.problem)


def _mapped(
    buffer: DeviceBuffer, cards: list[Card], rank: int, deadline: float, undo: contextlib.ExitStack
) -> dict[int, DeviceMemory]:
    """The memories of all ranks. `undo` closes those of peers."""
    driver, index = buffer._driver, buffer._index
    plan = ways(cards, rank)
    blocked = [other for other, way in plan.items() if way != "own" and not driver.reaches(index, cards[other].device)]
    if blocked:
        raise ConfigError(
            f"{buffer.device} has no access to the memory of rank {', '.join(map(str, blocked))}",
            operation=_OPERATION,
            hint="`nvidia-smi topo -m` shows which GPUs are joined by NVLink; map those only",
        )
    memories: dict[int, DeviceMemory] = {rank: buffer}
    count = len(cards)
    for other in ((rank + step) % count for step in range(1, count)):  # not all of them to the same rank at once
        card = cards[other]
        try:
            if plan[other] == "fabric":
                handle = driver.import_fabric(card.fabric)
            else:
                descriptor = _descriptor(other, card, deadline)
                try:
                    handle = driver.import_descriptor(descriptor)
                finally:
                    os.close(descriptor)
            memory = PeerMemory(driver, handle, card.length, card.nbytes, index)
        except TransferEngineError as cause:
            cause.message = f"rank {other}: {cause.message}"
            cause.operation = _OPERATION
            raise
        undo.callback(memory.close)
        memories[other] = memory
    return memories


def _descriptor(rank: int, card: Card, deadline: float) -> int:
    if card.ticket is None:
        raise ConfigError("it names no socket", operation=_OPERATION, peer=f"rank {rank}")
    try:
        return fetch(card.ticket, deadline)
    except PassingError as cause:
        if cause.gone:
            hint = "look at that rank's log; start over with a new te.Rendezvous on all ranks"
            raise PeerLost(str(cause), operation=_OPERATION, peer=f"rank {rank}", hint=hint) from None
        raise ConfigError(
            str(cause),
            operation=_OPERATION,
            peer=f"rank {rank}",
            hint="all ranks of a host run as the same user, and call map_peers() with the same rendezvous",
        ) from None


def _agree(rendezvous: Rendezvous, problem: TransferEngineError | None, deadline: float) -> None:
    """Tells the others how it went.

    Raises:
        TransferEngineError: `problem`, or that another rank had one, or that ranks were late.
    """
    left = max(0.0, deadline - time.monotonic())
    if problem is None:
        outcomes = rendezvous.all_gather(b"", timeout_s=left)
        for other, text in enumerate(outcomes):
            if text:
                raise _failed(other, text.decode(errors="replace"))
        return
    patience = min(left, _FAREWELL_S) if isinstance(problem, PeerLost) else left
    with contextlib.suppress(TransferTimeout, PeerError):
        rendezvous.all_gather(problem.message.encode() or b"it failed", timeout_s=patience)
    raise problem


def _failed(rank: int, reason: str) -> PeerError:
    return PeerError(
        f"rank {rank} failed: {reason}", operation=_OPERATION, peer=f"rank {rank}", hint="nothing is mapped on any rank"
    )
