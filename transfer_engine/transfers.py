"""Transfer: the outcome of one operation, to wait for, await, or be called back about."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from . import _native
from ._awaiting import Waiter
from ._handle import FORKED, EngineHandle
from ._native import FOREVER_NS, SLICE_NS, ffi, lib, thread_state
from .dispatcher import Dispatcher, call_guarded
from .errors import TransferEngineError, TransferTimeout, refuse_callback, refuse_pickle, shortened

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` since 3.11

_NAMED = 8  # members in an error's text
_NONE_FAILED: Mapping[int, TransferEngineError] = MappingProxyType({})

_WAIT_HINT = "wait again; or cancel() it, and wait_quiesced() before its memory is reused"


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """When a transfer passed what it passes. Seconds after its submission; None: under way, or it is not recorded.

    Attributes:
        submitted_s: its submission, on the clock of `time.monotonic()`.
        taken_s: the worker took it over. Scatters and barriers only, as the next two.
        first_post_s: the first member's work request was with the provider; None where that had to wait.
        posted_s: every member had its turn; those that had no room were left waiting.
        finished_s: it ended.
    """

    submitted_s: float
    taken_s: float | None
    first_post_s: float | None
    posted_s: float | None
    finished_s: float | None


class Transfer:
    """An operation under way. It ends exactly once: done, failed, timed out or cancelled.

    Dropping the object changes nothing for the operation: its memory stays registered and referenced.

    Attributes:
        operation: what it does ("write", "send", ...).
        request_id: what the caller passed, for its own use and for error messages.
    """

    __slots__ = ("_callbacks", "_ended", "_error", "_handle", "_keep", "_pointer", "operation", "request_id")

    def __init__(self, pointer: Any, handle: EngineHandle, operation: str, keep: object, request_id: object) -> None:
        self._pointer = pointer
        self._handle = handle
        self._keep = keep  # alive as long as this object; regions keep their memory on their own
        self._ended = False
        self._error: TransferEngineError | None = None
        self._callbacks: list[Callable[[Any], object]] | None = None
        self.operation = operation
        self.request_id = request_id

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the operation has succeeded: the source may be reused, and the peer's NIC has the bytes.

        Args:
            timeout_s: seconds that this call waits; None waits for the end, which the operation's own deadline bounds.

        Raises:
            TransferTimeout: the operation's deadline passed; or this wait ran out, and the operation goes on (`done()`
                tells the two apart).
            TransferEngineError: why the operation failed, often PeerError, RemoteAccessError or TransferCancelled.
        """
        if not self._ended and not self._wait_ended(timeout_s):
            raise TransferTimeout(
                f"still under way after {timeout_s:g} s of waiting; the transfer goes on",
                operation=self.operation,
                hint=_WAIT_HINT,
            )
        if self._error is not None:
            raise self._error.with_traceback(None)

    def result(self, timeout_s: float | None = None) -> None:
        """The same as `wait`, under the name that futures have."""
        self.wait(timeout_s)

    def exception(self, timeout_s: float | None = None) -> TransferEngineError | None:
        """Waits as `wait` does and returns the failure instead of raising it; None is success.

        Raises:
            TransferTimeout: this wait ran out, and the operation goes on.
        """
        if not self._ended and not self._wait_ended(timeout_s):
            self.wait(0)
        return self._error

    def done(self) -> bool:
        """True once the operation has ended, in whatever way. Does not block."""
        return self._ended or self._settle()

    def cancel(self) -> None:
        """Asks for the operation's end. It may still succeed; otherwise it fails with TransferCancelled.

        Bytes may land for a while longer: see `quiesced`.
        """
        self._handle.ensure_native("cancel")
        if not self._ended:
            lib.te_transfer_cancel(self._pointer)

    @property
    def quiesced(self) -> bool:
        """True when nothing of this operation can land any more."""
        self._handle.ensure_native("quiesced")
        return bool(lib.te_transfer_quiesced(self._pointer) == 1)

    def wait_quiesced(self, timeout_s: float | None = None) -> None:
        """Returns when nothing of this operation can land any more, so that its memory may be reused.

        Args:
            timeout_s: seconds; None is the engine's default deadline.

        Raises:
            TransferTimeout: not proven in time.
        """
        handle = self._handle
        handle.ensure_native("wait_quiesced")
        limit = handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        if not _in_slices(lib.te_transfer_wait_quiesced, self._pointer, limit, self._handle, self.operation):
            raise TransferTimeout(
                f"{self.operation} not quiesced after {limit / 1e9:g} s: its bytes may still land",
                operation="wait_quiesced",
                hint="do not reuse the memory; disconnect() the peer, or close the region",
            )

    @property
    def failed_members(self) -> Mapping[int, TransferEngineError]:
        """Of a scatter or barrier that has ended: the members whose part failed, each with its error.

        In the order of failure. Empty while it is under way, when all went well, and for other operations.
        """
        return _NONE_FAILED

    @property
    def times(self) -> TransferTimes:
        """When it was submitted, taken over, posted and finished; only the first while it is under way."""
        self._handle.ensure_native("times")
        native = ffi.new("te_times *")
        lib.te_transfer_times(self._pointer, native)
        begin = native.submitted_ns
        passed = (native.taken_ns, native.first_post_ns, native.posted_ns, native.finished_ns)
        return TransferTimes(begin / 1e9, *((at - begin) / 1e9 if at else None for at in passed))

    def add_done_callback(self, function: Callable[[Self], object]) -> None:
        """Calls `function(transfer)` once it has ended, in the engine's dispatcher thread.

        After the engine has closed the call happens at once, in the caller's thread. What it raises is logged.

        Raises:
            ArgumentTypeError: it cannot be called.
        """
        refuse_callback(function, "add_done_callback")
        handle = self._handle
        handle.ensure_native("add_done_callback")
        if handle.state and self.done():
            call_guarded(function, self)
            return
        dispatcher = Dispatcher.of(handle)
        with handle.lock:
            first = self._callbacks is None
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(function)
            if not first and not self._ended:
                return  # its event is still to come
            serial = 0
            if first:
                serial = next(handle.serials)
                handle.pending[serial] = self
                if lib.te_transfer_notify(self._pointer, serial) != 1:
                    return
        # It had ended before: no event comes for this callback.
        handle.pending.pop(serial, None)
        dispatcher.post(self._run_callbacks)

    def __await__(self) -> Generator[Any, Any, None]:
        """Works on asyncio and trio; other loops can use a thread: `await to_thread(transfer.wait)`.

        Cancelling the task does not cancel the transfer.
        """
        if not self.done():
            waiter = Waiter()

            def wake(_: Self) -> None:
                waiter.wake()

            self.add_done_callback(wake)
            try:
                yield from waiter.__await__()
            finally:  # nothing stays behind when the task is cancelled
                with self._handle.lock:
                    if self._callbacks is not None and wake in self._callbacks:
                        self._callbacks.remove(wake)
        self.wait()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "wait for it here, and send what came of it")

    def __del__(self) -> None:
        if self._handle.state != FORKED:
            lib.te_transfer_release(self._pointer)

    def __repr__(self) -> str:
        if self._handle.state == FORKED or not self.done():
            state = "under way"
        else:
            state = "done" if self._error is None else f"failed: {type(self._error).__name__}"
        name = f" {self.request_id!r}" if self.request_id is not None else ""
        return f"<te.Transfer {self.operation}{name}: {state}>"

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _explain(self, error: TransferEngineError) -> TransferEngineError:
        """A chance to say more about a failure."""
        return error

    def _wait_ended(self, timeout_s: float | None) -> bool:
        self._handle.ensure_native(self.operation)
        limit = FOREVER_NS if timeout_s is None else _native.nanoseconds(timeout_s)
        return _in_slices(lib.te_transfer_wait, self._pointer, limit, self._handle, self.operation) and self._settle()

    def _settle(self) -> bool:
        """Fetches the outcome if there is one."""
        handle = self._handle
        handle.ensure_native(self.operation)
        error = thread_state.error
        status = lib.te_transfer_result(self._pointer, error)
        if status == _native.AGAIN:
            return False
        if status != _native.OK:
            note = "" if self.request_id is None else f" (request {self.request_id!r})"
            self._error = self._explain(handle.failure(self.operation, status, error, note))
        self._ended = True
        return True

    def _run_callbacks(self) -> None:
        self.done()
        with self._handle.lock:
            callbacks, self._callbacks = self._callbacks, []
        for function in callbacks or ():
            call_guarded(function, self)


