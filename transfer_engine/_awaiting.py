"""A one-shot bridge from the dispatcher thread into the event loop that the current task runs on: asyncio or trio.

Neither is imported unless it is in use. Other loops can await in a thread: `await to_thread(transfer.wait)`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any


class Waiter:
    """Made in the task that will await it; `wake` may be called from any thread, any number of times."""

    __slots__ = ("_wait", "wake")

    wake: Callable[[], None]
    _wait: Callable[[], Generator[Any, Any, Any]]

    def __init__(self) -> None:
        if not self._on_trio():
            self._on_asyncio()

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self._wait()

    def _on_trio(self) -> bool:
        trio: Any = sys.modules.get("trio")
        if trio is None:
            return False
        try:
            trio.lowlevel.current_task()
        except RuntimeError:
            return False
        token, event = trio.lowlevel.current_trio_token(), trio.Event()

        def wake() -> None:
            with contextlib.suppress(trio.RunFinishedError):  # nobody awaits any more
                token.run_sync_soon(event.set)

        self.wake = wake
        self._wait = lambda: event.wait().__await__()
        return True

    def _on_asyncio(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():  # the awaiting task may have been cancelled
                future.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
                loop.call_soon_threadsafe(settle)

        self.wake = wake
        self._wait = future.__await__
