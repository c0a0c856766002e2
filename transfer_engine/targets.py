"""Target: what stays the same in scatters to the members of a group, and the scatter itself.

A scatter is part of the data path: one call into the core, with a struct that is used again, and no Python loop over
the members. The core checks ranges; what is checked here is what only Python can know.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from . import _native
from ._handle import OPEN, EngineHandle
from ._native import FLAG_FLUSH, NONE, ffi, lib, nanoseconds, thread_state
from .descriptors import CounterDescriptor, RegionDescriptor
from .errors import ArgumentError, ArgumentTypeError, EngineClosed, RangeError, refuse_pickle
from .members import Members, entries, member_index, native_member, until_fresh
from .memory import Buffer, Region, RegionSlice, closed_here
from .pages import Scatter, integers
from .transfers import GroupTransfer, Transfer

Remotes: TypeAlias = "Sequence[RegionDescriptor | None]"
Notify: TypeAlias = "Sequence[CounterDescriptor | None]"

_te_scatter = lib.te_scatter
_from_buffer = ffi.from_buffer
_INT64S = ffi.typeof("int64_t[]")
_NDARRAY, _INT64 = np.ndarray, np.dtype(np.int64)
_NULL = ffi.NULL
_SHARDS: dict[Any, int] = {None: lib.TE_SHARD_AUTO, "peers": lib.TE_SHARD_PEERS, "bytes": lib.TE_SHARD_BYTES}


class Target:
    """Where scatters to the members of a group go: a region and a counter of each. A context manager.

    Made by `group.target()`. May be used from any number of threads. Dropping the object closes it.
    """

    __slots__ = ("__weakref__", "_closed", "_count", "_handle", "_id", "_members", "_shape", "_spare")

    def __init__(self, members: Members, remotes: Remotes | None, notify: Notify | None, operation: str) -> None:
        self._closed = True  # until it is open; __del__ runs also when opening fails
        self._handle = handle = members.handle
        self._members = members
        self._count = count = len(members.addresses)
        regions = entries(remotes, "remotes", count, operation)
        counters = entries(notify, "notify", count, operation)
        place = -1 if members.place is None else members.place
        natives = ffi.new("te_target_member[]", count)
        out = ffi.new("te_handle *")

        def opened() -> tuple[int, Any]:
            for i in range(count):
                natives[i] = native_member(members, i, regions[i], counters[i], operation)
            error = thread_state.error
            return lib.te_target_open(handle.pointer, natives, count, place, out, error), error

        until_fresh(handle, opened, operation)
        self._id = int(out[0])
        self._shape = (count,)
        self._spare: list[Any] = []  # te_scatter_args of this target that no call uses now
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once it, its group or its engine was closed."""
        return self._closed or self._handle.state != OPEN

    def scatter(
        self,
        region: Region | RegionSlice,
        *,
        lengths: Any,
        src_offsets: Any = None,
        dst_offsets: Any = None,
        timeout_s: float | None = None,
        request_id: object = None,
        flush: bool = False,
        shard: str | None = None,
    ) -> Transfer:
        """Writes a part of `region` to each member: one command, one transfer.

        Member i gets `lengths[i]` bytes from `src_offsets[i]` of `region`, at `dst_offsets[i]` of its own region; then
        its counter rises by one, also where the length is zero. Every range is checked before the first byte goes.

        Args:
            region: of this engine; with a slice, offsets count from its start, and ranges end at its end.
            lengths: bytes; shape (members,) of any integer type. int64 arrays are used as they stand; all of them are
                read during the call only.
            src_offsets: bytes, likewise; None: all zero.
            dst_offsets: bytes, likewise; None: all zero.
            timeout_s: seconds; None is the engine's default deadline.
            request_id: kept as `transfer.request_id` and named in errors.
            flush: end only when the bytes are visible at the members, proved by reads behind the writes.
            shard: "peers": each member's bytes go over one NIC; "bytes": they are cut over the NICs. None chooses.

        Returns:
            The transfer. If parts fail it fails, and `transfer.failed_members` has them; the others are not affected.

        Raises:
            RangeError: a range outside its region; the error names the member. Nothing was written.
            ArgumentError: arrays of another length, or a region of another engine.
            ArgumentTypeError: no integers, or arguments of other types.
            RegionClosed: `region` was closed on this side.
            TransferTimeout: so much is under way that this found no place before its deadline.
            EngineClosed, ForkedEngine: the engine or this target cannot be used.
        """
        handle = self._handle
        if handle.state or self._closed:
            self._refuse("scatter")
        shape = self._shape
        from_source = _NULL if src_offsets is None else _int64s(src_offsets, shape, "src_offsets")
        of_length = _int64s(lengths, shape, "lengths")
        at_target = _NULL if dst_offsets is None else _int64s(dst_offsets, shape, "dst_offsets")
        if type(region) is not Region:
            region, from_source = _whole(region, from_source, of_length)
        if region._closed or region._handle is not handle:
            _refuse_region(handle, region, "scatter")
        timeout_ns = -1 if timeout_s is None else nanoseconds(timeout_s)
        error = thread_state.error
        if flush is False and shard is None:
            try:
                args = self._spare.pop()
            except IndexError:
                args = ffi.new("te_scatter_args *")
                args.target = self._id
        else:
            args = ffi.new("te_scatter_args *")
            args.target = self._id
            args.flags, args.shard = _flags(flush, shard)
        args.region = region._id
        args.source_offsets = from_source
        args.lengths = of_length
        args.target_offsets = at_target
        pointer = _te_scatter(handle.pointer, args, timeout_ns, error)
        if not pointer:
            pointer = self._persist(args, error, "scatter", timeout_s, request_id)
        if shard is None and not flush:
            self._spare.append(args)
        return GroupTransfer(pointer, handle, "scatter", (region, shape[0]), request_id)

    def replace(self, member: int, remote: RegionDescriptor | None, *, notify: CounterDescriptor | None = None) -> None:
        """Another region and counter for one member, of the engine that the group has there now.

        Scatters that start from now on use them.

        Args:
            member: its index in the group.
            remote: the region; None: the member is only notified.
            notify: the counter; None: no notifications.

        Raises:
            ArgumentError: they belong to another engine than the member.
            RangeError: no such member.
            EngineClosed: the target was closed.
        """
        handle = self._handle
        self._ensure_open("replace")
        index = member_index(member, self._count, "replace")
        native = ffi.new("te_target_member *")

        def replaced() -> tuple[int, Any]:
            native[0] = native_member(self._members, index, remote, notify, "replace")
            error = thread_state.error
            return lib.te_target_replace(handle.pointer, self._id, index, native, error), error

        with self._members.lock:  # the group must not get another member in between
            self._ensure_open("replace")
            until_fresh(handle, replaced, "replace")

    def close(self) -> None:
        """Gives up what it holds. Scatters under way go on; new ones are refused. Idempotent."""
        handle = self._handle
        handle.ensure_native("close")
        with self._members.lock:
            if self._closed:
                return
            self._closed = True
        if handle.state == OPEN:
            error = thread_state.error
            status = lib.te_target_close(handle.pointer, self._id, error)
            if status not in (_native.OK, _native.CLOSED):
                raise handle.failure("close target", status, error)

    # --- for the group ----------------------------------------------------------------------------------------------

    def _vacate(self, index: int) -> None:
        """The member is missing from now on: its part of scatters fails."""
        error = thread_state.error
        status = lib.te_target_replace(self._handle.pointer, self._id, index, _NULL, error)
        if status != _native.OK and not self._closed:
            raise self._handle.failure("replace", status, error)

    def _notify(self, timeout_s: float | None, request_id: object) -> Transfer:
        """A barrier: nothing but notifications."""
        handle = self._handle
        if not self._spare:
            args = ffi.new("te_scatter_args *", {"target": self._id, "region": NONE})
            self._spare.append(args)  # and stays there: nothing changes it
        args = self._spare[0]
        error = thread_state.error
        pointer = _te_scatter(handle.pointer, args, -1 if timeout_s is None else nanoseconds(timeout_s), error)
        if not pointer:
            pointer = self._persist(args, error, "barrier", timeout_s, request_id)
        return GroupTransfer(pointer, handle, "barrier", (None, self._count), request_id)

    def _persist(self, args: Any, error: Any, operation: str, timeout_s: float | None, request_id: object) -> Any:
        """The first call gave no transfer: goes on if only room was missing, else raises."""
        handle = self._handle

        def again() -> Any:
            self._ensure_open(operation)
            return _te_scatter(handle.pointer, args, nanoseconds(timeout_s), error)

        pointer = handle.persist(again, error, timeout_s)
        if not pointer:
            self._ensure_open(operation)
            note = "" if request_id is None else f" (request {request_id!r})"
            raise handle.failure(operation, error.status, error, note)
        return pointer

    def _ensure_open(self, operation: str) -> None:
        if self._handle.state or self._closed:
            self._refuse(operation)

    def _refuse(self, operation: str) -> NoReturn:
        self._handle.ensure_open(operation)
        raise EngineClosed(
            "the target is closed", operation=operation, hint="the engine is open: make another with group.target()"
        )

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and self._handle.state == OPEN:
            self._closed = True
            lib.te_target_close(self._handle.pointer, self._id, ffi.new("te_error *"))

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send the descriptors, and make a target there")

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True  # also where there are no members

    def __repr__(self) -> str:
        return f"<te.Target of {self._count} members{': closed' if self.closed else ''}>"


