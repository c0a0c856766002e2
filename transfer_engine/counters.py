"""Counter: 64-bit and monotonic, owned by the receiver and raised by its peers' writes."""

from __future__ import annotations

import operator
import time
from collections.abc import Generator, Iterable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from . import _native
from ._handle import CLOSED, EngineHandle
from ._native import ffi, lib, thread_state
from .descriptors import CounterDescriptor
from .errors import ArgumentError, ArgumentTypeError, TransferEngineError, TransferTimeout, refuse_pickle
from .flags import Binding, Flag
from .peers import PeerName, peer_indices
from .transfers import Transfer


class Counter:
    """Rises by exactly one per write, and per page of a paged write, that names it and is wholly in memory.

    Made by `engine.counter()`; a context manager. It lives until `close()` or the engine's end, also when the object
    is dropped, since peers may hold its descriptor.
    """

    __slots__ = ("_descriptor", "_handle", "_id")

    def __init__(self, handle: EngineHandle) -> None:
        handle.ensure_open("counter")
        out = ffi.new("te_handle *")
        error = thread_state.error
        status = lib.te_counter_open(handle.pointer, out, error)
        if status != _native.OK:
            raise handle.failure("counter", status, error)
        self._handle = handle
        self._id = int(out[0])
        self._descriptor: CounterDescriptor | None = None

    @property
    def descriptor(self) -> CounterDescriptor:
        """What peers need to name this counter in `notify`."""
        if self._descriptor is None:
            self._handle.ensure_open("descriptor")
            out = ffi.new("te_counter_descriptor *")
            error = thread_state.error
            status = lib.te_counter_describe(self._handle.pointer, self._id, out, error)
            if status != _native.OK:
                raise self._handle.failure("descriptor", status, error)
            self._descriptor = CounterDescriptor.from_native(out)
        return self._descriptor

    @property
    def value(self) -> int:
        """The arrivals so far."""
        self._handle.ensure_open("counter value")
        out = ffi.new("uint64_t *")
        error = thread_state.error
        status = lib.te_counter_value(self._handle.pointer, self._id, out, error)
        if status != _native.OK:
            raise self._handle.failure("counter value", status, error)
        return int(out[0])

    def wait(
        self,
        at_least: int,
        *,
        timeout_s: float | None = None,
        peers: Iterable[PeerName] | PeerName | None = None,
    ) -> int:
        """Returns the value once it is `at_least` or more. Early arrivals and overshoot lose nothing.

        Args:
            at_least: the value to wait for, counted from the counter's creation.
            timeout_s: seconds; None is the engine's default deadline.
            peers: those that the arrivals depend on, or a single one: the loss of one ends the wait.

        Raises:
            TransferTimeout: not reached in time; the message says "got/expected".
            PeerLost: one of `peers` was lost.
            EngineClosed: the counter or its engine was closed.
        """
        handle = self._handle
        handle.ensure_open("counter wait")
        expected = _count(at_least)
        limit = handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        indices, count = peer_indices(handle, peers)
        deadline = time.monotonic_ns() + limit
        left = limit
        while True:
            error = thread_state.error
            slice_ns = min(left, _native.SLICE_NS)  # Ctrl-C is served between slices
            status = lib.te_counter_wait(handle.pointer, self._id, expected, slice_ns, indices, count, error)
            if status == _native.OK:
                return self.value
            if status != _native.AGAIN:
                raise handle.failure("counter wait", status, error)
            left = max(deadline - time.monotonic_ns(), 0)
            if not left:
                raise TransferTimeout(
                    f"counter at {self.value}/{expected} after {limit / 1e9:g} s", operation="counter wait"
                )
            handle.ensure_open("counter wait")
            handle.ensure_alive("counter wait")

    def reached(
        self,
        at_least: int,
        *,
        timeout_s: float | None = None,
        peers: Iterable[PeerName] | PeerName | None = None,
    ) -> Arrival:
        """The same as an operation: `await counter.reached(3)` gives the value. Arguments and errors as for `wait`."""
        handle = self._handle
        handle.ensure_open("counter reached")
        expected = _count(at_least)
        indices, count = peer_indices(handle, peers)
        error = thread_state.error
        timeout_ns = _native.nanoseconds(timeout_s)
        submit = partial(lib.te_counter_reached, handle.pointer, self._id, expected, timeout_ns, indices, count, error)
        pointer = submit() or handle.persist(submit, error, timeout_s)
        if not pointer:
            raise handle.failure("counter reached", error.status, error)
        return Arrival(pointer, handle, self, expected)

    def bind(self, flag: Flag, every: int = 1, *, peers: Iterable[PeerName] | PeerName | None = None) -> Binding:
        """From now on the flag's epoch rises by one for each `every` arrivals, without the CPU of a caller in between.

        Arrivals count from the counter's creation, so those that came before are not lost. Several counters may raise
        one flag. The binding lasts until it, the flag or the counter is closed.

        Args:
            flag: of the same engine.
            every: 1 or more.
            peers: those that the arrivals depend on: the loss of one ends waits for the flag, on devices, too.

        Raises:
            ArgumentError: a flag of another engine, or `every` is 0.
            EngineClosed: the counter, flag or engine was closed.
            ResourceExhausted: too many bindings.
        """
        self._handle.ensure_open("bind flag")
        return Binding(self._handle, self._id, flag, every, peer_indices(self._handle, peers))

    def close(self, timeout_s: float | None = None) -> None:
        """Revokes the counter: writes that name it fail from now on. Idempotent.

        Raises:
            TransferTimeout: a peer has not confirmed in time (default: the engine's); call again.
        """
        handle = self._handle
        handle.ensure_native("close")
        if handle.state == CLOSED:
            return
        limit = handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
        deadline = time.monotonic_ns() + limit
        while True:
            left = max(deadline - time.monotonic_ns(), 0)
            error = thread_state.error
            status = lib.te_counter_close(handle.pointer, self._id, min(left, _native.SLICE_NS), error)
            if status in (_native.OK, _native.CLOSED):
                return
            if status != _native.TIMEOUT or left == 0:
                raise handle.failure("close counter", status, error)

    def __enter__(self) -> Counter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TransferTimeout:
            if kind is None:  # do not hide what went wrong inside
                raise

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send counter.descriptor: peers name the counter by it")

    def __repr__(self) -> str:
        return f"<te.Counter {self._id}>"


