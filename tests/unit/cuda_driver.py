"""The stand-in for CUDA's driver, as a program with CUDA would use the driver by itself."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np


class Driver:
    """Allocates, fills and reads memory of a device."""

    def __init__(self, path: str) -> None:
        self.symbols = library = ctypes.CDLL(path)
        library.standin_cuda_read.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
        library.standin_cuda_write.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
        library.cuMemAlloc_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
        library.cuDevicePrimaryCtxRetain.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
        library.cuCtxPushCurrent_v2.argtypes = (ctypes.c_void_p,)
        assert library.cuInit(0) == 0
        self.allocated: dict[int, int] = {}  # address -> device

    def configure(self, options: str) -> None:
        assert self.symbols.standin_cuda_configure(options.encode()) == 0

    @contextlib.contextmanager
    def current(self, device: int) -> Iterator[None]:
        context = ctypes.c_void_p()
        assert self.symbols.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert self.symbols.cuCtxPushCurrent_v2(context) == 0
        yield
        assert self.symbols.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0

    def allocate(self, nbytes: int, device: int = 0) -> int:
        pointer = ctypes.c_uint64()
        with self.current(device):
            assert self.symbols.cuMemAlloc_v2(ctypes.byref(pointer), nbytes) == 0
        self.allocated[pointer.value] = device
        return pointer.value

    def free(self, pointer: int) -> None:
        with self.current(self.allocated.pop(pointer)):
            assert self.symbols.cuMemFree_v2(pointer) == 0

    def write(self, pointer: int, array: Any) -> None:
        assert self.symbols.standin_cuda_write(pointer, array.ctypes.data, array.nbytes) == 0

    def read(self, pointer: int, nbytes: int) -> Any:
        array = np.empty(nbytes, np.uint8)
        assert self.symbols.standin_cuda_read(pointer, array.ctypes.data, nbytes) == 0
        return array
