"""The native engine and what all objects made from it share: life cycle, caches of remote handles, errors with names.

An Engine, its regions, counters, transfers and peers refer to one EngineHandle, and the native engine is freed with
the last reference. So no call can meet freed memory, whatever thread closes the engine. After a fork the child's
handles are marked before anything else runs in it: from then on nothing native is touched.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from . import _native
from ._native import ffi, lib, thread_state
from .address import Address
from .descriptors import CounterDescriptor, RegionDescriptor
from .errors import EngineClosed, ForkedEngine, TransferEngineError, TransportError

OPEN, CLOSING, CLOSED, FORKED = range(4)
_CACHED = 1 << 16  # remote handles remembered; the core is asked again for forgotten ones
_STUCK_NS = 10_000_000_000  # the worker goes round every 0.1 s at least


class EngineHandle:
    """Owner of a te_engine. `state` is OPEN (0) while it can be used."""

    __slots__ = (
        "__weakref__", "counters", "default_timeout_ns", "device", "dispatcher", "lock", "nic_names", "owners",
        "peers", "pending", "pointer", "remotes", "serials", "state",
    )  # fmt: skip

    def __init__(self, settings: Any, default_timeout_ns: int) -> None:
        self.state = CLOSED  # until it is open; __del__ runs also when opening fails
        self.pointer: Any = None
        out = ffi.new("te_engine **")
        error = ffi.new("te_error *")
        _native.check(lib.te_engine_open(settings, out, error), "open", error)
        self.pointer = out[0]
        self.default_timeout_ns = default_timeout_ns
        self.lock = threading.RLock()  # one an engine, so that a fork cannot leave other engines' locks taken
        self.remotes: dict[bytes, int] = {}  # region descriptor -> the core's handle
        self.counters: dict[bytes, int] = {}  # counter descriptor -> the core's handle
        self.peers: dict[bytes, int] = {}  # address -> the core's index
        self.owners: dict[int, object] = {}  # region -> what keeps its memory alive
        self.pending: dict[int, Any] = {}  # transfers whose end will be reported as an event
        self.serials = itertools.count(1)
        self.dispatcher: Any = None
        self.device: int | None = None  # the GPU that the engine serves
        self.nic_names: tuple[str, ...] = ()
        self.state = OPEN
        _handles.add(self)

    # --- life cycle -------------------------------------------------------------------------------------------------

    def ensure_open(self, operation: str) -> None:
        if self.state:
            self.refuse(operation)

    def ensure_native(self, operation: str) -> None:
        """For calls that are allowed on a closed engine but not in a forked child."""
        if self.state == FORKED:
            self.refuse(operation)

    def refuse(self, operation: str) -> NoReturn:
        if self.state == FORKED:
            raise ForkedEngine(f"this engine was opened before process {os.getpid()} was forked", operation=operation)
        raise EngineClosed("the engine is closed", operation=operation)

    def close(self, timeout_ns: int) -> TransferEngineError | None:
        """Closes the native engine. Idempotent; safe in any thread, in signal handlers and during finalization.

        A time-out means that some peer did not confirm; everything is stopped all the same. Then the memory is kept
        until the engine is freed, since a transport without enforced keys may still write to it.
        """
        if self.state in (CLOSED, FORKED):
            return None
        self.state = CLOSING
        error = ffi.new("te_error *")  # not the thread's: this may interrupt a call that is about to read it
        status = lib.te_engine_close(self.pointer, timeout_ns, error)
        failure = None if status == _native.OK else self.failure("close", status, error)
        if failure is None:
            self.owners.clear()
        self.state = CLOSED
        return failure

    def __del__(self) -> None:
        if self.state != FORKED and self.pointer is not None:
            lib.te_engine_free(self.pointer)

    # --- names of peers, regions and counters ---------------------------------------------------------------------

    def remote_region(self, descriptor: RegionDescriptor, operation: str) -> int:
        out = ffi.new("te_handle *")
        error = thread_state.error
        status = lib.te_remote_region(self.pointer, descriptor._native, out, error)
        if status != _native.OK:
            raise self.failure(operation, status, error)
        if len(self.remotes) >= _CACHED:
            self.remotes.clear()
        handle = self.remotes[descriptor._bytes] = int(out[0])
        return handle

    def remote_counter(self, descriptor: CounterDescriptor, operation: str) -> int:
        out = ffi.new("te_handle *")
        error = thread_state.error
        status = lib.te_remote_counter(self.pointer, descriptor._native, out, error)
        if status != _native.OK:
            raise self.failure(operation, status, error)
        if len(self.counters) >= _CACHED:
            self.counters.clear()
        handle = self.counters[descriptor._bytes] = int(out[0])
        return handle

    def peer(self, address: Address, operation: str) -> int:
        """The index of a peer. Does not connect."""
        index = self.peers.get(address._bytes)
        if index is None:
            out = ffi.new("int32_t *")
            error = thread_state.error
            status = lib.te_peer(self.pointer, address._native, out, error)
            if status != _native.OK:
                raise self.failure(operation, status, error)
            index = self.peers[address._bytes] = int(out[0])
        return index

    def forget_remotes(self) -> None:
        """After a refusal or a disconnect the core may have given up handles: ask it anew at the next use."""
        self.remotes.clear()
        self.counters.clear()
        self.peers.clear()

    def describe_peer(self, index: int) -> Any:
        """A te_peer_info, or None when there is no such peer."""
        info = ffi.new("te_peer_info *")
        error = ffi.new("te_error *")
        return info if lib.te_peer_describe(self.pointer, index, info, error) == _native.OK else None

    def address_of(self, index: int) -> Address | None:
        info = self.describe_peer(index)
        return None if info is None else Address.from_native(ffi.addressof(info, "address"))

    # --- errors -----------------------------------------------------------------------------------------------------

    def ensure_alive(self, operation: str) -> None:
        """Raises TransportError when the worker thread is held inside the provider: what is under way will not end."""
        silence_ns = lib.te_engine_silence(self.pointer) if self.state == OPEN else 0
        if silence_ns > _STUCK_NS:
            raise TransportError(
                f"{operation}: the worker thread has been held inside the provider for {silence_ns / 1e9:.0f} s",
                operation=operation,
                hint="libfabric's shm waits for ever for a lock that a killed process held: restart this process",
            )

    def failure(
        self, operation: str, status: int, error: Any, note: str = "", names: dict[int, str] | None = None
    ) -> TransferEngineError:
        """The exception for a failed call, with the names of peer and NIC. `names` remembers those of peers."""
        hint = None
        if status == _native.CLOSED and self.state == OPEN:
            hint = "this counter was closed, the engine is open: make another with engine.counter()"
        elif status == lib.TE_ERR_CONFIG and "speaks transport" in _native.text(error.message):
            status, hint = lib.TE_ERR_ARGUMENT, "open both engines on one transport, and exchange addresses again"
        elif status == lib.TE_ERR_RANGE and operation in ("write_pages", "write_batch"):
            hint = "page i is page_bytes long, at offset_bytes + indices[i] * stride_bytes; all of it must be inside"
        elif status == _native.STALE and operation in ("scatter", "barrier"):
            hint = "target.replace(member, remote, notify=...) fills the place that group.replace() left"
        elif status == lib.TE_ERR_RANGE and operation == "scatter":
            hint = "lengths[i] bytes from src_offsets[i] must lie in the source, and from dst_offsets[i] in remote i"
        peer = None
        if error.peer >= 0:
            peer = names.get(error.peer) if names else None
            peer = peer or self._name_of(error.peer)
            if names is not None:
                names[error.peer] = peer
        return _native.failure(operation, status, error, peer=peer, nics=self.nic_names, note=note, hint=hint)

    def _name_of(self, index: int) -> str:
        address = self.address_of(index)
        return f"#{index}" if address is None else str(address)

    def persist(self, submit: Callable[[], Any], error: Any, timeout_s: float | None) -> Any:
        """Goes on while the core has no free slot, until the deadline: a null pointer, or what `submit` gave.

        Remote handles that the core has given up are forgotten, so that `submit` asks for them anew. The core
        waits for a slot in slices, so that Ctrl-C is served in between.
        """
        limit = self.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        deadline = time.monotonic_ns() + limit
        pointer = ffi.NULL
        while not pointer and error.status in (_native.AGAIN, _native.STALE) and time.monotonic_ns() < deadline:
            self.ensure_open("submit")
            if error.status == _native.STALE:
                self.forget_remotes()
            pointer = submit()
        if not pointer and error.status == _native.AGAIN:
            error.status = lib.TE_ERR_TIMEOUT
            if not _native.text(error.message):
                _native.set_message(error, "every operation slot was in use until the deadline")
        return pointer


_handles: weakref.WeakSet[EngineHandle] = weakref.WeakSet()


def _mark_forked() -> None:
    for handle in list(_handles):
        handle.state = FORKED


os.register_at_fork(after_in_child=_mark_forked)
