"""Stores of others: anything with the interface of torch.distributed's stores. torch itself is not imported."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from .. import errors
from .client import TcpStore
from .wire import Presence

_LEAST_S = 1e-3  # torch takes a time-out of zero as "wait for ever"
_METHODS = ("set", "get", "wait", "add")


class Store(Protocol):
    """What a rendezvous needs of a store; times are in seconds."""

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Returns when all keys are there; False: not in time."""

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of keys that are there."""

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there."""

    def delete(self, key: str) -> None:
        """Removes a key, where the store can."""

    def describe(self, ranks: Sequence[int]) -> dict[int, str]:
        """What is known about ranks that are late, in words."""

    def close(self) -> None:
        """Frees what belongs to this object."""


class OwnStore:
    """Our own TCP store as a `Store`."""

    def __init__(self, store: TcpStore) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""
        self._store.set(key, value)

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Returns when all keys are there; False: not in time."""
        try:
            self._store.wait(keys, timeout_s)
        except errors.TransferTimeout:
            return False
        return True

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of keys that are there."""
        return self._store.multi_get(keys, timeout_s)

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there."""
        return self._store.present(keys)

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._store.delete_key(key)

    def describe(self, ranks: Sequence[int]) -> dict[int, str]:
        """What the server knows about these ranks."""
        words = {Presence.CONNECTED: "connected", Presence.LEFT: "it left {} ago", Presence.LOST: "lost {} ago"}
        known = self._store.ranks()
        result = {}
        for rank in ranks:
            presence, age = known.get(rank, (None, 0.0))
            result[rank] = words[presence].format(f"{age:.1f} s") if presence else "never connected"
        return result

    def close(self) -> None:
        """Takes leave of the server."""
        self._store.close()


class ForeignStore:
    """A store that the caller brought, and keeps.

    Raises:
        ArgumentTypeError: it lacks a method.
    """

    def __init__(self, store: Any) -> None:
        missing = [name for name in _METHODS if not callable(getattr(store, name, None))]
        if missing:
            raise errors.ArgumentTypeError(
                f"store: a {type(store).__name__} has no {', '.join(missing)}; needed are {', '.join(_METHODS)}, as "
                "torch.distributed's stores have them",
                operation="Rendezvous",
            )
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Stores a value."""
        with self._failures("set"):
            self._store.set(key, value)

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Returns when all keys are there; False: not in time."""
        deadline = time.monotonic() + timeout_s
        try:
            self._store.wait(list(keys), timedelta(seconds=max(timeout_s, _LEAST_S)))
        except Exception as cause:
            text = str(cause).lower()
            if (
                time.monotonic() >= deadline
                or isinstance(cause, TimeoutError)
                or "timeout" in text
                or "timed out" in text
            ):
                return False
            raise self._failed("wait", cause) from cause
        return True

    def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """The values of keys that are there."""
        with self._failures("get"):
            return [bytes(self._store.get(key)) for key in keys]

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there."""
        check = getattr(self._store, "check", None)
        if check is not None:
            with contextlib.suppress(Exception):  # some of torch's stores have the method and refuse it
                return [bool(check([key])) for key in keys]
        return [self.wait([key], _LEAST_S) for key in keys]

    def delete(self, key: str) -> None:
        """Removes a key, where the store can."""
        delete = getattr(self._store, "delete_key", None)
        if delete is not None:
            with contextlib.suppress(Exception):  # likewise; what stays does no harm
                delete(key)

    def describe(self, ranks: Sequence[int]) -> dict[int, str]:
        """Nothing: such stores do not know who uses them."""
        return {}

    def close(self) -> None:
        """Nothing: the store is the caller's."""

    @contextlib.contextmanager
    def _failures(self, operation: str) -> Any:
        try:
            yield
        except Exception as cause:
            raise self._failed(operation, cause) from cause

    def _failed(self, operation: str, cause: Exception) -> errors.PeerUnreachable:
        text = str(cause).strip().partition("\n")[0]
        return errors.PeerUnreachable(
            f"the {type(self._store).__name__} failed: {text or type(cause).__name__}",
            operation=operation,
            hint="the store was passed in: look at whoever serves it",
        )
