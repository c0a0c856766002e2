"""Messages: small byte strings between engines, in order per sender."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from . import _native
from ._awaiting import Waiter
from ._handle import OPEN, EngineHandle
from ._native import ffi, lib, thread_state
from .address import Address
from .dispatcher import Dispatcher
from .errors import ArgumentTypeError, EngineClosed, TransferTimeout
from .transfers import Transfer


@dataclass(frozen=True, slots=True)
class Message:
    """What came, and from whom."""

    sender: Address
    data: bytes


def send(handle: EngineHandle, address: Address, data: object, timeout_s: float | None, request_id: object) -> Transfer:
    """Starts to send; the core copies the data during the call."""
    handle.ensure_open("send")
    if isinstance(data, str):
        raise ArgumentTypeError("messages are bytes, not str", operation="send", hint="pass text.encode()")
    try:
        raw = ffi.from_buffer(data)
    except TypeError:
        raise ArgumentTypeError(f"messages are bytes, not {type(data).__name__}", operation="send") from None
    except (BufferError, ValueError):
        raise ArgumentTypeError(
            f"the {type(data).__name__} is not contiguous", operation="send", hint="send a copy: bytes(data)"
        ) from None
    index = handle.peer(address, "send")
    error = thread_state.error
    submit = partial(lib.te_send, handle.pointer, index, raw, len(raw), _native.nanoseconds(timeout_s), error)
    pointer = submit() or handle.persist(submit, error, timeout_s)
    if not pointer:
        if error.status != lib.TE_ERR_EXHAUSTED:
            handle.forget_remotes()
        raise handle.failure("send", error.status, error)
    return Transfer(pointer, handle, "send", None, request_id)


def fetch(handle: EngineHandle, timeout_ns: int) -> Message | None:
    """The next message, or None when none comes in time."""
    handle.ensure_open("receive")
    out = ffi.new("te_message *")
    error = thread_state.error
    status = lib.te_message_receive(handle.pointer, timeout_ns, out, error)
    if status == _native.AGAIN:
        return None
    if status != _native.OK:
        raise handle.failure("receive", status, error)
    try:
        data = bytes(ffi.buffer(out.data, out.length)) if out.length else b""
        info = ffi.new("te_peer_info *")
        status = lib.te_peer_describe(handle.pointer, out.peer, info, error)
        if status != _native.OK:
            raise handle.failure("receive", status, error)
    finally:
        lib.te_message_release(handle.pointer, out)
    return Message(Address.from_native(ffi.addressof(info, "address")), data)


def receive(handle: EngineHandle, timeout_s: float | None) -> Message:
    """The next message; TransferTimeout when none comes."""
    limit = handle.default_timeout_ns if timeout_s is None else _native.nanoseconds(timeout_s)
    deadline = time.monotonic_ns() + limit
    left = limit
    while True:
        message = fetch(handle, min(left, _native.SLICE_NS))  # Ctrl-C is served between slices
        if message is not None:
            return message
        left = max(deadline - time.monotonic_ns(), 0)
        if not left:
            raise TransferTimeout(
                f"no message came within {limit / 1e9:g} s",
                operation="receive",
                hint="raise timeout_s, or ask the sender",
            )


class Messages(AsyncIterator[Message]):
    """`async for message in engine.messages()`: ends when the engine closes. Several loops may share the messages."""

    __slots__ = ("_handle",)

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    async def __anext__(self) -> Message:
        handle = self._handle
        handle.ensure_native("messages")
        while True:
            try:
                message = fetch(handle, 0)
                if message is None:
                    waiter = Waiter()
                    dispatcher = Dispatcher.of(handle)
                    dispatcher.wake_on_message(waiter.wake)
                    try:
                        message = fetch(handle, 0)  # one may have come before the dispatcher knew of us
                        if message is None:
                            await waiter
                            continue
                    finally:
                        dispatcher.forget_waiter(waiter.wake)
            except EngineClosed:
                if handle.state == OPEN:
                    raise
                raise StopAsyncIteration from None
            return message
