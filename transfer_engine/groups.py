"""PeerGroup: peers that are written to together, with scatters and barriers."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

from . import _native, peers
from ._handle import EngineHandle
from .address import Address
from .descriptors import CounterDescriptor
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    EngineClosed,
    TransferEngineError,
    TransferTimeout,
    refuse_pickle,
    shortened,
)
from .members import Members, member_index
from .peers import Peer, PeerName
from .targets import Notify, Remotes, Target
from .transfers import Transfer, of_members

_MOST_MEMBERS = 1 << 16  # as the core has it
_BARRIERS = 8  # targets that are kept for barriers
_NAMED = 8  # members in an error's text


class PeerGroup:
    """Peers in an order. A context manager.

    Made by `engine.peer_group()`, which starts to connect to all of them. This engine may be among them, and a peer may
    be there several times. A group may have no members: its scatters and barriers end at once.
    """

    __slots__ = ("_barriers", "_closed", "_connecting", "_handle", "_last_barrier", "_members", "_targets")

    def __init__(
        self, handle: EngineHandle, members: Iterable[PeerName], place: int | None, timeout_s: float | None
    ) -> None:
        handle.ensure_open("peer_group")
        addresses = [_address(member) for member in _listed(members)]
        count = len(addresses)
        if count > _MOST_MEMBERS:
            raise ArgumentError(f"{count} members; at most {_MOST_MEMBERS}", operation="peer_group")
        if place is not None:
            place = member_index(place, count, "peer_group")
        self._handle = handle
        self._closed = False
        self._members = Members(handle, addresses, place, threading.RLock())
        self._targets: weakref.WeakSet[Target] = weakref.WeakSet()
        self._barriers: OrderedDict[tuple[bytes | None, ...], Target] = OrderedDict()
        self._last_barrier: tuple[tuple[Any, ...], Target | None] = ((), None)
        self._connecting: dict[bytes, Transfer] = {}  # by the peer's address; taken out once it has succeeded
        for address in addresses:
            self._connect(address, timeout_s)

    @property
    def members(self) -> tuple[Address, ...]:
        """The addresses, in the group's order."""
        return tuple(self._members.addresses)

    @property
    def place(self) -> int | None:
        """The place that was given; None: it follows from the identities."""
        return self._members.place

    @property
    def closed(self) -> bool:
        """True once close() was called, on the group or its engine."""
        return self._closed or self._handle.state != 0

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when all members are connected.

        Args:
            timeout_s: seconds that this call waits; None: until the last has answered or failed.

        Raises:
            PeerUnreachable, PeerLost, PeerRestarted: members failed; the error has the type of the first failure and
                names them.
            TransferTimeout: this wait ran out; connecting goes on. The error names those that are missing.
        """
        self._ensure_open("wait")
        deadline = None if timeout_s is None else time.monotonic_ns() + _native.nanoseconds(timeout_s)
        members = self.members
        failed: dict[int, TransferEngineError] = {}
        missing = []
        for i, address in enumerate(members):
            transfer = self._connecting.get(address._bytes)
            if transfer is None:
                continue
            left = None if deadline is None else max(deadline - time.monotonic_ns(), 0) / 1e9
            try:
                failure = transfer.exception(left)
            except TransferTimeout:
                missing.append(f"{i} (peer {shortened(str(address), 40)})")
                continue
            if failure is not None:
                failed[i] = failure
        for key, transfer in list(self._connecting.items()):
            if transfer.done() and transfer.exception() is None:
                self._connecting.pop(key, None)
        if failed:
            raise of_members(failed, len(members), "peer_group")
        if missing:
            rest = len(missing) - _NAMED
            more = f" and {rest} more" if rest > 0 else ""
            raise TransferTimeout(
                f"{len(members) - len(missing)} of {len(members)} members are connected after {timeout_s:g} s; "
                f"missing: {', '.join(missing[:_NAMED])}{more}",
                operation="peer_group",
                hint="wait again: connecting goes on",
            )

    def target(self, remotes: Remotes | None, *, notify: Notify | None = None) -> Target:
        """Where scatters go: a region and a counter of each member, in the group's order.

        Args:
            remotes: a RegionDescriptor for each member; an entry None: that member is only notified. None: so are all.
            notify: a CounterDescriptor for each member; an entry None: that member is not notified. None: nobody is.

        Raises:
            ArgumentError: another number of them than members, or one that belongs to another engine than its member,
                which the error names.
            ArgumentTypeError: something else than descriptors.
            RegionClosed, PeerLost, PeerRestarted: what a descriptor names is gone.
            ResourceExhausted: too many targets or regions are open.
            EngineClosed: the group or its engine was closed.
        """
        return self._target(remotes, notify, "target")

    def barrier(self, *, notify: Notify, timeout_s: float | None = None, request_id: object = None) -> Transfer:
        """Raises the counter of each member by one: a scatter without bytes.

        Whoever has seen its own counter rise by one per other member knows that all of them have come here.

        Args:
            notify: a CounterDescriptor for each member; an entry None: that member is not notified. What the core needs
                is kept for the last few lists of counters, so that a barrier with one of them is cheap.
            timeout_s: seconds; None is the engine's default deadline.
            request_id: kept as `transfer.request_id` and named in errors.

        Raises:
            TransferEngineError: as for `target` and `target.scatter`.
        """
        if self._handle.state:
            self._handle.refuse("barrier")
        try:
            wanted = tuple(notify)
        except TypeError:
            raise ArgumentTypeError(
                f"notify is a list with a counter for each member, not a {type(notify).__name__}", operation="barrier"
            ) from None
        known, target = self._last_barrier
        try:
            same = wanted == known
        except ValueError:  # arrays, which are refused below
            same = False
        if target is None or not same:
            target = self._barrier_target(wanted)
        return target._notify(timeout_s, request_id)

    def replace(self, member: int, address: PeerName, *, timeout_s: float | None = None) -> None:
        """Another peer in the place of a member; starts to connect to it.

        In targets that exist the member is missing from now on: its part of their scatters fails, until
        `target.replace()` gives it a region and a counter of the new peer. The other members are not affected.

        Args:
            member: its index in the group.
            address: of the new peer.
            timeout_s: seconds for connecting; None is the engine's default deadline.

        Raises:
            RangeError: no such member.
            DescriptorError, ArgumentTypeError: no address.
            EngineClosed: the group or its engine was closed.
        """
        self._ensure_open("replace")
        index = member_index(member, len(self), "replace")
        new = _address(address)
        with self._members.lock:
            self._ensure_open("replace")
            self._connect(new, timeout_s)
            addresses = self._members.addresses
            old, addresses[index] = addresses[index], new
            if old not in addresses:
                self._connecting.pop(old._bytes, None)
            kept = self._forget_barriers()
            for target in list(self._targets):
                if not target.closed and target not in kept:
                    target._vacate(index)

    def close(self) -> None:
        """Closes its targets; what is under way goes on, and the peers stay connected. Idempotent."""
        self._handle.ensure_native("close")
        with self._members.lock:
            self._closed = True
            targets = list(self._targets)
            self._forget_barriers()
        for target in targets:
            target.close()

    # --- how --------------------------------------------------------------------------------------------------------

    def _connect(self, address: Address, timeout_s: float | None) -> None:
        known = self._connecting.get(address._bytes)
        if known is None or (known.done() and known.exception() is not None):
            index = self._handle.peer(address, "peer_group")
            self._connecting[address._bytes] = peers.connect(self._handle, index, timeout_s)

    def _target(self, remotes: Remotes | None, notify: Notify | None, operation: str) -> Target:
        with self._members.lock:  # replace() must see it
            self._ensure_open(operation)
            target = Target(self._members, remotes, notify, operation)
            self._targets.add(target)
        return target

    def _barrier_target(self, notify: tuple[Any, ...]) -> Target:
        """The target for these counters: one that is kept, or a new one in the place of the oldest.

        The oldest closes when nobody uses it any more: another thread may be about to.
        """
        with self._members.lock:
            self._ensure_open("barrier")
            key: Any = None
            if all(entry is None or isinstance(entry, CounterDescriptor) for entry in notify):
                key = tuple(None if entry is None else entry._bytes for entry in notify)
            target = None if key is None else self._barriers.get(key)
            if target is None:
                target = self._target(None, notify, "barrier")  # refuses what has no key
                self._barriers[key] = target
                if len(self._barriers) > _BARRIERS:
                    self._barriers.popitem(last=False)
            else:
                self._barriers.move_to_end(key)
            self._last_barrier = (notify, target)
            return target

    def _forget_barriers(self) -> list[Target]:
        targets = list(self._barriers.values())
        self._barriers.clear()
        self._last_barrier = ((), None)
        return targets

    def _ensure_open(self, operation: str) -> None:
        self._handle.ensure_open(operation)
        if self._closed:
            hint = "the engine is open: make another with engine.peer_group()"
            raise EngineClosed("the group is closed", operation=operation, hint=hint)

    def __enter__(self) -> PeerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send the addresses in group.members, and make a group there")

    def __len__(self) -> int:
        return len(self._members.addresses)

    def __bool__(self) -> bool:
        return True  # also where there are no members

    def __repr__(self) -> str:
        return f"<te.PeerGroup of {len(self)} members{': closed' if self.closed else ''}>"


def _listed(members: object) -> Iterable[Any]:
    single = isinstance(members, (Peer, Address, bytes, bytearray, memoryview, str))
    if single or not isinstance(members, Iterable):
        raise ArgumentTypeError(
            f"a group is made of a list of addresses, not of a {type(members).__name__}", operation="peer_group"
        )
    return members


def _address(member: Any) -> Address:
    return member.address if isinstance(member, Peer) else Address.of(member)
