"""What peers are given: descriptors of regions and counters, and byte ranges of remote regions."""

from __future__ import annotations

import operator
from typing import Any

from . import _native
from ._native import ffi, lib
from .address import Address
from .errors import ArgumentTypeError, RangeError


def byte_range(key: object, length: int) -> tuple[int, int]:
    """Start and stop of `x[start:stop]` over `length` bytes.

    Stricter than a Python slice, since a wrong range would become wrong bytes: negative offsets do not count from the
    end, and nothing is clamped.

    Raises:
        RangeError: not 0 <= start <= stop <= length, or a step other than 1.
        ArgumentTypeError: not a slice, or bounds that are no integers.
    """
    if type(key) is not slice:
        raise ArgumentTypeError(f"regions are sliced in bytes, x[start:stop], not with {type(key).__name__}")
    start, stop = key.start, key.stop
    if type(start) is not int:
        start = 0 if start is None else _as_int(start)
    if type(stop) is not int:
        stop = length if stop is None else _as_int(stop)
    if key.step is not None and key.step != 1:
        raise RangeError(
            f"[{start}:{stop}:{key.step}]: a byte range has no step", hint="use te.Pages for strided access"
        )
    if 0 <= start <= stop <= length:
        return start, stop
    raise RangeError(f"[{start}:{stop}] is not within 0 <= start <= stop <= {length}")


def _as_int(value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"byte offsets are integers, not {type(value).__name__}") from None


def device_text(kind: int, index: int) -> str:
    """The name of a device, as users write it."""
    return f"cuda:{index}" if kind == lib.TE_DEVICE_CUDA else "cpu"


class RegionDescriptor:
    """A region as its peers see it. Immutable; compares, hashes and pickles by its bytes.

    `descriptor[start:stop]` is a range in bytes; negative offsets and ranges past the end are refused, not wrapped or
    clamped.
    """

    __slots__ = ("_bytes", "_length", "_native")

    def __init__(self, data: bytes) -> None:
        self._bytes = _native.foreign_bytes(data, "a region descriptor")
        self._native = _native.decode(
            lib.te_region_descriptor_decode, "te_region_descriptor", self._bytes, "RegionDescriptor"
        )
        self._length = int(self._native.length)

    @classmethod
    def from_bytes(cls, data: bytes) -> RegionDescriptor:
        """The inverse of `bytes(descriptor)`.

        Raises:
            DescriptorError: the bytes are foreign, truncated or damaged.
        """
        return cls(data)

    @classmethod
    def from_native(cls, native: Any) -> RegionDescriptor:
        """Of a te_region_descriptor of the core."""
        return cls(_native.encode(lib.te_region_descriptor_encode, native, "RegionDescriptor"))

    @property
    def address(self) -> Address:
        """The engine that owns the region."""
        return Address.from_native(ffi.addressof(self._native, "address"))

    @property
    def serial(self) -> int:
        """Never reused by the owner."""
        return int(self._native.serial)

    @property
    def length_bytes(self) -> int:
        """The region's length."""
        return self._length

    @property
    def device(self) -> str:
        """The device: "cpu" or "cuda:<index>", as the owner numbers its devices."""
        return device_text(self._native.device_kind, self._native.device_index)

    def __getitem__(self, key: slice) -> RemoteSlice:
        # The common case, without another call.
        if type(key) is slice and key.step is None:  # type: ignore[redundant-expr]
            start, stop = key.start, key.stop
            if type(start) is int and type(stop) is int and 0 <= start <= stop <= self._length:
                return RemoteSlice(self, start, stop - start)
        start, stop = byte_range(key, self._length)
        return RemoteSlice(self, start, stop - start)

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:
        return True  # also where the length is zero

    def __bytes__(self) -> bytes:
        return self._bytes

    def __repr__(self) -> str:
        return f"<te.RegionDescriptor {self.serial}: {self._length} bytes on {self.device} of {self.address!r}>"

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, RegionDescriptor) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return RegionDescriptor, (self._bytes,)


class RemoteSlice:
    """`length_bytes` bytes from `offset_bytes` of a peer's region; made by slicing a RegionDescriptor."""

    __slots__ = ("descriptor", "length_bytes", "offset_bytes")

    def __init__(self, descriptor: RegionDescriptor, offset_bytes: int, length_bytes: int) -> None:
        self.descriptor = descriptor
        self.offset_bytes = offset_bytes
        self.length_bytes = length_bytes

    def __getitem__(self, key: slice) -> RemoteSlice:
        start, stop = byte_range(key, self.length_bytes)
        return RemoteSlice(self.descriptor, self.offset_bytes + start, stop - start)

    def __len__(self) -> int:
        return self.length_bytes

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{self.descriptor!r}[{self.offset_bytes}:{self.offset_bytes + self.length_bytes}]"


class CounterDescriptor:
    """A counter as its peers name it. Immutable; compares, hashes and pickles by its bytes."""

    __slots__ = ("_bytes", "_native")

    def __init__(self, data: bytes) -> None:
        self._bytes = _native.foreign_bytes(data, "a counter descriptor")
        self._native = _native.decode(
            lib.te_counter_descriptor_decode, "te_counter_descriptor", self._bytes, "CounterDescriptor"
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> CounterDescriptor:
        """The inverse of `bytes(descriptor)`.

        Raises:
            DescriptorError: the bytes are foreign, truncated or damaged.
        """
        return cls(data)

    @classmethod
    def from_native(cls, native: Any) -> CounterDescriptor:
        """Of a te_counter_descriptor of the core."""
        return cls(_native.encode(lib.te_counter_descriptor_encode, native, "CounterDescriptor"))

    @property
    def address(self) -> Address:
        """The engine that owns the counter."""
        return Address.from_native(ffi.addressof(self._native, "address"))

    @property
    def serial(self) -> int:
        """Never reused by the owner."""
        return int(self._native.serial)

    def __bytes__(self) -> bytes:
        return self._bytes

    def __repr__(self) -> str:
        return f"<te.CounterDescriptor {self.serial} of {self.address!r}>"

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, CounterDescriptor) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return CounterDescriptor, (self._bytes,)
