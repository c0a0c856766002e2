"""Memory that takes part in transfers: registered regions, ranges of them, and buffers that the engine allocates."""

from __future__ import annotations

import mmap
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from . import _native
from ._handle import CLOSED, EngineHandle
from ._native import ffi, lib, thread_state
from .descriptors import RegionDescriptor, byte_range, device_text
from .errors import (
    ArgumentError,
    ArgumentTypeError,
    RangeError,
    RegionClosed,
    RegistrationError,
    TransferTimeout,
    refuse_pickle,
)
from .spans import Span, parse_device, span_of

_REACHES = {
    lib.TE_REACH_HOST: "host",
    lib.TE_REACH_DMABUF: "dma-buf",
    lib.TE_REACH_PEER_MEMORY: "peer memory",
    lib.TE_REACH_STAGED: "staged",
}

if TYPE_CHECKING:
    import numpy
    import numpy.typing


class Region:
    """Registered memory. Made by `engine.register()`; a context manager.

    The registration, and a strong reference to the memory's owner, last until `close()` or the engine's end, also when
    the Region object itself is dropped: peers may still hold its descriptor.

    `region[start:stop]` is a range in bytes; negative offsets and ranges past the end are refused, not wrapped or
    clamped.
    """

    __slots__ = ("_closed", "_descriptor", "_handle", "_id", "_length", "_released", "_span")

    def __init__(self, handle: EngineHandle, span: Span, staging: bool = False) -> None:
        handle.ensure_open("register")
        served = handle.device
        if span.device_kind == lib.TE_DEVICE_CUDA and served is not None and span.device_index != served:
            raise RegistrationError(
                f"the memory is on cuda:{span.device_index}, this engine serves cuda:{served}",
                operation="register",
                hint=f"open an engine with device='cuda:{span.device_index}' for it, or one with device=None for all",
            )
        out = ffi.new("te_handle *")
        error = thread_state.error
        address = ffi.cast("void *", span.pointer)
        if staging and span.device_kind == lib.TE_DEVICE_CUDA:
            status = lib.te_region_register_staged(
                handle.pointer, address, span.length_bytes, span.device_index, out, error
            )
        else:
            status = lib.te_region_register(
                handle.pointer, address, span.length_bytes, span.device_kind, span.device_index, out, error
            )
        if status != _native.OK:
            raise handle.failure("register", status, error)
        self._handle = handle
        self._id = int(out[0])
        self._length = span.length_bytes
        self._span = span
        self._descriptor: RegionDescriptor | None = None
        self._closed = False  # refused from now on
        self._released = False  # and nothing lands in it any more
        handle.owners[self._id] = span.owner

    @property
    def descriptor(self) -> RegionDescriptor:
        """What peers need to write into this region.

        Raises:
            RegistrationError: the memory is read-only, so it can only be a source.
            RegionClosed: the region was closed.
        """
        if self._descriptor is None:
            if self._span.read_only:
                raise RegistrationError(
                    "read-only: cannot be a target", operation="descriptor", hint="register writable memory for targets"
                )
            self._ensure_usable("descriptor")
            out = ffi.new("te_region_descriptor *")
            error = thread_state.error
            status = lib.te_region_describe(self._handle.pointer, self._id, out, error)
            if status != _native.OK:
                raise self._handle.failure("descriptor", status, error)
            self._descriptor = RegionDescriptor.from_native(out)
        return self._descriptor

    @property
    def length_bytes(self) -> int:
        """The region's length."""
        return self._length

    @property
    def device(self) -> str:
        """The device: "cpu" or "cuda:<index>"."""
        return device_text(self._span.device_kind, self._span.device_index)

    @property
    def reach(self) -> str:
        """How the NICs get at it.

        "host"; GPU memory: "dma-buf", "peer memory" (by its address, with the driver module nvidia-peermem; slower to
        register, and only where there is no dma-buf export), or "staged": not at all, it goes through pinned slots.
        """
        self._ensure_usable("reach")
        out = ffi.new("te_region_info *")
        error = thread_state.error
        status = lib.te_region_info_get(self._handle.pointer, self._id, out, error)
        if status != _native.OK:
            raise self._handle.failure("reach", status, error)
        return _REACHES[out.reach]

    @property
    def read_only(self) -> bool:
        """True: the region can be a source, not a target."""
        return self._span.read_only

    @property
    def closed(self) -> bool:
        """True once close() was called, on the region or its engine."""
        return self._closed or self._handle.state == CLOSED

    def __getitem__(self, key: slice) -> RegionSlice:
        # The common case, without another call.
        if type(key) is slice and key.step is None:  # type: ignore[redundant-expr]
            start, stop = key.start, key.stop
            if type(start) is int and type(stop) is int and 0 <= start <= stop <= self._length:
                return RegionSlice(self, start, stop - start)
        start, stop = byte_range(key, self._length)
        return RegionSlice(self, start, stop - start)

    def of(self, view: Any) -> RegionSlice:
        """The slice that a contiguous view of the registered memory covers.

        Raises:
            RangeError: the view is not wholly inside this region.
            RegistrationError: the view is not contiguous.
        """
        span = span_of(view)
        offset = span.pointer - self._span.pointer
        if span.length_bytes == 0 and (span.pointer == 0 or not 0 <= offset <= self._length):
            offset = 0  # empty views have no meaningful address
        # Addresses of host and device memory never coincide (unified addressing), so they say where the view lies.
        if not 0 <= offset <= offset + span.length_bytes <= self._length:
            raise RangeError(
                f"the view of {span.length_bytes} bytes at {span.pointer:#x} is not inside {self!r}", operation="of"
            )
        return RegionSlice(self, offset, span.length_bytes)

    def close(self, timeout_s: float | None = None) -> None:
        """Revokes the region: new use fails at once, here and at all peers; afterwards nothing lands in it any more.

        Idempotent. Waits until every peer that used the region has confirmed or was lost.

        Raises:
            TransferTimeout: a peer has not confirmed in time (default: the engine's). The region stays refused and its
                memory referenced; call again.
        """
        self._closed = True
        handle = self._handle
        handle.ensure_native("close")
        if self._released or handle.state == CLOSED:
            return
        timeout_ns = _native.nanoseconds(timeout_s)
        deadline = time.monotonic_ns() + (handle.default_timeout_ns if timeout_ns < 0 else timeout_ns)
        while True:
            left = max(deadline - time.monotonic_ns(), 0)
            error = thread_state.error
            status = lib.te_region_close(handle.pointer, self._id, min(left, _native.SLICE_NS), error)
            if status == _native.OK:
                self._released = True
                handle.owners.pop(self._id, None)
                return
            if (
                status == _native.CLOSED
            ):  # the engine is closing, which lets go of the memory when nothing lands any more
                return
            if status != _native.TIMEOUT or left == 0:
                raise handle.failure("close region", status, error)

    def _ensure_usable(self, operation: str) -> None:
        self._handle.ensure_open(operation)
        if self._closed:
            raise closed_here(self, operation)

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TransferTimeout:
            if kind is None:  # do not hide what went wrong inside
                raise

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send region.descriptor: peers write by it")

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True  # also where the length is zero

    def __repr__(self) -> str:
        kind = "read-only " if self._span.read_only else ""
        state = "closed " if self._closed else ""
        return f"<te.Region {self._id}: {state}{kind}{self._length} bytes at {self._span.pointer:#x} on {self.device}>"


