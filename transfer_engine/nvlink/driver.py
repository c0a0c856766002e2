"""The calls of CUDA's driver by which memory is made, shared and mapped (its virtual memory management).

Whatever else there is to say about mapping peers is above this: `Driver` is the line at which tests put memory of the
host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .. import _cuda
from ..errors import ConfigError, RegistrationError, TransportUnavailable

_FABRIC_BYTES = 64
_HANDLE_TYPES_OFFSET = (
    4  # of requestedHandleTypes in CUmemAllocationProp: a set of bits, which the bindings' enum lacks
)


@dataclass(frozen=True, slots=True)
class Physical:
    """Physical memory.

    Attributes:
        handle: the driver's.
        length: in bytes, a multiple of the granularity.
        fabric: whether it can be exported to other hosts.
        fabric_refusal: why it cannot; None: it can.
    """

    handle: Any
    length: int
    fabric: bool
    fabric_refusal: str | None


class Driver(Protocol):
    """What mapping peers needs of a device. Errors are typed already."""

    dlpack_device: int  # DLPack's number for the kind of memory
    array_interface: str  # the name of the attribute by which arrays share this kind of memory

    def create(self, nbytes: int, device: int) -> Physical:
        """Makes physical memory."""

    def release(self, handle: Any) -> None:
        """Lets go of it: it is freed once it is mapped nowhere and no descriptor of it is open."""

    def map(self, handle: Any, length: int, device: int) -> int:
        """Gives it an address which the device may read and write."""

    def unmap(self, pointer: int, length: int) -> None:
        """Takes the address away."""

    def zero(self, pointer: int, length: int, device: int) -> None:
        """Fills with zeros, and waits for that."""

    def export_descriptor(self, handle: Any) -> int:
        """A file descriptor for it, the caller's to close."""

    def import_descriptor(self, descriptor: int) -> Any:
        """The handle of what another process exported; the descriptor stays the caller's."""

    def export_fabric(self, handle: Any) -> bytes:
        """The same for other hosts of the domain."""

    def import_fabric(self, fabric: bytes) -> Any:
        """The inverse."""

    def identity(self, device: int) -> str:
        """The device, by a name that all processes give it."""

    def reaches(self, device: int, identity: str) -> bool:
        """Whether the device can access memory of that one. True, too, where this process does not see that one."""


