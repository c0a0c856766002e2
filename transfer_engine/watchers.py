"""Watcher: a 64-bit word that kernels or threads raise, and that the engine watches. Trigger: what it posts then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from . import _native, _words
from ._handle import OPEN, EngineHandle
from ._native import ffi, lib, thread_state
from .dispatcher import Dispatcher, call_guarded
from .errors import (
    ArgumentTypeError,
    EngineClosed,
    TransferEngineError,
    TransferTimeout,
    refuse_callback,
    refuse_pickle,
)
from .flags import Flag, ensure_same
from .prepared import Prepared

Callback = Callable[[int, int], object]


class Watcher:
    """A number that only rises, raised on a device and looked at by the worker thread. Made by `engine.watcher()`.

    One side raises it: one GPU, or threads of the host. A context manager; dropping the object closes it, but for
    triggers and callbacks, which keep it.

    Attributes:
        kind: where the word lies: "host" (no GPU), "mapped" (pinned memory of the host) or "gdr" (GPU memory).
    """

    __slots__ = ("__weakref__", "_callbacks", "_closed", "_device", "_handle", "_id", "_info", "kind")

    def __init__(self, handle: EngineHandle, device: Any = None) -> None:
        self._closed = True  # until it is open; __del__ runs also when opening fails
        self._handle = handle
        self._id, self._device = _words.open_word(handle, lib.te_watcher_open, "watcher", device)
        self._closed = False
        self._callbacks: list[Callback] = []
        self._info = self._describe("watcher")
        self.kind = _words.kind_name(self._info.kind)

    @property
    def device_pointer(self) -> int:
        """The address of the word for kernels; 0 for a watcher of the host."""
        return int(self._info.device_pointer)

    @property
    def value(self) -> int:
        """The number, as it is now."""
        return int(self._describe("watcher value").value)

    @property
    def closed(self) -> bool:
        """True once it or its engine was closed."""
        return self._closed or self._handle.state != OPEN

    def add(self, stream: object = None, n: int = 1) -> None:
        """Raises the number by `n`, in the stream's order; right under replay when it is captured into a graph.

        Args:
            stream: a CUDA stream of the watcher's device. None: this thread raises it now (kinds "host" and "mapped"),
                or the default stream does ("gdr").
            n: by how much, below 2^32: so the number never comes round.
        """
        operation = "watcher add"
        by = _words.number(n, "n", operation, most=_words.MOST_AT_ONCE)
        self._ensure_open(operation)
        if self._device == _words.HOST and stream is not None:
            raise ArgumentTypeError("a stream cannot raise a watcher of the host", operation=operation,
                                    hint="engine.watcher(device) makes one for a device")  # fmt: skip
        if stream is None and self.kind != "gdr":
            error = thread_state.error
            status = lib.te_watcher_add(self._handle.pointer, self._id, by, error)
            if status != _native.OK:
                raise _words.refusal(self._handle, operation, status, error)
        elif by:
            _words.launch("waits", "te_raise", self._device, stream, self.device_pointer, by)

    def trigger(
        self,
        prepared: Prepared,
        *,
        every: int = 1,
        first: int = 1,
        posted: Flag | None = None,
        completed: Flag | None = None,
        timeout_s: float | None = None,
    ) -> Trigger:
        """Posts a prepared transfer whenever the number reaches `first`, `first + every`, and so on: once for each.

        The worker thread does it; no Python is involved. Raises that it sees together are as many transfers. Those
        that the number had reached before go out now.

        Args:
            prepared: what to post. Closing it, or what it names, makes later firings fail.
            every: from one firing to the next; 1 or more.
            first: with which number it fires first; 1 or more.
            posted: rises by one when the first bytes of a transfer have been handed to the NIC.
            completed: rises by one when a transfer has ended well.
            timeout_s: seconds, of each transfer; None is the engine's default deadline.

        Raises:
            EngineClosed: one of these is closed.
            ArgumentError: they belong to another engine, or a number is 0.
        """
        return Trigger(self, prepared, every, first, (posted, completed), timeout_s)

    def on_change(self, callback: Callback) -> Callable[[], None]:
        """Calls `callback(old, new)` in the dispatcher thread after the number has risen. What it raises is logged.

        Changes that come faster than callbacks run are told together. A callback may end itself, and close the watcher.

        Returns:
            A function that ends this.
        """
        operation = "on_change"
        refuse_callback(callback, operation)
        self._ensure_open(operation)
        dispatcher = Dispatcher.of(self._handle)
        with self._handle.lock:
            first = not self._callbacks
            self._callbacks = [*self._callbacks, callback]
            if first:  # with the lock: the core hears of the first and the last in their order
                dispatcher.on_watcher(self._id, self._changed)
                self._notify(True)

        def remove() -> None:
            with self._handle.lock:
                left = list(self._callbacks)
                if callback not in left:
                    return
                left.remove(callback)
                self._callbacks = left
                if not left and not self.closed:
                    dispatcher.on_watcher(self._id, None)
                    self._notify(False)

        return remove

    def close(self) -> None:
        """Cancels its triggers and ends its callbacks. Idempotent.

        Its word may serve another watcher: nothing on a device should raise it any more.
        """
        self._handle.ensure_native("close")
        self._close(thread_state.error)

    # --- how --------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """In the dispatcher's thread."""
        numbers = ffi.new("uint64_t[2]")
        error = ffi.new("te_error *")
        if self.closed:
            return
        if lib.te_watcher_take(self._handle.pointer, self._id, numbers, numbers + 1, error) != _native.OK:
            return  # no change since the last time, or closed in this moment
        before, now = int(numbers[0]), int(numbers[1])
        for callback in self._callbacks:
            if callback in self._callbacks and not self.closed:  # another one may have ended it
                call_guarded(callback, before, now)

    def _notify(self, on: bool) -> None:
        error = thread_state.error
        status = lib.te_watcher_notify(self._handle.pointer, self._id, on, error)
        if status not in (_native.OK, _native.CLOSED):
            raise _words.refusal(self._handle, "on_change", status, error)

    def _close(self, error: Any) -> None:
        handle = self._handle
        if not self._closed and handle.state == OPEN:
            self._closed = True
            dispatcher = handle.dispatcher if self._callbacks else None
            self._callbacks = []
            if dispatcher is not None:
                dispatcher.on_watcher(self._id, None)
            status = lib.te_watcher_close(handle.pointer, self._id, error)
            if status not in (_native.OK, _native.CLOSED):
                raise _words.refusal(handle, "close watcher", status, error)
        self._closed = True

    def _describe(self, operation: str) -> Any:
        self._ensure_open(operation)
        info = ffi.new("te_watcher_info *")
        error = thread_state.error
        status = lib.te_watcher_describe(self._handle.pointer, self._id, info, error)
        if status != _native.OK:
            raise _words.refusal(self._handle, operation, status, error)
        return info

    def _ensure_open(self, operation: str) -> None:
        if self._closed or self._handle.state:
            self._handle.ensure_open(operation)
            hint = "the engine is open: make another with engine.watcher()"
            raise EngineClosed("the watcher is closed", operation=operation, hint=hint)

    def __enter__(self) -> Watcher:
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
        refuse_pickle(self, "a watcher is of use to this process and its devices")

    def __repr__(self) -> str:
        return f"<te.Watcher {self.kind}{': closed' if self.closed else ''}>"