# --- the arguments of a scatter ---------------------------------------------------------------------------------------


def scatter_args(handle: EngineHandle, scatter: Scatter, operation: str) -> tuple[Any, Region, object]:
    """A te_scatter_args for what a te.Scatter says, the region that it reads, and what must outlive the arguments."""
    target = scatter.target
    if not isinstance(target, Target):
        raise ArgumentTypeError(f"a scatter goes to a te.Target, not to {type(target).__name__}", operation=operation)
    if target._handle is not handle:
        raise ArgumentError(f"{target!r} belongs to another engine", operation=operation)
    target._ensure_open(operation)
    shape = target._shape
    sources, targets = scatter.src_offsets, scatter.dst_offsets
    from_source = _NULL if sources is None else _int64s(sources, shape, "src_offsets")
    of_length = _int64s(scatter.lengths, shape, "lengths")
    at_target = _NULL if targets is None else _int64s(targets, shape, "dst_offsets")
    region: Any = scatter.region
    if type(region) is not Region:
        region, from_source = _whole(region, from_source, of_length)
    if region._closed or region._handle is not handle:
        _refuse_region(handle, region, operation)
    flags, shard = _flags(scatter.flush, scatter.shard)
    fields = (target._id, region._id, flags, shard, from_source, of_length, at_target)
    args = ffi.new("te_scatter_args *", fields)
    return args, region, (from_source, of_length, at_target)