class CudaDriver:
    """`Driver` for NVIDIA's GPUs.

    Raises:
        TransportUnavailable: cuda-bindings, the driver or a device is missing.
    """

    dlpack_device = 2
    array_interface = "__cuda_array_interface__"

    def __init__(self) -> None:
        self._driver = _cuda.driver("nvlink")

    def _call(self, name: str, *arguments: Any) -> Any:
        return _cuda.check(self._driver, name, *arguments)

    @contextlib.contextmanager
    def _on(self, device: int, error: Any, message: str, hint: str | None = None) -> Iterator[None]:
        with _cuda.failures(error, message, "nvlink", hint), _cuda.current(self._driver, device, "nvlink"):
            yield

    def create(self, nbytes: int, device: int) -> Physical:
        """Makes physical memory, for other hosts, too, where the platform has that."""
        supported = {
            name: _cuda.attribute(self._driver, device, name, "nvlink")
            for name in (
                "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
                "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
                "HANDLE_TYPE_FABRIC_SUPPORTED",
                "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
            )
        }
        if not supported["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"]:
            raise TransportUnavailable(
                f"cuda:{device} has no virtual memory management",
                operation="allocate",
                hint="memory cannot be shared with peers here; engine.register() takes ordinary memory",
            )
        if not supported["HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"]:
            raise TransportUnavailable(
                f"memory of cuda:{device} cannot be shared by file descriptors", operation="allocate", hint=_NO_SHARING
            )
        rdma = bool(supported["GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"])
        refusal = "the device has no fabric handles"
        if supported["HANDLE_TYPE_FABRIC_SUPPORTED"]:
            try:
                with _cuda.current(self._driver, device, "nvlink"):
                    handle, length = self._created(nbytes, device, rdma=rdma, fabric=True)
                return Physical(handle, length, fabric=True, fabric_refusal=None)
            except _cuda.CudaError as cause:
                if cause.status == "CUDA_ERROR_OUT_OF_MEMORY":
                    raise self._no_memory(nbytes, device, cause) from None
                refusal = f"{cause.message}: fabric handles need IMEX, with a channel in /dev/nvidia-caps-imex-channels"
        try:
            with _cuda.current(self._driver, device, "nvlink"):
                handle, length = self._created(nbytes, device, rdma=rdma, fabric=False)
        except _cuda.CudaError as cause:
            raise self._no_memory(nbytes, device, cause) from None
        return Physical(handle, length, fabric=False, fabric_refusal=refusal)

    @staticmethod
    def _no_memory(nbytes: int, device: int, cause: _cuda.CudaError) -> RegistrationError:
        return RegistrationError(
            f"cannot allocate {nbytes} bytes on cuda:{device}: {cause.message}",
            operation="allocate",
            status=cause.status,
            hint="allocate less, or free memory of the device (torch keeps what it freed: torch.cuda.empty_cache())",
        )

    def _created(self, nbytes: int, device: int, *, rdma: bool, fabric: bool) -> tuple[Any, int]:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        types = driver.CUmemAllocationHandleType
        properties.requestedHandleTypes = types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if fabric:
            both = int(types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) | int(types.CU_MEM_HANDLE_TYPE_FABRIC)
            ctypes.c_int.from_address(int(properties.getPtr()) + _HANDLE_TYPES_OFFSET).value = both
        properties.allocFlags.gpuDirectRDMACapable = int(rdma)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(self._call("cuMemGetAllocationGranularity", properties, least))
        length = -(-nbytes // granularity) * granularity
        return self._call("cuMemCreate", length, properties, 0), length

    def release(self, handle: Any) -> None:
        """Lets go of it."""
        with _cuda.failures(ConfigError, "cannot release memory", "nvlink"):
            self._call("cuMemRelease", handle)

    def map(self, handle: Any, length: int, device: int) -> int:
        """Gives it an address which the device may read and write."""
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        problem = f"{length} bytes cannot be mapped for cuda:{device}"
        with self._on(device, ConfigError, problem, _NO_ACCESS), contextlib.ExitStack() as undo:
            pointer = self._call("cuMemAddressReserve", length, 0, 0, 0)
            undo.callback(self._call, "cuMemAddressFree", pointer, length)
            self._call("cuMemMap", pointer, length, 0, handle, 0)
            undo.callback(self._call, "cuMemUnmap", pointer, length)
            self._call("cuMemSetAccess", pointer, length, [access], 1)
            undo.pop_all()
        return int(pointer)

    def unmap(self, pointer: int, length: int) -> None:
        """Takes the address away."""
        with _cuda.failures(ConfigError, f"cannot unmap {length} bytes at {pointer:#x}", "nvlink", _EARLIER):
            self._call("cuMemUnmap", pointer, length)
            self._call("cuMemAddressFree", pointer, length)

    def zero(self, pointer: int, length: int, device: int) -> None:
        """Fills with zeros in a stream of its own, so that a capture elsewhere is not disturbed."""
        with self._on(device, ConfigError, f"cannot clear {length} bytes at {pointer:#x}", _EARLIER):
            stream = self._call("cuStreamCreate", int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            try:
                self._call("cuMemsetD8Async", pointer, 0, length, stream)
                self._call("cuStreamSynchronize", stream)
            finally:
                self._call("cuStreamDestroy", stream)

    def export_descriptor(self, handle: Any) -> int:
        """A file descriptor for it."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with _cuda.failures(RegistrationError, "memory cannot be exported as a file descriptor", "nvlink", _NO_SHARING):
            return int(self._call("cuMemExportToShareableHandle", handle, kind, 0))

    def import_descriptor(self, descriptor: int) -> Any:
        """The handle of what another process exported."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        with _cuda.failures(ConfigError, "a peer's file descriptor cannot be imported", "nvlink", _NO_ACCESS):
            return self._call("cuMemImportFromShareableHandle", descriptor, kind)

    def export_fabric(self, handle: Any) -> bytes:
        """A fabric handle for it."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        with _cuda.failures(RegistrationError, "memory cannot be exported as a fabric handle", "nvlink", _NO_SHARING):
            return bytes(self._call("cuMemExportToShareableHandle", handle, kind, 0).data)

    def import_fabric(self, fabric: bytes) -> Any:
        """The handle of what another host exported."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        raw = ctypes.create_string_buffer(fabric, _FABRIC_BYTES)
        with _cuda.failures(ConfigError, "a peer's fabric handle cannot be imported", "nvlink", _NO_ACCESS):
            return self._call("cuMemImportFromShareableHandle", ctypes.addressof(raw), kind)

    def identity(self, device: int) -> str:
        """The device's UUID."""
        with _cuda.failures(TransportUnavailable, f"cuda:{device} has no UUID", "nvlink"):
            uuid = self._call("cuDeviceGetUuid", _cuda.handle_of(self._driver, device, "nvlink"))
        return bytes(uuid.bytes).hex()

    def reaches(self, device: int, identity: str) -> bool:
        """Whether the device can access memory of that one."""
        with _cuda.failures(TransportUnavailable, "the devices cannot be listed", "nvlink"):
            for other in range(int(self._call("cuDeviceGetCount"))):
                if self.identity(other) == identity:
                    pair = [_cuda.handle_of(self._driver, index, "nvlink") for index in (device, other)]
                    return other == device or bool(self._call("cuDeviceCanAccessPeer", *pair))
        return True


@functools.cache
def cuda_driver() -> CudaDriver:
    """The one of this process."""
    return CudaDriver()


_NO_SHARING = "in a container, the driver must allow sharing; memory must come from te.nvlink.allocate()"
_NO_ACCESS = (
    "the GPUs must reach each other (`nvidia-smi topo -m`), and the containers of all ranks must see the same GPUs"
)
_EARLIER = "an earlier kernel that failed shows here, too"
