"""CUDA's driver from Python, through cuda.bindings: loaded when it is first needed, never by importing this package."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from ._native import lib
from .errors import ArgumentError, ArgumentTypeError, TransferEngineError, TransportError, TransportUnavailable
from .spans import parse_device

INSTALL = "pip install 'transfer_engine[cuda]'"

_loaded: list[Any] = []
_contexts: dict[int, Any] = {}


class CudaError(TransportError):
    """A call of the driver failed; `status` names the error. Made into another by whoever knows what it means."""

    default_hint = "an earlier kernel that failed shows in later calls, too"


def missing(what: str, cause: object, operation: str) -> TransportUnavailable:
    """The error for a package that cannot be imported."""
    return TransportUnavailable(f"{what} cannot be imported: {cause}", operation=operation, hint=INSTALL)


def driver(operation: str) -> Any:
    """cuda.bindings.driver, initialised.

    Raises:
        TransportUnavailable: cuda-bindings, the driver or a device is missing.
    """
    if _loaded:
        return _loaded[0]
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as cause:
        raise missing("cuda.bindings", cause, operation) from None
    try:
        check(module, "cuInit", 0)
    except (CudaError, RuntimeError) as cause:  # RuntimeError: libcuda.so.1 was not found
        raise TransportUnavailable(
            f"no usable CUDA driver: {getattr(cause, 'message', cause)}",
            operation=operation,
            hint="install NVIDIA's driver, and give the container access to the GPU",
        ) from None
    _loaded.append(module)
    return module


def check(module: Any, call: str, *arguments: Any) -> Any:
    """Calls a function of the driver and returns what it gives beside its status: nothing, a value or a tuple.

    Raises:
        CudaError: it failed.
    """
    status, *values = getattr(module, call)(*arguments)
    if int(status) != 0:
        name = str(getattr(status, "name", status))
        raise CudaError(f"{call} failed with {name}", operation=call, status=name)
    return values[0] if len(values) == 1 else tuple(values) if values else None


def device_index(device: Any, operation: str) -> int:
    """The index of a device: an int, "cuda", "cuda:<index>" or a torch.device.

    Raises:
        ArgumentError: no such device, or the host.
        ArgumentTypeError: no device at all.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        index = device
    elif device is None:
        raise ArgumentTypeError("device must be an index, 'cuda:<index>' or a torch.device", operation=operation)
    else:
        kind, index = parse_device(device)
        if kind != lib.TE_DEVICE_CUDA:
            raise ArgumentError(f"device {str(device)!r} is no GPU", operation=operation)
    if index < 0:
        raise ArgumentError(f"device {index} does not exist", operation=operation)
    return index


def handle_of(module: Any, index: int, operation: str) -> Any:
    """The driver's device of an index.

    Raises:
        ArgumentError: there is none.
    """
    count = check(module, "cuDeviceGetCount")
    if index >= count:
        raise ArgumentError(f"device cuda:{index} does not exist: there are {count}", operation=operation)
    return check(module, "cuDeviceGet", index)


def attribute(module: Any, index: int, name: str, operation: str) -> int:
    """A device's attribute, by its name without CU_DEVICE_ATTRIBUTE_; zero where the bindings do not know it."""
    which = getattr(module.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if which is None:
        return 0
    return int(check(module, "cuDeviceGetAttribute", which, handle_of(module, index, operation)))


@contextlib.contextmanager
def current(module: Any, index: int, operation: str) -> Iterator[None]:
    """Inside, the device's primary context (the one of torch and of the CUDA run time) is current in this thread.

    It is retained once per device for as long as the process lives.
    """
    context = _contexts.get(index)
    if context is None:
        context = check(module, "cuDevicePrimaryCtxRetain", handle_of(module, index, operation))
        context = _contexts.setdefault(index, context)
    check(module, "cuCtxPushCurrent", context)
    try:
        yield
    finally:
        check(module, "cuCtxPopCurrent")


@contextlib.contextmanager
def failures(error: type[TransferEngineError], message: str, operation: str, hint: str | None = None) -> Iterator[None]:
    """Makes a CudaError inside into a typed one."""
    try:
        yield
    except CudaError as cause:
        raise error(f"{message}: {cause.message}", operation=operation, status=cause.status, hint=hint) from None
