"""The dispatcher: one thread an engine, started on first need, that turns the core's events into Python callbacks.

It is the only caller of te_events_fetch. A callback that raises is reported through logging and everything goes on.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from . import _native
from ._handle import EngineHandle
from ._native import ffi, lib

_CAPACITY = 256
_FETCH_NS = 1_000_000_000  # te_events_wake ends a fetch earlier; this only bounds the harm of a lost wake-up

_log = logging.getLogger("transfer_engine")
_numbers = itertools.count()


def call_guarded(function: Callable[..., object], *arguments: object) -> None:
    """Runs a callback of the application; whatever it raises, SystemExit included, is reported and goes no further."""
    try:
        function(*arguments)
    except BaseException:  # noqa: BLE001 - the other callbacks must not suffer for it
        _log.exception("callback %r raised; the engine goes on", function)


class Dispatcher:
    """Runs the callbacks of one engine, in the order of its events."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle
        self._jobs: collections.deque[Callable[[], object]] = collections.deque()
        self._peer_lost: list[Callable[[int], object]] = []
        self._message_waiters: list[Callable[[], None]] = []
        self._watchers: dict[int, Callable[[], object]] = {}
        self._finished = False
        self._thread = threading.Thread(target=self._run, name=f"te-dispatch-{next(_numbers)}", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, handle: EngineHandle) -> Dispatcher:
        """The engine's dispatcher; starts it on first use."""
        with handle.lock:
            if handle.dispatcher is None:
                handle.dispatcher = cls(handle)
            dispatcher: Dispatcher = handle.dispatcher
            return dispatcher

    def post(self, job: Callable[[], object]) -> None:
        """Runs `job` soon in the dispatcher's thread; right here when that has ended with its engine."""
        self._jobs.append(job)
        if self._finished:
            self._run_jobs()
        else:
            lib.te_events_wake(self._handle.pointer)

    def on_peer_lost(self, callback: Callable[[int], object]) -> Callable[[], None]:
        """Calls `callback(peer index)` for each loss. Returns a function that ends this."""
        with self._handle.lock:
            self._peer_lost = [*self._peer_lost, callback]

        def remove() -> None:
            with self._handle.lock:
                self._peer_lost = [other for other in self._peer_lost if other is not callback]

        return remove

    def on_watcher(self, watcher: int, callback: Callable[[], object] | None) -> None:
        """Calls `callback()` when that watcher has changed; None ends this."""
        with self._handle.lock:
            if callback is None:
                self._watchers.pop(watcher, None)
            elif not self._finished:
                self._watchers[watcher] = callback

    def wake_on_message(self, wake: Callable[[], None]) -> None:
        """Calls `wake()` once: when a message has come, or the engine has closed."""
        with self._handle.lock:
            if not self._finished:
                self._message_waiters.append(wake)
                return
        wake()

    def forget_waiter(self, wake: Callable[[], None]) -> None:
        """Takes back a wake_on_message whose waiter was cancelled."""
        with self._handle.lock:
            self._message_waiters = [other for other in self._message_waiters if other != wake]

    def join(self, timeout_s: float) -> None:
        """After the engine was closed: waits until the remaining events were delivered. No-op in its own thread."""
        if threading.current_thread() is not self._thread:
            lib.te_events_wake(self._handle.pointer)
            self._thread.join(timeout_s)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        events = ffi.new("te_event[]", _CAPACITY)
        count = ffi.new("uint32_t *")
        error = ffi.new("te_error *")
        pointer = self._handle.pointer
        while True:
            status = lib.te_events_fetch(pointer, _FETCH_NS, events, _CAPACITY, count, error)
            self._run_jobs()
            if status == _native.OK:
                for i in range(count[0]):
                    self._deliver(events[i])
            elif status != _native.AGAIN:
                break  # the engine has closed, and all events were fetched
        self._finish()

    def _deliver(self, event: Any) -> None:
        if event.kind == lib.TE_EVENT_TRANSFER:
            transfer = self._handle.pending.pop(event.user, None)
            if transfer is not None:
                transfer._run_callbacks()
        elif event.kind == lib.TE_EVENT_PEER_LOST:
            for callback in self._peer_lost:
                call_guarded(callback, event.peer)
        elif event.kind == lib.TE_EVENT_MESSAGE:
            self._wake_message_waiters()
        elif event.kind == lib.TE_EVENT_WATCHER:
            changed = self._watchers.get(event.user)
            if changed is not None:
                changed()

    def _run_jobs(self) -> None:
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            call_guarded(job)

    def _wake_message_waiters(self) -> None:
        with self._handle.lock:
            waiters, self._message_waiters = self._message_waiters, []
        for wake in waiters:
            call_guarded(wake)

    def _finish(self) -> None:
        while True:
            try:
                _, transfer = self._handle.pending.popitem()
            except KeyError:
                break
            transfer._run_callbacks()  # ended with the engine
        self._finished = True
        self._handle.dispatcher = None  # the two refer to each other
        with self._handle.lock:
            self._watchers.clear()
        self._run_jobs()
        self._wake_message_waiters()
