"""The data path of an engine: writes, paged writes and batches.

Everything here counts: no allocation through cffi, no logging and no helper objects between the call and the core. The
core checks ranges; what is checked here is what only Python can know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from . import _native
from ._handle import EngineHandle
from ._native import FLAG_FLUSH, NONE, ffi, lib, nanoseconds, thread_state
from .descriptors import CounterDescriptor, RegionDescriptor, RemoteSlice
from .errors import ArgumentError, ArgumentTypeError, TransferEngineError
from .memory import Buffer, Region, RegionSlice, closed_here
from .pages import Pages, PageWrite, Write
from .transfers import Transfer

_te_write = lib.te_write


class Datapath:
    """The part of an Engine that moves bytes."""

    __slots__ = ("_handle",)

    _handle: EngineHandle

    def write(
        self,
        source: RegionSlice | Region,
        target: RemoteSlice | RegionDescriptor,
        *,
        notify: CounterDescriptor | None = None,
        timeout_s: float | None = None,
        request_id: object = None,
        flush: bool = False,
    ) -> Transfer:
        """Writes `source` into a peer's memory.

        Args:
            source: bytes of a region of this engine.
            target: as many bytes of a peer's region; zero bytes are allowed, and still notify.
            notify: the peer's counter that rises by one once all bytes are in memory.
            timeout_s: seconds; None is the engine's default deadline.
            request_id: kept as `transfer.request_id` and named in errors.
            flush: end only when the bytes are visible at the peer, proved by a read behind the write.

        Returns:
            The transfer; connecting to the peer is part of it.

        Raises:
            ArgumentError: lengths that differ, or regions of another engine.
            ArgumentTypeError: arguments of other types.
            RegionClosed: the source was closed here, or the target by its owner.
            PeerLost, PeerRestarted: the target's owner is gone.
            TransferTimeout: so many operations are under way that this one found no place before its deadline.
            EngineClosed, ForkedEngine: this engine cannot be used.
        """
        handle = self._handle
        if handle.state:
            handle.refuse("write")
        if type(source) is RegionSlice:
            region = source.region
            source_offset = source.offset_bytes
            length = source.length_bytes
        else:
            region, source_offset, length = _whole_region(source)
        if type(target) is RemoteSlice:
            descriptor = target.descriptor
            target_offset = target.offset_bytes
            target_length = target.length_bytes
        else:
            descriptor, target_offset, target_length = _whole_remote(target)
        if length != target_length or region._closed or region._handle is not handle:
            _refuse(handle, region, length, target_length)
        remote = handle.remotes.get(descriptor._bytes)
        if remote is None:
            remote = handle.remote_region(descriptor, "write")
        if notify is None:
            counter: int | None = NONE
        else:
            if type(notify) is not CounterDescriptor:
                _refuse_notify(notify)
            counter = handle.counters.get(notify._bytes)
            if counter is None:
                counter = handle.remote_counter(notify, "write")
        error = thread_state.error
        flags = 0 if flush is False else _flags(flush)
        timeout_ns = -1 if timeout_s is None else nanoseconds(timeout_s)
        pointer = _te_write(
            handle.pointer, region._id, source_offset, remote, target_offset, length, counter, flags, timeout_ns, error
        )
        if not pointer:

            def again() -> Any:
                return _te_write(
                    handle.pointer, region._id, source_offset, _remote(handle, descriptor, "write"), target_offset,
                    length, _counter(handle, notify, "write"), flags, timeout_ns, thread_state.error,
                )  # fmt: skip

            pointer = _persist(handle, "write", again, error, timeout_s, request_id)
        return Transfer(pointer, handle, "write", region, request_id)

    def write_pages(
        self,
        source: Pages,
        target: Pages,
        *,
        notify: CounterDescriptor | None = None,
        timeout_s: float | None = None,
        request_id: object = None,
        flush: bool = False,
    ) -> Transfer:
        """Writes page i of `source` to page i of `target`, for all i.

        The indices are read during the call: changing them afterwards changes nothing. Every page is checked against
        its region before the first is posted.

        Args:
            source: pages of a region of this engine.
            target: as many pages of the same length, of a peer's region.
            notify: the peer's counter that rises by one for each page.
            timeout_s: seconds; None is the engine's default deadline.
            request_id: kept as `transfer.request_id` and named in errors.
            flush: end only when the bytes are visible at the peer, proved by a read behind the writes.

        Raises:
            RangeError: a page outside its region; nothing was written.
            ArgumentError: page counts or lengths that differ.
            TransferEngineError: as for `write`.
        """
        handle = self._handle
        if handle.state:
            handle.refuse("write_pages")
        args = ffi.new("te_page_args *")
        alive = fill_pages(handle, args, source, target, notify, flush, "write_pages")
        error = thread_state.error
        submit = partial(lib.te_write_pages, handle.pointer, args, nanoseconds(timeout_s), error)

        def again() -> Any:
            _fill_ends(handle, args, target.region, notify, "write_pages")
            return submit()

        pointer = submit() or _persist(handle, "write_pages", again, error, timeout_s, request_id)
        del alive  # the core has read the indices
        return Transfer(pointer, handle, "write_pages", source.region, request_id)

    def write_batch(
        self,
        writes: Iterable[Write | PageWrite],
        *,
        timeout_s: float | None = None,
        request_id: object = None,
    ) -> Transfer:
        """Many operations with one outcome: every entry is checked before the first is posted.

        Args:
            writes: in any mixture, to any peers. No order among them is promised.
            timeout_s: seconds for all of them; None is the engine's default deadline.
            request_id: kept as `transfer.request_id` and named in errors.

        Raises:
            TransferEngineError: as for `write` and `write_pages`; nothing was written.
        """
        handle = self._handle
        if handle.state:
            handle.refuse("write_batch")
        if not isinstance(writes, Iterable):
            raise ArgumentTypeError(
                f"a batch is a list of te.Write and te.PageWrite, not a {type(writes).__name__}",
                operation="write_batch",
                hint="put a single one into a list",
            )
        listed = list(writes)
        entries = ffi.new("te_batch_entry[]", len(listed))
        alive: list[object] = []

        def again() -> Any:
            for entry, write in zip(entries, listed, strict=True):
                is_pages = isinstance(write, PageWrite)
                target = write.target.region if isinstance(write, PageWrite) else write.target
                _fill_ends(handle, entry.pages if is_pages else entry.write, target, write.notify, "write_batch")
            return submit()

        for i, write in enumerate(listed):
            try:
                alive.append(_fill_entry(handle, entries[i], write))
            except TransferEngineError as cause:
                raise _of_entry(i, cause) from None
        error = thread_state.error
        submit = partial(lib.te_write_batch, handle.pointer, entries, len(listed), nanoseconds(timeout_s), error)
        pointer = submit() or _persist(handle, "write_batch", again, error, timeout_s, request_id)
        return Transfer(pointer, handle, "write_batch", alive, request_id)


def _fill_entry(handle: EngineHandle, entry: Any, write: object) -> object:
    """Returns what must stay alive until the transfer has ended."""
    if isinstance(write, Write):
        entry.write = write_args(handle, write, "write_batch")
        return write.source
    if isinstance(write, PageWrite):
        entry.is_pages = 1
        indices = fill_pages(handle, entry.pages, write.source, write.target, write.notify, write.flush, "write_batch")
        return indices, write.source.region
    raise ArgumentTypeError(f"a {type(write).__name__}; expected te.Write or te.PageWrite", operation="write_batch")


def _of_entry(index: int, error: TransferEngineError) -> TransferEngineError:
    error.message = f"entry {index}: {error.message}"
    error.args = (error.message,)
    error.operation = "write_batch"
    return error


def write_args(handle: EngineHandle, write: Write, operation: str) -> tuple[int, ...]:
    """A te_write_args in the order of its fields: one conversion instead of seven."""
    source, target = write.source, write.target
    region, source_offset, length = (
        (source.region, source.offset_bytes, source.length_bytes)
        if isinstance(source, RegionSlice)
        else _whole_region(source)
    )
    descriptor, target_offset, target_length = (
        (target.descriptor, target.offset_bytes, target.length_bytes)
        if isinstance(target, RemoteSlice)
        else _whole_remote(target)
    )
    if length != target_length or region._closed or region._handle is not handle:
        _refuse(handle, region, length, target_length)
    remote = _remote(handle, descriptor, operation)
    counter = _counter(handle, write.notify, operation)
    flags = _flags(write.flush)
    return region._id, remote, counter, flags, source_offset, target_offset, length


def fill_pages(
    handle: EngineHandle,
    args: Any,
    source: Pages,
    target: Pages,
    notify: CounterDescriptor | None,
    flush: bool,
    operation: str,
) -> tuple[object, ...]:
    """Returns what must stay alive until the core has read the indices."""
    if type(source) is not Pages or type(target) is not Pages:
        raise ArgumentTypeError("paged writes go from te.Pages to te.Pages", operation=operation)
    region, descriptor = source.region, target.region
    if not isinstance(region, Region) or not isinstance(descriptor, RegionDescriptor):
        raise ArgumentTypeError("source pages lie in a Region, target pages in a RegionDescriptor", operation=operation)
    count = len(source.indices)
    if count != len(target.indices) or source.page_bytes != target.page_bytes:
        raise ArgumentError(
            f"{count} pages of {source.page_bytes} bytes do not match {len(target.indices)} of {target.page_bytes}",
            operation=operation,
        )
    if region._closed or region._handle is not handle:
        _refuse(handle, region, 0, 0)
    args.region = region._id
    _fill_ends(handle, args, descriptor, notify, operation)
    args.flags = _flags(flush)
    args.source_offset = source.offset_bytes
    args.target_offset = target.offset_bytes
    args.source_stride = source.stride_bytes
    args.target_stride = target.stride_bytes
    args.page_bytes = source.page_bytes
    args.count = count
    source_indices, target_indices = _contiguous(source.indices), _contiguous(target.indices)
    args.source_index_bytes = source_indices.itemsize
    args.target_index_bytes = target_indices.itemsize
    from_source, from_target = _native.pointer_to(source_indices), _native.pointer_to(target_indices)
    args.source, args.target = from_source, from_target
    return from_source, from_target


def _fill_ends(handle: EngineHandle, args: Any, target: Any, notify: CounterDescriptor | None, operation: str) -> None:
    """The remote ends of a te_write_args or te_page_args: anew for each try, since the core may give up handles."""
    descriptor: RegionDescriptor = target.descriptor if isinstance(target, RemoteSlice) else target
    args.remote = _remote(handle, descriptor, operation)
    args.counter = _counter(handle, notify, operation)


def _contiguous(indices: Any) -> Any:
    return indices if indices.flags.c_contiguous else indices.copy()


def _remote(handle: EngineHandle, descriptor: RegionDescriptor, operation: str) -> int:
    remote = handle.remotes.get(descriptor._bytes)
    return handle.remote_region(descriptor, operation) if remote is None else remote


def _counter(handle: EngineHandle, notify: CounterDescriptor | None, operation: str) -> int:
    if notify is None:
        return NONE
    if type(notify) is not CounterDescriptor:
        _refuse_notify(notify)
    counter = handle.counters.get(notify._bytes)
    return handle.remote_counter(notify, operation) if counter is None else counter


def _flags(flush: object) -> int:
    if flush is True or flush is False:
        return FLAG_FLUSH if flush else 0
    raise ArgumentTypeError(f"flush must be True or False, not {flush!r}", operation="write")


def _whole_region(source: object) -> tuple[Region, int, int]:
    if isinstance(source, Region):
        return source, 0, source._length
    hint = "engine.register(memory) makes a Region; region.of(view) finds the slice of a view"
    raise ArgumentTypeError(
        f"the source must be a Region or a slice of one, not {type(source).__name__}",
        operation="write",
        hint="use buffer.region, or a range of it: buffer[start:stop]" if isinstance(source, Buffer) else hint,
    )


def _whole_remote(target: object) -> tuple[RegionDescriptor, int, int]:
    if isinstance(target, RegionDescriptor):
        return target, 0, target._length
    hint = "use region.descriptor" if isinstance(target, (Region, RegionSlice)) else None
    if isinstance(target, Buffer):
        hint = "use buffer.region.descriptor, as the buffer's owner passes it on"
    raise ArgumentTypeError(
        f"the target must be a RegionDescriptor or a slice of one, not {type(target).__name__}",
        operation="write",
        hint=hint,
    )


def _refuse(handle: EngineHandle, region: Region, length: int, target_length: int) -> NoReturn:
    if region._handle is not handle:
        raise ArgumentError(f"{region!r} is registered with another engine", operation="write")
    if region._closed:
        raise closed_here(region, "write")
    raise ArgumentError(f"the source has {length} bytes, the target {target_length}", operation="write")


def _refuse_notify(notify: object) -> NoReturn:
    raise ArgumentTypeError(
        f"notify must be a te.CounterDescriptor, not {type(notify).__name__}",
        operation="write",
        hint="the receiver makes the counter and passes on bytes(counter.descriptor)",
    )


def _persist(
    handle: EngineHandle,
    operation: str,
    submit: Callable[[], Any],
    error: Any,
    timeout_s: float | None,
    request_id: object,
) -> Any:
    """The first call gave no transfer: goes on if only a slot was missing or a handle was given up, else raises."""
    pointer = handle.persist(submit, error, timeout_s)
    if not pointer:
        raise _failed(handle, operation, error, request_id)
    return pointer


def _failed(handle: EngineHandle, operation: str, error: Any, request_id: object) -> TransferEngineError:
    if error.status != lib.TE_ERR_EXHAUSTED:
        handle.forget_remotes()  # the core may have given up what we remember
    note = "" if request_id is None else f" (request {request_id!r})"
    return handle.failure(operation, error.status, error, note)
