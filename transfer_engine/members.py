"""The members of a group, as its targets see them: checks, and the core's names for what descriptors name."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _native
from ._handle import EngineHandle
from ._native import NONE, ffi
from .address import Address
from .descriptors import CounterDescriptor, RegionDescriptor
from .errors import ArgumentError, ArgumentTypeError, RangeError
from .memory import Buffer, Region, RegionSlice

_TRIES = 8  # the core may give up a remote handle between two calls


@dataclass(frozen=True, slots=True)
class Members:
    """What a group and its targets share."""

    handle: EngineHandle
    addresses: list[Address]  # changed by group.replace()
    place: int | None
    lock: threading.RLock  # taken where members change; not on the data path


def member_index(member: Any, count: int, operation: str) -> int:
    """The index of a member.

    Raises:
        RangeError: there is none with this index.
        ArgumentTypeError: no integer.
    """
    try:
        index = operator.index(member)
    except TypeError:
        raise ArgumentTypeError(
            f"a member is named by its index, not by {type(member).__name__}", operation=operation
        ) from None
    if not 0 <= index < count:
        raise RangeError(f"there is no member {index} among {count}", operation=operation, hint="members count from 0")
    return index


def entries(values: Any, name: str, count: int, operation: str) -> Sequence[Any]:
    """One entry for each member; None: none has one."""
    if values is None:
        return [None] * count
    single = isinstance(values, (RegionDescriptor, CounterDescriptor, str, bytes, bytearray))
    if single or not isinstance(values, Sequence):
        raise ArgumentTypeError(
            f"{name} is a list with an entry for each member, not a {type(values).__name__}", operation=operation
        )
    if len(values) != count:
        raise ArgumentError(f"{len(values)} {name} for {count} members", operation=operation)
    return values


def native_member(members: Members, index: int, remote: Any, notify: Any, operation: str) -> tuple[int, int, int]:
    """A te_target_member in the order of its fields."""
    handle, address = members.handle, members.addresses[index]
    remote_handle = counter_handle = NONE
    if remote is not None:
        if not isinstance(remote, RegionDescriptor):
            hint = "use region.descriptor" if isinstance(remote, (Region, RegionSlice, Buffer)) else None
            raise ArgumentTypeError(
                f"member {index}: a te.RegionDescriptor or None, not {type(remote).__name__}",
                operation=operation,
                hint=hint or "scatters address whole regions: pass the descriptor itself, and dst_offsets",
            )
        _ensure_owner(address, index, remote, "region", operation)
        known = handle.remotes.get(remote._bytes)
        remote_handle = handle.remote_region(remote, operation) if known is None else known
    if notify is not None:
        if not isinstance(notify, CounterDescriptor):
            raise ArgumentTypeError(
                f"member {index}: notify is a te.CounterDescriptor or None, not {type(notify).__name__}",
                operation=operation,
                hint="the receiver makes the counter and passes on bytes(counter.descriptor)",
            )
        _ensure_owner(address, index, notify, "counter", operation)
        known = handle.counters.get(notify._bytes)
        counter_handle = handle.remote_counter(notify, operation) if known is None else known
    return handle.peer(address, operation), remote_handle, counter_handle


def _ensure_owner(
    address: Address, index: int, descriptor: RegionDescriptor | CounterDescriptor, what: str, operation: str
) -> None:
    """An engine is its identity and generation: so has the core, too."""
    owner, member = descriptor._native.address, address._native
    same_identity = ffi.buffer(owner.identity)[:] == ffi.buffer(member.identity)[:]
    if same_identity and owner.generation == member.generation:
        return
    life = "another life of this engine" if same_identity else f"another engine ({descriptor.address!r})"
    raise ArgumentError(
        f"member {index}: the {what} belongs to {life}",
        operation=operation,
        peer=str(address),
        hint="descriptors must be in the order of the group's members",
    )


def until_fresh(handle: EngineHandle, call: Callable[[], tuple[int, Any]], operation: str) -> None:
    """Repeats the call while the core has given up handles that it was made with; raises what else it says."""
    for _ in range(_TRIES):
        status, error = call()
        if status == _native.OK:
            return
        if status != _native.STALE:
            break
        handle.forget_remotes()
    handle.forget_remotes()  # the core may have given up what we remember
    raise handle.failure(operation, status, error)