def closed_here(region: Region, operation: str) -> RegionClosed:
    """The error for a region that this process closed itself."""
    hint = "this process closed it: register the memory again, or close the region later"
    return RegionClosed(f"{region!r} was closed on this side", operation=operation, hint=hint)


class RegionSlice:
    """`length_bytes` bytes from `offset_bytes` of a region of this process; made by slicing a Region."""

    __slots__ = ("length_bytes", "offset_bytes", "region")

    def __init__(self, region: Region, offset_bytes: int, length_bytes: int) -> None:
        self.region = region
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes

    def __getitem__(self, key: slice) -> RegionSlice:
        start, stop = byte_range(key, self.length_bytes)
        return RegionSlice(self.region, self.offset_bytes + start, stop - start)

    def __len__(self) -> int:
        return self.length_bytes

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{self.region!r}[{self.offset_bytes}:{self.offset_bytes + self.length_bytes}]"


def _plain(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as cause:
        raise RegistrationError(
            f"cannot map {nbytes} bytes: {cause}", operation="allocate", hint="allocate less, or free memory"
        ) from None


def _mapped(handle: EngineHandle, device: int, nbytes: int) -> Any:
    """Pinned memory of the core, as a buffer: freed with the last view of it."""
    handle.ensure_open("allocate")
    if nbytes >= 1 << 63:
        raise RegistrationError(f"cannot pin {nbytes} bytes", operation="allocate", hint="allocate less")
    out = ffi.new("void **")
    error = thread_state.error
    status = lib.te_mapped_allocate(device, nbytes, out, error)
    if status != _native.OK:
        raise handle.failure("allocate", status, error)
    return ffi.buffer(ffi.gc(out[0], lib.te_mapped_free, nbytes), nbytes)


class Buffer:
    """Page-aligned, zeroed memory with its registration. Made by `engine.allocate()`; a context manager.

    `buffer.region` is what takes part in transfers; `buffer[start:stop]` is short for `buffer.region[start:stop]`.
    With a GPU as its device it is pinned host memory that the GPU reaches at the same address: `device_pointer`, or
    anything that takes `__cuda_array_interface__`.
    """

    __slots__ = ("_device", "_memory", "region")

    region: Region

    def __init__(self, handle: EngineHandle, nbytes: int, device: Any) -> None:
        if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
            raise ArgumentTypeError(f"nbytes must be an integer, not {type(nbytes).__name__}", operation="allocate")
        nbytes = int(nbytes)
        if nbytes < 0:
            raise ArgumentError(f"nbytes must not be negative, got {nbytes}", operation="allocate")
        kind, index = parse_device(device)
        self._device: int | None = None if kind == lib.TE_DEVICE_HOST else index
        if self._device is None:
            self._memory: Any = _plain(nbytes)
        else:
            self._memory = _mapped(handle, self._device, max(nbytes, 1))
        self.region = Region(handle, span_of(memoryview(self._memory)[:nbytes]))

    @property
    def device(self) -> str:
        """Whose memory it is beside the host's: "cuda:<index>", else "cpu"."""
        return "cpu" if self._device is None else device_text(lib.TE_DEVICE_CUDA, self._device)

    @property
    def device_pointer(self) -> int:
        """The address at which kernels see it.

        Raises:
            ArgumentError: it was allocated without a GPU.
        """
        if self._device is None:
            raise ArgumentError(
                "memory of the host alone has no device pointer",
                operation="device_pointer",
                hint='engine.allocate(nbytes, device="cuda:0")',
            )
        return self.region._span.pointer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._device is None:
            raise AttributeError("__cuda_array_interface__: allocated without a GPU")  # so that hasattr says no
        return {
            "shape": (len(self.region),),
            "typestr": "|u1",
            "data": (self.region._span.pointer if len(self.region) else 0, False),
            "strides": None,
            "version": 3,
        }

    def as_numpy(self, dtype: numpy.typing.DTypeLike = "uint8", shape: Any = None) -> numpy.ndarray[Any, Any]:
        """The memory as an array that shares it: one-dimensional, or of `shape`.

        Raises:
            ArgumentError: dtype or shape do not fit the number of bytes.
            ArgumentTypeError: no dtype or shape at all.
        """
        import numpy as np

        try:
            array = np.frombuffer(self._view(), dtype=dtype) if len(self.region) else np.empty(0, dtype=dtype)
            return array if shape is None else array.reshape(shape)
        except ValueError as cause:
            raise ArgumentError(f"{len(self.region)} bytes: {cause}", operation="as_numpy") from None
        except TypeError as cause:
            raise ArgumentTypeError(f"dtype {dtype!r}, shape {shape!r}: {cause}", operation="as_numpy") from None

    def as_torch(self, dtype: Any = None, shape: Any = None) -> Any:
        """The memory as a torch tensor that shares it: one-dimensional uint8 unless told otherwise.

        With a GPU as its device it is a tensor of that GPU, for kernels; `as_numpy` gives the host's view.

        Raises:
            ImportError: torch is not installed.
            RegistrationError: memory of a GPU, and this torch cannot use it (built for the CPU only).
            ArgumentError: dtype or shape do not fit the number of bytes.
            ArgumentTypeError: no dtype or shape at all.
        """
        import torch

        if self._device is not None and not torch.cuda.is_available():
            built = torch.version.cuda or "the CPU only"
            raise RegistrationError(
                f"this torch (built for {built}) cannot use {self.device}",
                operation="as_torch",
                hint="install a torch with CUDA, or use as_numpy() and device_pointer",
            )
        try:
            dtype = torch.uint8 if dtype is None else dtype
            if not len(self.region):
                tensor = torch.empty(0, dtype=dtype, device=self.device)
            elif self._device is None:
                tensor = torch.frombuffer(self._view(), dtype=dtype)
            else:
                tensor = torch.as_tensor(self, device=self.device).view(dtype)
            return tensor if shape is None else tensor.reshape(shape)
        except (ValueError, RuntimeError) as cause:
            raise ArgumentError(f"{len(self.region)} bytes: {cause}", operation="as_torch") from None
        except TypeError as cause:
            raise ArgumentTypeError(f"dtype {dtype!r}, shape {shape!r}: {cause}", operation="as_torch") from None

    def __getitem__(self, key: slice) -> RegionSlice:
        return self.region[key]

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "send buffer.region.descriptor: peers write by it")

    def _view(self) -> memoryview:
        return memoryview(self._memory)[: len(self.region)]

    def close(self, timeout_s: float | None = None) -> None:
        """Closes the region; the memory goes with the last array that shares it. Raises as `Region.close` does."""
        self.region.close(timeout_s)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.region.__exit__(kind, error, trace)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.region)

    def __repr__(self) -> str:
        return f"<te.Buffer of {self.region!r}>"
