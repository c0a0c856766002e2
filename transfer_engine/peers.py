"""Peer: another engine as this one sees it."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, NoReturn, TypeAlias, Union

from . import _native
from ._handle import EngineHandle
from ._native import ffi, lib, thread_state
from .address import Address
from .errors import ArgumentTypeError, refuse_pickle
from .transfers import Transfer

PeerName: TypeAlias = Union["Peer", Address, bytes, str]

_STATES = {
    lib.TE_PEER_IDLE: "idle",
    lib.TE_PEER_CONNECTING: "connecting",
    lib.TE_PEER_CONNECTED: "connected",
    lib.TE_PEER_LOST: "lost",
    lib.TE_PEER_CLOSED: "closed",
}


def state_name(state: int) -> str:
    """The name of a TE_PEER_* value."""
    return _STATES.get(state, f"unknown ({state})")


class Peer:
    """Another engine. Made by `engine.connect()`, and given to callbacks of `engine.on_peer_lost()`."""

    __slots__ = ("_connecting", "_handle", "_index", "address")

    def __init__(self, handle: EngineHandle, address: Address, index: int, connecting: Transfer | None = None) -> None:
        self._handle = handle
        self._index = index
        self._connecting = connecting
        self.address = address

    @property
    def state(self) -> str:
        """One of "idle", "connecting", "connected", "lost" and "closed"."""
        self._handle.ensure_native("peer state")
        info = self._handle.describe_peer(self._index)
        if info is None or Address.from_native(ffi.addressof(info, "address")) != self.address:
            return "closed"  # its place is empty, or taken by another engine
        return state_name(info.state)

    @property
    def nics(self) -> tuple[str, ...]:
        """The addresses of its NICs, in readable form."""
        return self.address.nics

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when both sides know each other.

        Raises:
            PeerUnreachable: it never answered.
            TransferTimeout: this wait ran out; connecting goes on.
        """
        self._transfer().wait(timeout_s)

    def __await__(self) -> Generator[Any, Any, None]:
        return self._transfer().__await__()

    def _transfer(self) -> Transfer:
        if self._connecting is None:
            self._connecting = connect(self._handle, self._index, None)
        return self._connecting

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send peer.address, and connect() to it there")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Peer):
            return NotImplemented
        return self._handle is other._handle and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return f"<te.Peer {self.address!r}>"


def connect(handle: EngineHandle, index: int, timeout_s: float | None) -> Transfer:
    """Starts to connect, or finds that it has."""
    error = thread_state.error
    submit = partial(lib.te_peer_connect, handle.pointer, index, _native.nanoseconds(timeout_s), error)
    pointer = submit() or handle.persist(submit, error, timeout_s)
    if not pointer:
        raise handle.failure("connect", error.status, error)
    return Transfer(pointer, handle, "connect", None, None)


def peer_indices(handle: EngineHandle, peers: Iterable[PeerName] | PeerName | None) -> tuple[Any, int]:
    """An int32_t array (or NULL) of the core's peer indices, and its length. A single peer is one of one.

    Raises:
        ArgumentTypeError, DescriptorError: something else than peers.
    """
    if peers is None:
        return _native.NULL, 0
    listed: Iterable[Any] = ()
    if isinstance(peers, (Peer, Address, bytes, bytearray, memoryview, str)):
        listed = [peers]
    elif isinstance(peers, Iterable):
        listed = peers
    else:
        raise ArgumentTypeError(f"peers are te.Peer or te.Address, not {type(peers).__name__}", operation="wait")
    addresses = [peer.address if isinstance(peer, Peer) else Address.of(peer) for peer in listed]
    return ffi.new("int32_t[]", [handle.peer(address, "wait") for address in addresses]), len(addresses)
