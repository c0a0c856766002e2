"""Rendezvous: what the ranks of a job tell each other before they have engines that can talk.

Every rank makes the same calls in the same order. Call number n of a rank writes under keys that hold n, so that a fast
rank never disturbs a slow one. Keys are removed once nobody can read them any more: when a rank has seen everybody
arrive at call n, everybody has finished every call before n.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .. import _native, errors
from . import environment, instances, wire
from .client import TcpStore
from .environment import Meeting
from .foreign import ForeignStore, OwnStore, Store
from .server import StoreServer

_DEFAULT_TIMEOUT_S = 300.0
_LINGER_S = 5.0  # how long rank 0 keeps the store for the others when it closes
_READ_S = 5.0  # to read what is known to be there
_MOST_NAMED = 16  # ranks in an error's text


_all: weakref.WeakSet[Rendezvous] = weakref.WeakSet()


class Rendezvous:
    """A group of ranks that can gather, wait for and tell each other bytes. A context manager.

    Args:
        store: None: our own TCP store, found through the environment (torchrun's MASTER_ADDR and MASTER_PORT, or
            TE_RENDEZVOUS=HOST:PORT) and served by rank 0. "HOST:PORT": a store that `Rendezvous.serve` serves. Else any
            object with set, get, wait and add as torch.distributed's stores have them; it stays the caller's.
        rank: of this process; None: RANK.
        world_size: how many ranks there are; None: WORLD_SIZE.
        timeout_s: seconds for finding the store, and for calls that name no time of their own.
        name: sets rendezvous apart that use one store; the same on all ranks.
        token: the cluster token of our own store; None: TE_CLUSTER_TOKEN or TE_CLUSTER_TOKEN_FILE, b"": none.

    Raises:
        ConfigError: the environment does not say enough, or the ranks do not agree with each other.
        PeerUnreachable: no store was found in time.
        ArgumentTypeError: a store without the needed methods.
    """

    def __init__(
        self,
        store: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
        name: str = "",
        token: bytes | None = None,
    ) -> None:
        self._server: StoreServer | None = None
        self._closed = False
        self._timeout_s = _seconds(timeout_s)
        self.rank, self.world_size = environment.ranks(rank, world_size)
        place = environment.job_name() if store is None else store
        member = (name, self.rank, self.world_size)
        number = instances.following(place, member)
        run = "/".join(os.environ.get(f"TORCHELASTIC_{part}", "") for part in ("RUN_ID", "RESTART_COUNT"))
        self._prefix = f"transfer_engine/{run}/{name}/{number}"
        self._call = 0
        self._begun: tuple[str, bytes] | None = None  # a call that did not come to its end
        self._old_keys: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        if store is None or isinstance(store, str):
            self._store: Store = OwnStore(self._own_store(store, f"{environment.job_name()}/{name}/{number}", token))
        else:
            self._store = ForeignStore(store)
        instances.opened(place, member)
        _all.add(self)

    @staticmethod
    def serve(
        host: str = "", port: int = 0, *, world_size: int | None = None, token: bytes | None = None
    ) -> StoreServer:
        """A store of its own, for ranks that get its `address` by other ways: Rendezvous(server.address, ...).

        Without a cluster token, everybody who reaches the port may join.

        Args:
            host: where to listen: a numeric address; "": on all addresses of this host.
            port: zero lets the kernel choose one.
            world_size: clients with another one are refused; None: none is.
            token: the cluster token; None: the environment's, b"": none.

        Raises:
            ConfigError: it cannot listen there.
        """
        return StoreServer(host, port, world_size=world_size, token=token)

    # --- what the ranks do together ---------------------------------------------------------------------------------

    def all_gather(self, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """Everybody's bytes, by rank, once everybody has called it. Lengths may differ and may be zero.

        After a TransferTimeout the same call may be repeated, with the same bytes.

        Args:
            data: at most 16 MiB.
            timeout_s: seconds; None: that of the rendezvous.

        Raises:
            TransferTimeout: ranks were late; the error names them.
            PeerUnreachable: the store is gone.
        """
        payload = _native.foreign_bytes(data, "data")
        _ensure_fits(payload)
        with self._turn("all_gather", payload, timeout_s) as (deadline, begin):
            keys = self._arrive("all_gather", payload, deadline, begin)
            values = self._store.get(keys, max(0.0, deadline - time.monotonic()) + _READ_S)
            self._finish(everybody=True)
            return values

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Returns once everybody has called it. After a TransferTimeout the same call may be repeated.

        Raises:
            TransferTimeout: ranks were late; the error names them.
            PeerUnreachable: the store is gone.
        """
        with self._turn("barrier", b"", timeout_s) as (deadline, begin):
            self._arrive("barrier", b"", deadline, begin)
            self._finish(everybody=True)

    def broadcast(self, data: bytes | None = None, *, root: int = 0, timeout_s: float | None = None) -> bytes:
        """The root's bytes. The root does not wait for the others.

        Args:
            data: the root's, at most 16 MiB; the others' are ignored.
            root: the rank that speaks.
            timeout_s: seconds; None: that of the rendezvous.

        Raises:
            TransferTimeout: the root was late.
            ArgumentError: no such rank, or the root has no data.
            PeerUnreachable: the store is gone.
        """
        if not 0 <= root < self.world_size:
            raise errors.ArgumentError(f"root {root} of {self.world_size} ranks", operation="broadcast")
        mine = root == self.rank
        if mine and data is None:
            raise errors.ArgumentError("the root has no data", operation="broadcast")
        payload = _native.foreign_bytes(data, "data") if mine else b""
        _ensure_fits(payload)
        with self._turn("broadcast", payload, timeout_s) as (deadline, begin):
            key = self._key("broadcast", root)
            if mine:
                self._put(key, payload)
                value = payload
            else:
                if not self._store.wait([key], max(0.0, deadline - time.monotonic())):
                    raise self._late("broadcast", [root], begin)
                value = self._store.get([key], _READ_S)[0]
            self._finish(everybody=False)
            return value

    def close(self) -> None:
        """Leaves; idempotent. Rank 0, which serves the store, waits up to 5 s for the others to leave, too."""
        self._close(_LINGER_S)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()  # after an error, too: the others' time-outs come a moment later, and the store knows who is late

    def __del__(self) -> None:
        if hasattr(self, "_store"):  # waits, too: the others may not have read what was just told
            self._close(0.0 if sys.is_finalizing() else _LINGER_S)

    def __repr__(self) -> str:
        return f"<te.Rendezvous: rank {self.rank} of {self.world_size}{', closed' if self._closed else ''}>"

    # --- how --------------------------------------------------------------------------------------------------------

    def _own_store(self, address: str | None, job: str, token: bytes | None) -> TcpStore:
        if address is not None:
            host, port = environment.parse_address(address, "store")
            place = Meeting(host, (port,))
            job = os.environ.get("TORCHELASTIC_RUN_ID", "") + job.removeprefix(environment.job_name())
        else:
            place = environment.meeting(self.world_size)
            if self.rank == 0:
                self._server = _serve(place, job, self.world_size, token)
                local = {"::": "::1", "0.0.0.0": "127.0.0.1"}.get(self._server.host, self._server.host)
                place = Meeting(local, (self._server.port,))
        try:
            return TcpStore(
                place, job=job, rank=self.rank, world_size=self.world_size, token=token, timeout_s=self._timeout_s
            )
        except BaseException:
            if self._server is not None:
                self._server.close()
            raise

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{self._call}/{kind}/{rank}"

    def _put(self, key: str, payload: bytes) -> None:
        self._store.set(key, payload)
        self._old_keys.append((self._call, key))

    @contextlib.contextmanager
    def _turn(self, kind: str, payload: bytes, timeout_s: float | None) -> Any:
        """One call at a time. A call that was late is continued by the same call, and by no other."""
        begin = time.monotonic()
        deadline = begin + (self._timeout_s if timeout_s is None else _seconds(timeout_s))
        with self._lock:
            if self._closed:
                raise errors.EngineClosed("this rendezvous was closed", operation=kind, hint="open a new te.Rendezvous")
            if self._begun is not None and self._begun != (kind, payload):
                raise errors.ConfigError(
                    f"the last call, {self._begun[0]}, was late and was not repeated: the ranks would disagree",
                    operation=kind,
                    hint="repeat the call that was late, with the same bytes, or open a new te.Rendezvous on all ranks",
                )
            yield deadline, begin

    def _arrive(self, kind: str, payload: bytes, deadline: float, begin: float) -> list[str]:
        """Says that this rank is here, and waits for all; returns everybody's keys."""
        if self._begun is None:
            self._put(self._key(kind, self.rank), payload)
            self._begun = (kind, payload)
        keys = [self._key(kind, rank) for rank in range(self.world_size)]
        if not self._store.wait(keys, max(0.0, deadline - time.monotonic())):
            here = self._store.present(keys)
            missing = [rank for rank in range(self.world_size) if not here[rank]]
            if missing:  # else the last one came just now
                raise self._late(kind, missing, begin)
        return keys

    def _finish(self, *, everybody: bool) -> None:
        """`everybody`: all ranks have arrived at this call, so nobody reads this rank's earlier keys any more."""
        self._begun = None
        if everybody:
            for call, key in self._old_keys:
                if call < self._call:
                    self._store.delete(key)
            self._old_keys = [(call, key) for call, key in self._old_keys if call >= self._call]
        self._call += 1

    def _late(self, kind: str, missing: Sequence[int], begin: float) -> errors.TransferTimeout:
        known = self._store.describe(missing[:_MOST_NAMED])
        names = [f"rank {rank} ({known[rank]})" if rank in known else f"rank {rank}" for rank in missing[:_MOST_NAMED]]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return errors.TransferTimeout(
            f"{self.world_size - len(missing)} of {self.world_size} ranks arrived; missing: {', '.join(names)}{more}"
            if kind != "broadcast"
            else f"the root has not spoken: {names[0]}",
            operation=kind,
            elapsed_s=time.monotonic() - begin,
            hint="look at the logs of the missing ranks; timeout_s raises the limit",
        )

    def _close(self, linger_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._store.close()
        if self._server is not None:
            self._server.close(linger_s)


@atexit.register
def _close_all() -> None:
    for rendezvous in list(_all):
        rendezvous.close()


def _serve(place: Meeting, job: str, world_size: int, token: bytes | None) -> StoreServer:
    """On the first free port. A name may mean the loopback on its own host (Debian's way), so names mean everywhere."""
    host = place.host if environment.is_literal(place.host) else ""
    problems = []
    for at in (host, "") if host else ("",):
        for port in place.ports:
            try:
                return StoreServer(at, port, job=job, world_size=world_size, token=token)
            except errors.ConfigError as cause:
                problems.append(cause.message)
                if cause.status not in ("EADDRINUSE", "EACCES"):
                    break  # not an address of this host: a load balancer's, say
    raise errors.ConfigError(
        f"no port for the store: {'; '.join(dict.fromkeys(problems))}",
        operation="Rendezvous",
        hint=f"free one of these ports, or set {environment.ADDRESS}=HOST:PORT on all ranks",
    )


def _seconds(timeout_s: float) -> float:
    _native.nanoseconds(timeout_s)  # raises what is no time
    return min(float(timeout_s), 1e6)


def _ensure_fits(payload: bytes) -> None:
    if len(payload) > wire.MOST_VALUE_BYTES:
        raise errors.ArgumentError(
            f"{len(payload)} bytes, at most {wire.MOST_VALUE_BYTES} can be told at once", operation="Rendezvous"
        )
