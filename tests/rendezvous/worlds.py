"""Ranks as threads of one process, and a store such as torch's."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SOON_S = 20.0  # a deadline, not a duration

Ranks = Callable[..., list[Any]]


class DictStore:
    """What torch.distributed's stores have, and no more."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=SOON_S))
        return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        assert timeout > timedelta(), "torch waits for ever then"
        with self._changed:
            there = self._changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds())
        if not there:
            raise RuntimeError("Socket Timeout")

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """What each rank's work returned; the first error is raised."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [future.result(SOON_S) for future in [pool.submit(work, rank) for rank in range(count)]]
