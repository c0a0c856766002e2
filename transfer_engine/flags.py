"""Flag: a 64-bit epoch that this engine raises and others wait for. Binding: a counter that raises it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, NoReturn

from . import _native, _words
from ._handle import OPEN, EngineHandle
from ._native import ffi, lib, thread_state
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    EngineClosed,
    PeerLost,
    TransferEngineError,
    TransferTimeout,
    refuse_pickle,
)


class Flag:
    """An epoch that only rises, so nothing that was set leaks into the next round. Made by `engine.flag()`.

    Raised by `raise_()`, by counters that are bound to it, and by triggers. A context manager; dropping the object
    closes it.

    Attributes:
        kind: where the epoch lies: "host" (no GPU), "mapped" (pinned memory of the host) or "gdr" (GPU memory that the
            CPU writes through GDRCopy).
    """

    __slots__ = ("__weakref__", "_bindings", "_closed", "_device", "_handle", "_id", "_info", "_taken", "kind")

    def __init__(self, handle: EngineHandle, device: Any = None) -> None:
        self._closed = True  # until it is open; __del__ runs also when opening fails
        self._handle = handle
        self._id, self._device = _words.open_word(handle, lib.te_flag_open, "flag", device)
        self._closed = False
        self._bindings: set[Binding] = set()  # they last as long as the flag, also when their objects are dropped
        self._taken = 0  # epochs consumed by waits of the host
        self._info = self._describe("flag")
        self.kind = _words.kind_name(self._info.kind)

    @property
    def device_pointer(self) -> int:
        """The address of the epoch for kernels; 0 for a flag of the host."""
        return int(self._info.epoch_device)

    @property
    def control_pointer(self) -> int:
        """For kernels of your own: the address of two 64-bit words; 0 for a flag of the host.

        The first is the reason to abort, the second counts waits that left without their epoch. Whoever polls the
        epoch polls the first one, too, and leaves when it is not zero.
        """
        return int(self._info.control_device)

    @property
    def value(self) -> int:
        """The epoch."""
        return int(self._describe("flag value").epoch)

    @property
    def closed(self) -> bool:
        """True once it or its engine was closed."""
        return self._closed or self._handle.state != OPEN

    def raise_(self, n: int = 1) -> None:
        """Raises the epoch by `n`, and wakes those who wait for it."""
        by = _words.number(n, "n", "raise flag", most=_words.MOST_AT_ONCE)
        self._ensure_open("raise flag")
        error = thread_state.error
        status = lib.te_flag_raise(self._handle.pointer, self._id, by, error)
        if status != _native.OK:
            raise _words.refusal(self._handle, "raise flag", status, error)

    def wait(self, stream: object = None, *, advance: int = 1, timeout_s: float | None = None) -> None:
        """Waits for the next epochs: those that no wait of this flag has consumed yet.

        For a flag of a device the *stream* waits, and this call returns at once; it can be captured into a graph, and
        each replay waits for the next epoch. A wait of the device ends without its epoch when the deadline passes, when
        a peer of a binding is lost and when the engine closes: `check()` tells.

        Args:
            stream: a CUDA stream of the flag's device; None is the default one. None for a flag of the host, whose
                calling thread waits.
            advance: how many epochs.
            timeout_s: seconds; None is the engine's default deadline.

        Raises:
            TransferTimeout, PeerLost, EngineClosed: of a flag of the host, whose epochs then are not consumed.
        """
        operation = "flag wait"
        epochs = _words.number(advance, "advance", operation, 1)
        limit = self._handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        self._ensure_open(operation)
        if self._device != _words.HOST:
            info = self._info
            pointers = (int(info.epoch_device), int(info.control_device), int(info.taken_device))
            _words.launch("waits", "te_wait", self._device, stream, *pointers, epochs, limit)
            return
        if stream is not None:
            raise ArgumentError("a flag of the host cannot be waited for by a stream", operation=operation,
                                hint="engine.flag(device) makes one for a device")  # fmt: skip
        deadline = time.monotonic_ns() + limit
        while True:
            with self._handle.lock:
                expected = self._taken + epochs
                if self.value >= expected:
                    self._taken = expected
                    return
            self.wait_value(expected, timeout_s=max(deadline - time.monotonic_ns(), 0) / 1e9)

    def wait_value(self, at_least: int, *, timeout_s: float | None = None) -> int:
        """Waits in the calling thread until the epoch is `at_least` or more, consumes nothing, and returns the epoch.

        Raises:
            TransferTimeout: not reached in time, or the deadline of a wait on the device passed.
            PeerLost: a peer of a binding was lost.
            EngineClosed: the flag or its engine was closed.
        """
        operation = "flag wait"
        expected = _words.number(at_least, "at_least", operation)
        handle = self._handle
        limit = handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        deadline = time.monotonic_ns() + limit
        left = limit
        while True:
            self._ensure_open(operation)
            error = thread_state.error
            slice_ns = min(left, _native.SLICE_NS)  # Ctrl-C is served between slices
            status = lib.te_flag_wait(handle.pointer, self._id, expected, slice_ns, error)
            if status == _native.OK:
                return self.value
            if status != _native.AGAIN:
                raise _words.refusal(handle, operation, status, error)
            left = max(deadline - time.monotonic_ns(), 0)
            if not left:
                raise TransferTimeout(f"flag at {self.value}/{expected} after {limit / 1e9:g} s", operation=operation)
            handle.ensure_alive(operation)

    def check(self) -> None:
        """Raises what ended a wait for this flag before its epoch had come, until `clear()`.

        Raises:
            PeerLost: a peer of a binding was lost; `peer` names it.
            TransferTimeout: the deadline of a wait on the device passed.
            EngineClosed: the flag or its engine was closed.
        """
        info = self._describe("flag check")
        early = f", {info.early} waits left early" if info.early else ""
        where = f"with the flag at {info.epoch}{early}"
        if info.abort == lib.TE_ABORT_PEER_LOST:
            address = self._handle.address_of(info.abort_peer)
            name = f"#{info.abort_peer}" if address is None else str(address)
            raise PeerLost(f"a peer that the flag depends on was lost {where}", operation="flag check", peer=name)
        if info.abort == lib.TE_ABORT_DEADLINE:
            raise TransferTimeout(f"the deadline of a wait on the device passed {where}", operation="flag check")
        if info.abort == lib.TE_ABORT_CLOSED:
            self._handle.ensure_open("flag check")
            raise self._closed_error("flag check")

    def clear(self) -> None:
        """Forgets what ended waits, so that later ones wait again. The epoch stays, and so do bindings."""
        self._ensure_open("flag clear")
        error = thread_state.error
        status = lib.te_flag_clear(self._handle.pointer, self._id, error)
        if status != _native.OK:
            raise _words.refusal(self._handle, "flag clear", status, error)

    def close(self) -> None:
        """Ends its bindings, and waits for it with EngineClosed. Idempotent.

        Its words may serve another flag: nothing on a device should look at them any more.
        """
        handle = self._handle
        handle.ensure_native("close")
        for binding in list(self._bindings):
            binding.close()
        self._close(thread_state.error)

    # --- how --------------------------------------------------------------------------------------------------------

    def _close(self, error: Any) -> None:
        handle = self._handle
        if not self._closed and handle.state == OPEN:
            self._closed = True
            for binding in self._bindings:  # none is left unless the object was dropped
                lib.te_binding_close(handle.pointer, binding._id, error)
            status = lib.te_flag_close(handle.pointer, self._id, error)
            if status not in (_native.OK, _native.CLOSED):
                raise _words.refusal(handle, "close flag", status, error)
        self._closed = True

    def _describe(self, operation: str) -> Any:
        self._ensure_open(operation)
        info = ffi.new("te_flag_info *")
        error = thread_state.error
        status = lib.te_flag_describe(self._handle.pointer, self._id, info, error)
        if status != _native.OK:
            raise _words.refusal(self._handle, operation, status, error)
        return info

    def _ensure_open(self, operation: str) -> None:
        if self._closed or self._handle.state:
            self._handle.ensure_open(operation)
            raise self._closed_error(operation)

    def _closed_error(self, operation: str) -> EngineClosed:
        hint = "the engine is open: make another with engine.flag()"
        return EngineClosed("the flag is closed", operation=operation, hint=hint)

    def __enter__(self) -> Flag:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            if not self._closed:
                self._close(ffi.new("te_error *"))
        except TransferEngineError:
            pass  # nobody is there to hear of it

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "peers raise a counter, and that may be bound to a flag")

    def __repr__(self) -> str:
        return f"<te.Flag {self.kind}{': closed' if self.closed else ''}>"


class Binding:
    """What `counter.bind(flag)` made: lasts until `close()`, or until the flag or the counter is closed."""

    __slots__ = ("_closed", "_flag_bindings", "_handle", "_id", "every")

    def __init__(self, handle: EngineHandle, counter: int, flag: Flag, every: int, peers: tuple[Any, int]) -> None:
        operation = "bind flag"
        if not isinstance(flag, Flag):
            raise ArgumentTypeError(f"a te.Flag is needed, not {type(flag).__name__}", operation=operation)
        self.every = _words.number(every, "every", operation, 1)
        handle.ensure_open(operation)
        ensure_same(handle, flag, operation)
        flag._ensure_open(operation)
        out = ffi.new("te_handle *")
        error = thread_state.error
        status = lib.te_counter_bind(handle.pointer, counter, flag._id, self.every, *peers, out, error)
        if status != _native.OK:
            raise handle.failure(operation, status, error)
        self._handle = handle
        self._id = int(out[0])
        self._closed = False
        self._flag_bindings = flag._bindings
        self._flag_bindings.add(self)

    def close(self) -> None:
        """Afterwards the flag rises no more with the counter. Idempotent."""
        handle = self._handle
        handle.ensure_native("close")
        if not self._closed and handle.state == OPEN:
            self._closed = True
            error = thread_state.error
            status = lib.te_binding_close(handle.pointer, self._id, error)
            if status not in (_native.OK, _native.CLOSED):
                raise _words.refusal(handle, "close binding", status, error)
        self._closed = True
        self._flag_bindings.discard(self)

    def __enter__(self) -> Binding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "bind counters where they are")

    def __repr__(self) -> str:
        return f"<te.Binding every {self.every}{': closed' if self._closed else ''}>"


def ensure_same(handle: EngineHandle, value: Any, operation: str) -> None:
    """Raises ArgumentError for what was made from another engine."""
    if value._handle is not handle:
        raise ArgumentError(
            f"the {type(value).__name__.lower()} belongs to another engine", operation=operation,
            hint="what works together is made from one engine",
        )  # fmt: skip


__all__ = ["Binding", "Flag"]