class Arrival(Transfer):
    """Ends when a counter has reached a value; its result is the counter's value then or later."""

    __slots__ = ("_expected",)

    def __init__(self, pointer: Any, handle: EngineHandle, counter: Counter, expected: int) -> None:
        super().__init__(pointer, handle, "counter reached", counter, None)
        self._expected = expected

    def result(self, timeout_s: float | None = None) -> int:  # type: ignore[override]  # a Transfer's is None
        """Waits as `wait` does and returns the counter's value."""
        self.wait(timeout_s)
        return self._value()

    def __await__(self) -> Generator[Any, Any, int]:  # type: ignore[override]  # a Transfer's is None
        """As a transfer is awaited; gives the counter's value."""
        yield from super().__await__()
        return self._value()

    def _value(self) -> int:
        counter = self._keep
        assert isinstance(counter, Counter)
        return counter.value

    def _explain(self, error: TransferEngineError) -> TransferEngineError:
        if not isinstance(error, TransferTimeout):
            return error
        try:
            message = f"counter at {self._value()}/{self._expected}"
        except TransferEngineError:
            return error  # closed in the meantime
        return TransferTimeout(message, operation=error.operation, status=error.status, elapsed_s=error.elapsed_s)


def _count(at_least: int) -> int:
    try:
        number = operator.index(at_least)
    except TypeError:
        raise ArgumentTypeError(
            f"at_least must be an integer, not {type(at_least).__name__}", operation="counter"
        ) from None
    if not 0 <= number < 1 << 64:
        raise ArgumentError(f"at_least must be from 0 to 2^64 - 1, got {number}", operation="counter")
    return number
