"""What memory a Python object spans: pointer, length, device, and what keeps it alive and in place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

from ._dlpack import export, is_contiguous
from ._native import ffi, lib
from .errors import ArgumentError, ArgumentTypeError, RegistrationError

_CONTIGUOUS_HINT = "register the contiguous base and use region.of(view), or make a contiguous copy first"
_DLPACK_CPU = 1
_DLPACK_CUDA = (2, 13)  # device memory, managed memory


@dataclass(frozen=True, slots=True)
class Span:
    """`length_bytes` bytes at `pointer`, kept alive and in place by `owner`."""

    pointer: int
    length_bytes: int
    device_kind: int
    device_index: int
    read_only: bool
    owner: object


def parse_device(device: Any) -> tuple[int, int]:
    """(kind, index) of None, "cpu", "cuda", "cuda:<index>" or a torch.device.

    Raises:
        ArgumentError: another device.
        ArgumentTypeError: not a device at all.
    """
    if device is None:
        return lib.TE_DEVICE_HOST, 0
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if isinstance(device, str):
        kind, _, digits = device.partition(":")
        index = int(digits) if digits.isdecimal() else None if not digits else -1
    if not isinstance(kind, str):
        raise ArgumentTypeError(f"device must be None, a string or a torch.device, not {type(device).__name__}")
    if index is None or (isinstance(index, int) and 0 <= index < 1 << 31):
        if kind == "cpu":
            return lib.TE_DEVICE_HOST, 0
        if kind == "cuda":
            return lib.TE_DEVICE_CUDA, index or 0
    raise ArgumentError(f"unknown device {str(device)!r}; known are 'cpu' and 'cuda:<index>'")


def span_of(memory: Any) -> Span:
    """The memory of anything that has some.

    Raises:
        RegistrationError: it is not contiguous, or holds Python objects, or is in no memory at all.
        ArgumentTypeError: nothing that has memory.
    """
    if isinstance(memory, tuple):
        return _of_tuple(memory)
    torch = sys.modules.get("torch")  # an object can only be a tensor when torch was imported already
    if torch is not None and isinstance(memory, torch.Tensor):
        return _of_tensor(memory)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(memory, numpy.ndarray):
        return _of_ndarray(memory, memory)
    if hasattr(memory, "__cuda_array_interface__"):
        return _of_cuda_array(memory)
    try:
        return _of_buffer(memory)
    except TypeError:
        pass
    if hasattr(memory, "__dlpack__") and hasattr(memory, "__dlpack_device__"):
        return _of_dlpack(memory)
    raise ArgumentTypeError(
        f"cannot find the memory of {type(memory).__name__}",
        operation="register",
        hint="pass an array, a tensor, an object with a buffer or DLPack interface, or (pointer, nbytes, device)",
    )


def _refusal(message: str, hint: str | None = None) -> RegistrationError:
    return RegistrationError(message, operation="register", hint=hint)


def _of_tuple(memory: tuple[Any, ...]) -> Span:
    if len(memory) != 3 or any(isinstance(part, bool) or not hasattr(part, "__index__") for part in memory[:2]):
        raise ArgumentTypeError("raw memory is given as (pointer, nbytes, device)", operation="register")
    pointer, length = int(memory[0]), int(memory[1])
    if pointer < 0 or length < 0 or pointer + length > 1 << 64:
        raise ArgumentError(f"({pointer:#x}, {length}) is no range of addresses", operation="register")
    if pointer == 0 and length:
        raise ArgumentError("the pointer is null", operation="register")
    return Span(pointer, length, *parse_device(memory[2]), read_only=False, owner=None)


def _of_tensor(tensor: Any) -> Span:
    if str(tensor.layout) != "torch.strided" or tensor.is_meta:
        raise _refusal(f"a torch tensor of layout {tensor.layout} on {tensor.device} has no plain memory")
    if not tensor.is_contiguous():
        raise _refusal(f"the tensor of shape {tuple(tensor.shape)} is not contiguous", _CONTIGUOUS_HINT)
    kind, index = parse_device(tensor.device)
    length = tensor.numel() * tensor.element_size()
    return Span(int(tensor.data_ptr()), length, kind, index, read_only=False, owner=tensor)


def _of_ndarray(array: Any, owner: object) -> Span:
    if array.dtype.hasobject:
        raise _refusal(f"an array of dtype {array.dtype} holds references to Python objects, not data")
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise _refusal(
            f"the array of shape {array.shape} and strides {array.strides} is not contiguous", _CONTIGUOUS_HINT
        )
    pointer = int(array.__array_interface__["data"][0])
    return Span(pointer, int(array.nbytes), lib.TE_DEVICE_HOST, 0, read_only=not array.flags.writeable, owner=owner)


def _of_cuda_array(memory: Any) -> Span:
    interface = memory.__cuda_array_interface__
    try:
        span = _of_interface(memory, interface)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as cause:
        raise ArgumentTypeError(
            f"{type(memory).__name__}: its __cuda_array_interface__ is malformed: {cause!r}", operation="register"
        ) from None
    if not 0 <= span.pointer <= span.pointer + span.length_bytes <= 1 << 64 or (span.length_bytes and not span.pointer):
        raise ArgumentError(
            f"{type(memory).__name__}: ({span.pointer:#x}, {span.length_bytes}) is no range of addresses",
            operation="register",
        )
    return span


def _of_interface(memory: Any, interface: Any) -> Span:
    pointer, read_only = interface["data"]
    item = int(interface["typestr"][2:])
    shape = [int(extent) for extent in interface["shape"]]
    length = item * prod(shape)
    if item <= 0 or any(extent < 0 for extent in shape):
        raise ValueError(f"typestr {interface['typestr']!r}, shape {tuple(shape)}")
    strides = interface.get("strides")
    if strides is not None and length and not is_contiguous(shape, [int(stride) // item for stride in strides]):
        raise _refusal(f"the device array of shape {tuple(shape)} is not contiguous", _CONTIGUOUS_HINT)
    index = _cuda_index(memory, int(pointer or 0), length)
    return Span(int(pointer or 0), length, lib.TE_DEVICE_CUDA, int(index), read_only=bool(read_only), owner=memory)


def _cuda_index(memory: Any, pointer: int, length: int) -> int:
    """The number of the device: as the object says, else as the driver does."""
    device = getattr(memory, "device", None)
    for name in ("id", "index", "device_id"):
        index = getattr(device, name, None)
        if isinstance(index, int):
            return index
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        return parse_device(device)[1]
    out = ffi.new("int32_t *")
    found = length and lib.te_pointer_device(pointer, out, ffi.new("te_error *")) == lib.TE_OK
    return int(out[0]) if found else 0


def _of_buffer(memory: Any) -> Span:
    view = memoryview(memory)
    if not view.contiguous:
        raise _refusal(
            f"the buffer of shape {view.shape} and strides {view.strides} is not contiguous", _CONTIGUOUS_HINT
        )
    try:
        export = ffi.from_buffer(view)
    except BufferError as cause:
        raise _refusal(f"the buffer cannot be exported: {cause}", _CONTIGUOUS_HINT) from None
    pointer = int(ffi.cast("uintptr_t", export))
    # Our own view pins the memory (a bytearray cannot be resized, a mmap not be closed). The export must not: when the
    # collector meets a memoryview with an export in a cycle, it clears it all the same and CPython crashes.
    ffi.release(export)
    return Span(pointer, view.nbytes, lib.TE_DEVICE_HOST, 0, read_only=view.readonly, owner=(memory, view))


def _of_dlpack(memory: Any) -> Span:
    device, index = memory.__dlpack_device__()
    if device in _DLPACK_CUDA:
        try:
            exported = export(memory)
        except (BufferError, RuntimeError, TypeError, ValueError) as cause:
            raise _refusal(f"DLPack export failed: {cause}", "pass (pointer, nbytes, 'cuda:<index>')") from None
        if not exported.contiguous:
            raise _refusal("the device array is not contiguous", _CONTIGUOUS_HINT)
        return Span(
            exported.pointer,
            exported.length_bytes,
            lib.TE_DEVICE_CUDA,
            int(index),
            read_only=False,
            owner=(memory, exported.capsule),
        )
    if device != _DLPACK_CPU:
        raise _refusal(f"DLPack device type {int(device)} is neither host nor CUDA memory")
    import numpy as np

    try:
        array = np.from_dlpack(memory)
    except (BufferError, RuntimeError, TypeError) as cause:
        raise _refusal(f"DLPack export failed: {cause}", "pass (pointer, nbytes, 'cpu')") from None
    return _of_ndarray(array, (memory, array))
