"""Memory of the host in place of a device's: memfd for what is allocated, mmap for what is mapped."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from pathlib import Path

from transfer_engine import errors
from transfer_engine.nvlink.driver import Physical

GRANULARITY = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MemfdDriver:
    """A `Driver`. Handles are descriptors; a fabric handle names a process and its descriptor."""

    dlpack_device = 1
    array_interface = ""

    def __init__(self, *, fabric: bool = False) -> None:
        self.fabric = fabric
        self.unreachable: set[str] = set()
        self.refuse_map = False
        self.mapped: set[int] = set()
        self.handles: set[int] = set()

    def create(self, nbytes: int, device: int) -> Physical:
        length = -(-nbytes // GRANULARITY) * GRANULARITY
        handle = os.memfd_create("te-nvlink-test", os.MFD_CLOEXEC)
        os.ftruncate(handle, length)
        self.handles.add(handle)
        return Physical(handle, length, self.fabric, None if self.fabric else "a stand-in")

    def release(self, handle: int) -> None:
        self.handles.remove(handle)
        os.close(handle)

    def map(self, handle: int, length: int, device: int) -> int:
        if self.refuse_map:
            raise errors.ConfigError("cannot be mapped")
        if os.fstat(handle).st_size < length:
            raise errors.ConfigError("shorter than it says")
        pointer = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
        assert pointer is not None
        self.mapped.add(pointer)
        return int(pointer)

    def unmap(self, pointer: int, length: int) -> None:
        self.mapped.remove(pointer)
        assert _libc.munmap(pointer, length) == 0

    def zero(self, pointer: int, length: int, device: int) -> None:
        ctypes.memset(pointer, 0, length)

    def export_descriptor(self, handle: int) -> int:
        return os.dup(handle)

    def import_descriptor(self, descriptor: int) -> int:
        handle = os.dup(descriptor)
        self.handles.add(handle)
        return handle

    def export_fabric(self, handle: int) -> bytes:
        return struct.pack("64s", struct.pack("2i", os.getpid(), handle))

    def import_fabric(self, fabric: bytes) -> int:
        process, descriptor = struct.unpack_from("2i", fabric)
        try:
            handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as cause:
            raise errors.ConfigError(f"fabric: {cause.strerror}") from None
        self.handles.add(handle)
        return handle

    def identity(self, device: int) -> str:
        return f"device {device}"

    def reaches(self, device: int, identity: str) -> bool:
        return identity not in self.unreachable

    def assert_nothing_is_left(self) -> None:
        assert not self.mapped
        assert not self.handles
        assert "te-nvlink-test" not in Path("/proc/self/maps").read_text()


def put(pointer: int, data: bytes) -> None:
    ctypes.memmove(pointer, data, len(data))


def get(pointer: int, length: int) -> bytes:
    return ctypes.string_at(pointer, length)
