"""Memory of a device with an address in this process: what was allocated here, and what belongs to a peer."""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType
from typing import Any, NoReturn

from .. import _cuda
from ..errors import ArgumentError, ArgumentTypeError, EngineClosed, TransferEngineError, refuse_pickle
from . import dlpack
from .driver import Driver, Physical, cuda_driver

_log = logging.getLogger("transfer_engine")


class DeviceMemory:
    """`nbytes` bytes at `pointer`, for kernels of `device`. The base of DeviceBuffer and PeerMemory.

    Shares itself through `as_torch()`, `__dlpack__` and `__cuda_array_interface__`.
    """

    def __init__(self, driver: Driver, handle: Any, length: int, nbytes: int, index: int) -> None:
        """Takes over the handle, also when it raises."""
        self._driver = driver
        self._handle = handle
        self._length = length
        self._nbytes = nbytes
        self._index = index
        self._process = os.getpid()
        self._lock = threading.RLock()  # a tensor may be dropped at any point of a thread that is in here
        self._shared = 0  # tensors that live
        self._closed = False
        self._freed = False
        try:
            self._pointer = driver.map(handle, length, index)
        except BaseException:
            self._closed = self._freed = True
            driver.release(handle)
            raise

    @property
    def pointer(self) -> int:
        """The address for kernels of `device`.

        Raises:
            EngineClosed: it was closed.
        """
        self._ensure_open("pointer")
        return self._pointer

    @property
    def nbytes(self) -> int:
        """The length in bytes that was asked for."""
        return self._nbytes

    @property
    def device(self) -> str:
        """The device whose kernels use the address: "cuda:<index>"."""
        return f"cuda:{self._index}"

    @property
    def closed(self) -> bool:
        """True once close() was called."""
        return self._closed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._driver.array_interface != "__cuda_array_interface__":
            raise AttributeError("__cuda_array_interface__")
        return {
            "shape": (self._nbytes,), "typestr": "|u1", "data": (self.pointer, False), "strides": None, "version": 3,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._driver.dlpack_device, self._index

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """A capsule. There is no work on the memory that a consumer's stream would have to wait for."""
        with self._lock:
            self._ensure_open("share")
            self._shared += 1
        return dlpack.capsule(self._pointer, self._nbytes, self.__dlpack_device__(), self._dropped)

    def as_torch(self, dtype: Any = None, shape: Any = None) -> Any:
        """A torch tensor that shares the memory, and keeps it mapped: one-dimensional uint8 unless told otherwise.

        Raises:
            ImportError: torch is not installed.
            ArgumentError: dtype or shape do not fit the number of bytes.
            ArgumentTypeError: no dtype or shape at all.
        """
        import torch

        tensor = torch.from_dlpack(self)
        try:
            tensor = tensor if dtype is None else tensor.view(dtype)
            return tensor if shape is None else tensor.reshape(shape)
        except (ValueError, RuntimeError) as cause:
            raise ArgumentError(f"{self._nbytes} bytes: {cause}", operation="as_torch") from None
        except TypeError as cause:
            raise ArgumentTypeError(f"dtype {dtype!r}, shape {shape!r}: {cause}", operation="as_torch") from None

    def close(self) -> None:
        """Gives the address up: at once, or with the last tensor that shares it. Idempotent; nothing in a forked child.

        Kernels that use the address must have ended.
        """
        with self._lock:
            self._closed = True
            if self._shared or self._freed:
                return
            self._freed = True
        self._free()

    def _free(self) -> None:
        if self._process != os.getpid():
            return
        try:
            self._driver.unmap(self._pointer, self._length)
        finally:
            self._driver.release(self._handle)

    def _dropped(self) -> None:
        with self._lock:
            self._shared -= 1
            if self._shared or not self._closed or self._freed:
                return
            self._freed = True
        try:
            self._free()
        except TransferEngineError as cause:  # nobody could catch it
            _log.warning("freeing memory of %s failed: %s", self.device, cause)

    def _ensure_open(self, operation: str) -> None:
        if self._closed:
            raise EngineClosed(f"{self!r}", operation=operation, hint="use it before it is closed, or allocate anew")

    def __len__(self) -> int:
        return self._nbytes

    def __bool__(self) -> bool:
        return True

    def __del__(self) -> None:
        if getattr(self, "_freed", True):
            return
        try:
            self.close()
        except Exception as cause:  # noqa: BLE001 - nobody could catch it, and the interpreter may be ending
            _log.warning("freeing memory of %s failed: %s", self.device, cause)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self._pointer:#x}"
        return f"<te.nvlink.{type(self).__name__}: {self._nbytes} bytes for {self.device}, {state}>"


class DeviceBuffer(DeviceMemory):
    """Zeroed memory of a device that peers may map. Made by `allocate()`; a context manager.

    Closing it does not disturb peers that have mapped it: the memory itself lives until the last of them lets go.
    """

    def __init__(self, driver: Driver, physical: Physical, nbytes: int, index: int) -> None:
        super().__init__(driver, physical.handle, physical.length, nbytes, index)
        self._physical = physical
        try:
            driver.zero(self._pointer, physical.length, index)
        except BaseException:
            self.close()
            raise

    @property
    def handle_kind(self) -> str:
        """How peers come to it: "posix", those of this host; "fabric", those of other hosts of the domain, too."""
        return "fabric" if self._physical.fabric else "posix"

    @property
    def fabric_refusal(self) -> str | None:
        """Why it is not "fabric"; None where it is."""
        return self._physical.fabric_refusal

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "peers map it by te.nvlink.map_peers()")


class PeerMemory(DeviceMemory):
    """Memory of a peer with an address for kernels of the own device. Made by `map_peers()`, which closes it, too."""

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "each process maps its peers by te.nvlink.map_peers()")


def allocate(nbytes: int, device: Any) -> DeviceBuffer:
    """Allocates zeroed memory that peers may map.

    Args:
        nbytes: its length in bytes, at least 1. What is taken from the device is a multiple of its granularity (2 MiB).
        device: an index, "cuda:<index>" or a torch.device.

    Raises:
        RegistrationError: no such memory to be had.
        TransportUnavailable: cuda-bindings or the driver is missing, or the device cannot share memory.
        ArgumentError, ArgumentTypeError: no length, or no such device.
    """
    length = checked_length(nbytes)
    index = _cuda.device_index(device, "allocate")
    return allocated(cuda_driver(), length, index)


def allocated(driver: Driver, nbytes: int, index: int) -> DeviceBuffer:
    """`allocate()` by any driver."""
    return DeviceBuffer(driver, driver.create(checked_length(nbytes), index), nbytes, index)


def checked_length(nbytes: Any) -> int:
    """A length that memory can have.

    Raises:
        ArgumentTypeError, ArgumentError: it cannot.
    """
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise ArgumentTypeError(f"nbytes must be an integer, not {type(nbytes).__name__}", operation="allocate")
    if not 0 < int(nbytes) < 1 << 62:
        raise ArgumentError(f"nbytes must be at least 1, got {int(nbytes)}", operation="allocate")
    return int(nbytes)
