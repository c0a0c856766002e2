"""Launches kernels into streams of anybody's."""

from __future__ import annotations

import ctypes
from typing import Any

from .. import _cuda
from ..errors import ArgumentError, ArgumentTypeError, ConfigError
from .loading import Kernel

_MOST = (1 << 64) - 1


def stream_handle(stream: Any) -> int:
    """The address of a stream, as the driver takes it.

    Args:
        stream: None for the default stream, a torch.cuda.Stream, a stream of cupy's or cuda.core's, any object with
            `__cuda_stream__`, or the handle itself.

    Raises:
        ArgumentTypeError: nothing of these.
        ArgumentError: a handle that cannot be one.
    """
    if stream is None:
        return 0
    value: Any = None
    if isinstance(stream, int) and not isinstance(stream, bool):
        value = stream
    elif isinstance(getattr(stream, "cuda_stream", None), int):  # torch
        value = stream.cuda_stream
    elif hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        protocol = protocol() if callable(protocol) else protocol
        if isinstance(protocol, tuple) and len(protocol) == 2 and protocol[0] == 0:
            value = protocol[1]
    elif isinstance(getattr(stream, "ptr", None), int):  # cupy
        value = stream.ptr
    if not hasattr(value, "__index__") or isinstance(value, bool):
        raise ArgumentTypeError(
            f"a {type(stream).__name__} is no stream",
            operation="stream",
            hint="pass None, a torch.cuda.Stream, a stream of cupy or cuda.core, an object with __cuda_stream__ "
            "(version 0), or the handle as an int",
        )
    handle = int(value)
    if not 0 <= handle <= _MOST:
        raise ArgumentError(f"{handle} is no handle of a stream", operation="stream")
    return handle


def launch(kernel: Kernel, stream: Any, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any) -> None:
    """Puts a kernel into a stream. Returns at once; works while the stream is captured.

    Args:
        kernel: of `load()` or `compile()`.
        stream: see `stream_handle`.
        grid: blocks, in up to three dimensions.
        block: threads of a block, likewise.
        args: ints take 8 bytes (pointers, 64-bit integers), floats are doubles; ctypes values and numpy scalars are
            taken as they are; of device arrays and tensors the kernel gets the address.

    Raises:
        ArgumentTypeError, ArgumentError: arguments that are none.
        ConfigError: the driver refuses the launch.
    """
    if not isinstance(kernel, Kernel):
        raise ArgumentTypeError(
            f"kernel must come from te.kernels.load(), not be a {type(kernel).__name__}", operation="launch"
        )
    handle = stream_handle(stream)
    values = [_value(arg, place) for place, arg in enumerate(args)]
    pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
    sizes = (*_dimensions(grid, "grid"), *_dimensions(block, "block"))
    driver = _cuda.driver("launch")
    with (
        _cuda.failures(ConfigError, f"{kernel.name} on {sizes[:3]} blocks of {sizes[3:]} threads", "launch", _HINT),
        _cuda.current(driver, kernel.device, "launch"),
    ):
        _cuda.check(driver, "cuLaunchKernel", kernel.function, *sizes, 0, handle, ctypes.addressof(pointers), 0)


_HINT = "the stream must belong to the kernel's device; an earlier kernel that failed shows here, too"


def _dimensions(value: Any, what: str) -> tuple[int, int, int]:
    sizes = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(sizes) <= 3 or any(isinstance(size, bool) or not hasattr(size, "__index__") for size in sizes):
        raise ArgumentTypeError(f"{what} must be an int or a tuple of up to three, not {value!r}", operation="launch")
    if any(not 1 <= int(size) < 1 << 31 for size in sizes):
        raise ArgumentError(f"{what} {value!r}: at least one in each dimension, and below 2**31", operation="launch")
    x, y, z = (*(int(size) for size in sizes), 1, 1)[:3]
    return x, y, z


def _value(arg: Any, place: int) -> Any:
    """A ctypes value that the kernel's parameter is copied from during the launch."""
    if isinstance(arg, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return arg
    if isinstance(arg, bool):
        return ctypes.c_bool(arg)
    if isinstance(arg, float) and type(arg) is float:
        return ctypes.c_double(arg)
    if isinstance(arg, int):
        return _integer(arg, place)
    if callable(getattr(arg, "data_ptr", None)):  # a tensor
        if not getattr(arg, "is_cuda", True) and not arg.is_pinned():
            raise ArgumentError(
                f"argument {place}: a tensor in pageable memory of the host, where kernels cannot reach it",
                operation="launch",
                hint="pass a tensor of the device, or one that is pinned",
            )
        return _integer(int(arg.data_ptr()), place)
    if hasattr(arg, "__cuda_array_interface__"):
        return _integer(int(arg.__cuda_array_interface__["data"][0] or 0), place)
    if getattr(arg, "shape", None) == () and hasattr(arg, "tobytes"):  # a numpy scalar
        data = arg.tobytes()
        return (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
    if hasattr(arg, "__index__"):
        return _integer(int(arg), place)
    raise ArgumentTypeError(
        f"argument {place}: a {type(arg).__name__} cannot be passed to a kernel", operation="launch"
    )


def _integer(value: int, place: int) -> Any:
    if not -(1 << 63) <= value <= _MOST:
        raise ArgumentError(f"argument {place}: {value} does not fit in 64 bits", operation="launch")
    return ctypes.c_uint64(value & _MOST)