class GroupTransfer(Transfer):
    """A scatter or barrier: its error names the members that failed. It keeps its region and the number of members."""

    __slots__ = ("_failed",)  # set when it fails

    @property
    def failed_members(self) -> Mapping[int, TransferEngineError]:
        """The members whose part failed, each with its error, in the order of failure; empty until it has ended."""
        return self._failed if self.done() and self._error is not None else _NONE_FAILED

    def _explain(self, error: TransferEngineError) -> TransferEngineError:
        failed = self._fetch_failed()
        self._failed = MappingProxyType(failed)
        if not failed:
            return error
        note = "" if self.request_id is None else f" (request {self.request_id!r})"
        count: int = self._keep[1]  # type: ignore[index]
        return of_members(failed, count, self.operation, note)

    def _fetch_failed(self) -> dict[int, TransferEngineError]:
        count = ffi.new("uint32_t *")
        lib.te_transfer_failed_members(self._pointer, ffi.NULL, ffi.NULL, 0, count)
        total = int(count[0])
        members, errors = ffi.new("uint32_t[]", total), ffi.new("te_error[]", total)
        lib.te_transfer_failed_members(self._pointer, members, errors, total, count)
        names: dict[int, str] = {}  # a peer may be many members
        return {
            int(members[i]): self._handle.failure(self.operation, errors[i].status, errors[i], names=names)
            for i in range(total)
        }


def of_members(
    failed: Mapping[int, TransferEngineError], count: int, operation: str, note: str = ""
) -> TransferEngineError:
    """One error for the members that failed, of the type of the first of them.

    Args:
        failed: by member, the first failure first; not empty.
        count: how many members there are.
        operation: what they failed at.
        note: put behind the message.
    """
    first_member, first = next(iter(failed.items()))
    message = f"{len(failed)} of {count} members failed: {_listed(failed.items())}"
    return type(first)(
        f"{message}; member {first_member}: {first.message}{note}",
        operation=operation,
        peer=first.peer,
        nic=first.nic,
        status=first.status,
        elapsed_s=first.elapsed_s,
        hint=first.hint,
    )


def _listed(failed: Iterable[tuple[int, TransferEngineError]]) -> str:
    texts = [f"{member} (peer {shortened(e.peer, 40)})" if e.peer else f"{member}" for member, e in failed]
    rest = len(texts) - _NAMED
    return ", ".join(texts[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _in_slices(
    wait: Callable[[Any, int], int], pointer: Any, limit_ns: int, handle: EngineHandle, operation: str
) -> bool:
    """Waits in slices, so that Ctrl-C is served between them. False: the limit passed."""
    if wait(pointer, min(limit_ns, SLICE_NS)) == _native.OK:
        return True
    deadline = time.monotonic_ns() + limit_ns - SLICE_NS
    while (left := deadline - time.monotonic_ns()) > 0:
        handle.ensure_alive(operation)
        if wait(pointer, min(left, SLICE_NS)) == _native.OK:
            return True
    return False
