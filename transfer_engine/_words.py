"""What flags and watchers have in common: devices, kinds of words, and the kernels that wait and raise."""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

from . import _native
from ._handle import EngineHandle
from ._native import ffi, lib, thread_state
from .errors import ArgumentError, ArgumentTypeError, TransferEngineError, TransportUnavailable
from .spans import parse_device

_KINDS = {lib.TE_WORD_HOST: "host", lib.TE_WORD_MAPPED: "mapped", lib.TE_WORD_GDR: "gdr", lib.TE_WORD_DEVICE: "device"}
HOST = -1
MOST_AT_ONCE = (1 << 32) - 1  # of raises, so that words of 64 bits never come round


def kind_name(kind: int) -> str:
    """The name of a TE_WORD_* value."""
    return _KINDS.get(kind, f"unknown ({kind})")


def device_index(device: Any) -> int:
    """The ordinal of a CUDA device; HOST for None and "cpu"."""
    kind, index = parse_device(device)
    return index if kind == lib.TE_DEVICE_CUDA else HOST


def number(value: object, name: str, operation: str, least: int = 0, most: int = (1 << 64) - 1) -> int:
    """An integer from `least` to `most`."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{name} must be an integer, not {type(value).__name__}", operation=operation) from None
    if not least <= found <= most:
        raise ArgumentError(
            f"{name} must be from {least} to 2^{most.bit_length()} - 1, got {found}", operation=operation
        )
    return found


def open_word(handle: EngineHandle, function: Any, operation: str, device: Any) -> tuple[int, int]:
    """Opens a flag or watcher: its handle, and the device's ordinal."""
    handle.ensure_open(operation)
    index = device_index(device)
    out = ffi.new("te_handle *")
    error = thread_state.error
    status = function(handle.pointer, index, out, error)
    if status != _native.OK:
        raise refusal(handle, operation, status, error)
    if index != HOST:
        load_ahead(index)
    return int(out[0]), index


def refusal(handle: EngineHandle, operation: str, status: int, error: Any) -> TransferEngineError:
    """The exception for a failed call, with hints for what is said here."""
    failure = handle.failure(operation, status, error)
    if isinstance(failure, TransportUnavailable):
        failure.hint = "`transfer-engine doctor` says what is missing; device=None makes the same for the host"
    elif status == _native.CLOSED and not handle.state:
        failure.hint = "the engine is open: make another with engine.flag(), engine.watcher() or watcher.trigger()"
    elif isinstance(failure, ArgumentError):
        failure.hint = failure.default_hint
    return failure


def launch(module: str, kernel: str, device: int, stream: object, *arguments: int) -> None:
    """Puts a kernel of one thread into a stream, or into the graph that the stream captures.

    Args:
        module: the file of `transfer_engine.kernels` that has it.
        kernel: its name there.
        device: ordinal of the CUDA device.
        stream: what `kernels.stream_handle` takes.
        arguments: 64-bit integers, addresses among them.
    """
    from . import kernels  # on first use: it needs the driver

    kernels.launch(_kernel(module, kernel, device), stream, 1, 1, *arguments)


@functools.cache
def _kernel(module: str, kernel: str, device: int) -> Any:
    from . import kernels

    return kernels.load(module, device)[kernel]


def load_ahead(device: int) -> None:
    """Loads the kernels that wait and raise, where that can be done: later it would wait for kernels that run."""
    with contextlib.suppress(TransferEngineError):  # whoever launches one is told why
        for kernel in ("te_raise", "te_wait"):
            _kernel("waits", kernel, device)