def _int64s(values: Any, shape: tuple[int], name: str) -> Any:
    """A pointer to that many int64_t, which keeps them alive."""
    if type(values) is not _NDARRAY or values.dtype is not _INT64 or values.shape != shape:
        values = _converted(values, shape[0], name)
    try:
        return _from_buffer(_INT64S, values)
    except (ValueError, BufferError):  # strided
        return _from_buffer(_INT64S, np.ascontiguousarray(values))


def _converted(values: Any, count: int, name: str) -> Any:
    array = integers(values, name, "scatter")
    if len(array) != count:
        raise ArgumentError(f"{len(array)} {name} for {count} members", operation="scatter")
    return np.ascontiguousarray(array, np.int64)


def _whole(source: Any, from_source: Any, of_length: Any) -> tuple[Region, Any]:
    """The region of a slice, and the offsets from the region's start."""
    if isinstance(source, Region):
        return source, from_source
    if not isinstance(source, RegionSlice):
        raise ArgumentTypeError(
            f"the source must be a Region or a slice of one, not {type(source).__name__}",
            operation="scatter",
            hint="use buffer.region, or a range of it" if isinstance(source, Buffer) else None,
        )
    limit = source.length_bytes
    lengths = _array(of_length)
    offsets = np.zeros(len(lengths), np.int64) if from_source is _NULL else _array(from_source)
    wrong = (offsets < 0) | (lengths < 0) | (lengths > limit) | (offsets > limit - lengths)
    if wrong.any():
        member = int(wrong.argmax())
        raise RangeError(
            f"member {member}: {lengths[member]} bytes from offset {offsets[member]} leave the slice of {limit} bytes",
            operation="scatter",
        )
    return source.region, _from_buffer(_INT64S, offsets + source.offset_bytes)


def _array(pointer: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(ffi.buffer(pointer), np.int64) if len(pointer) else np.empty(0, np.int64)


def _flags(flush: object, shard: object) -> tuple[int, int]:
    """The fields `flags` and `shard` of a te_scatter_args."""
    if flush is not True and flush is not False:
        raise ArgumentTypeError(f"flush must be True or False, not {flush!r}", operation="scatter")
    if shard is not None and not isinstance(shard, str):
        raise ArgumentTypeError(f"shard must be a str or None, not {type(shard).__name__}", operation="scatter")
    if shard not in _SHARDS:
        raise ArgumentError(f"shard must be 'peers', 'bytes' or None, not {shard!r}", operation="scatter")
    return FLAG_FLUSH if flush else 0, _SHARDS[shard]


def _refuse_region(handle: EngineHandle, region: Region, operation: str) -> NoReturn:
    if region._handle is not handle:
        raise ArgumentError(f"{region!r} is registered with another engine", operation=operation)
    raise closed_here(region, operation)