@dataclass(frozen=True, slots=True)
class TriggeredTransfers:
    """How often a trigger has fired.

    Attributes:
        fired: begun. What neither completed nor failed of these is under way.
        posted: the first work request was handed to the NIC's provider.
        completed: ended well.
        failed: ended otherwise, or could not begin; see `trigger.error`.
        owed: due, and not begun: no operation slot was free, or the peer was at its cap. They go out later.
    """

    fired: int
    posted: int
    completed: int
    failed: int
    owed: int


class Trigger:
    """Posts a prepared transfer when a watcher rises. Made by `watcher.trigger()`.

    A context manager. It keeps the watcher, the prepared transfer and its flags; dropping the object cancels it.
    """

    __slots__ = ("_closed", "_flags", "_handle", "_id", "_prepared", "_watcher")

    def __init__(
        self,
        watcher: Watcher,
        prepared: Prepared,
        every: int,
        first: int,
        flags: tuple[Flag | None, Flag | None],
        timeout_s: float | None,
    ) -> None:
        self._closed = True  # until it is open; __del__ runs also when opening fails
        operation = "trigger"
        handle = self._handle = watcher._handle
        if not isinstance(prepared, Prepared):
            raise ArgumentTypeError(
                f"engine.prepare() makes what a trigger posts, not {type(prepared).__name__}", operation=operation
            )
        args = ffi.new("te_trigger_args *")
        args.every = _words.number(every, "every", operation, 1)
        args.first = _words.number(first, "first", operation, 1)
        args.timeout_ns = _native.nanoseconds(timeout_s)
        watcher._ensure_open(operation)
        ensure_same(handle, prepared, operation)
        prepared._ensure_usable()
        for name, flag in zip(("posted_flag", "completed_flag"), flags, strict=True):
            if flag is None:
                setattr(args, name, _native.NONE)
                continue
            if not isinstance(flag, Flag):
                raise ArgumentTypeError(f"a te.Flag or None, not {type(flag).__name__}", operation=operation)
            ensure_same(handle, flag, operation)
            flag._ensure_open(operation)
            setattr(args, name, flag._id)
        args.watcher, args.prepared = watcher._id, prepared._id
        out = ffi.new("te_handle *")
        error = thread_state.error
        status = lib.te_trigger_open(handle.pointer, args, out, error)
        if status != _native.OK:
            raise _words.refusal(handle, operation, status, error)
        self._id = int(out[0])
        self._watcher, self._prepared, self._flags = watcher, prepared, flags
        self._closed = False

    @property
    def transfers(self) -> TriggeredTransfers:
        """How often it has fired, and with what outcome."""
        info = self._describe("trigger transfers")
        return TriggeredTransfers(
            int(info.fired), int(info.posted), int(info.completed), int(info.failed), int(info.owed)
        )

    @property
    def error(self) -> TransferEngineError | None:
        """What the first transfer that failed has ended with."""
        info = self._describe("trigger error")
        first = ffi.addressof(info, "first_error")
        return _words.refusal(self._handle, "triggered transfer", first.status, first) if info.failed else None

    @property
    def active(self) -> bool:
        """False once it was cancelled, or its watcher closed."""
        return bool(self._describe("trigger active").active)

    def wait(self, completed: int, timeout_s: float | None = None) -> None:
        """Returns once so many of its transfers have ended well.

        Raises:
            TransferTimeout: not in time.
            TransferEngineError: what the first one that failed has ended with, if too few have ended well.
            EngineClosed: the engine was closed.
        """
        operation = "trigger wait"
        expected = _words.number(completed, "completed", operation)
        handle = self._handle
        limit = handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        deadline = time.monotonic_ns() + limit
        left = limit
        while True:
            handle.ensure_open(operation)
            error = thread_state.error
            slice_ns = min(left, _native.SLICE_NS)  # Ctrl-C is served between slices
            status = lib.te_trigger_wait(handle.pointer, self._id, expected, slice_ns, error)
            if status == _native.OK:
                return
            if status != _native.AGAIN:
                raise _words.refusal(handle, operation, status, error)
            left = max(deadline - time.monotonic_ns(), 0)
            if not left:
                raise TransferTimeout(
                    f"{self.transfers.completed}/{expected} transfers after {limit / 1e9:g} s", operation=operation
                )
            handle.ensure_alive(operation)

    def cancel(self) -> None:
        """Nothing fires after this returns; what is under way goes on and is counted. Idempotent."""
        handle = self._handle
        handle.ensure_native("cancel")
        if handle.state == OPEN:
            error = thread_state.error
            status = lib.te_trigger_cancel(handle.pointer, self._id, error)
            if status not in (_native.OK, _native.CLOSED):
                raise _words.refusal(handle, "cancel trigger", status, error)

    # --- how --------------------------------------------------------------------------------------------------------

    def _describe(self, operation: str) -> Any:
        self._handle.ensure_open(operation)
        info = ffi.new("te_trigger_info *")
        error = thread_state.error
        status = lib.te_trigger_describe(self._handle.pointer, self._id, info, error)
        if status != _native.OK:
            raise _words.refusal(self._handle, operation, status, error)
        return info

    def __enter__(self) -> Trigger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not self._closed and self._handle.state == OPEN:
            self._closed = True
            lib.te_trigger_close(self._handle.pointer, self._id, ffi.new("te_error *"))

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "arm a trigger in the process whose watcher it is")

    def __repr__(self) -> str:
        return f"<te.Trigger {self._prepared.operation}>"


__all__ = ["Trigger", "TriggeredTransfers", "Watcher"]
