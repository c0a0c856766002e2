"""Plain descriptions of operations: paged sides, the entries of a batch, what can be prepared."""

from __future__ import annotations

import operator
import sys
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from .descriptors import CounterDescriptor, RegionDescriptor, RemoteSlice
from .errors import ArgumentError, ArgumentTypeError, RangeError
from .memory import Buffer, Region, RegionSlice

if TYPE_CHECKING:
    import numpy

    from .targets import Target

_MAX_BYTES = 1 << 63


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One side of a paged write: page i is `page_bytes` long at `offset_bytes + indices[i] * stride_bytes`.

    Attributes:
        region: the Region (source side) or RegionDescriptor (target side), as a whole.
        indices: one-dimensional; int32 or int64 arrays and tensors are used as they stand, without a copy, and read
            when the write is called. Strided ones are copied then. Other integers, lists and ranges are converted
            when this object is made. Empty ones may be of any type.
        page_bytes: length of every page, at least 1.
        stride_bytes: distance from index to index; `page_bytes` if None.
        offset_bytes: where index 0 lies in the region.

    Raises:
        ArgumentTypeError: indices that are no safe integers (float, bool, uint64), or a region of another type.
        ArgumentError: indices of more or less than one dimension; a page length or stride below 1.
        RangeError: a negative offset. The pages themselves are checked against the region when the write is called.
    """

    region: Region | RegionDescriptor
    indices: Any
    page_bytes: int
    stride_bytes: int | None = None
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        region: object = self.region
        if not isinstance(region, (Region, RegionDescriptor)):
            hint = "pass buffer.region" if isinstance(region, Buffer) else None
            if isinstance(region, (RegionSlice, RemoteSlice)):
                hint = "pass the whole region, and offset_bytes"
            raise ArgumentTypeError(
                f"pages lie in a Region or a RegionDescriptor, not in {type(region).__name__}",
                operation="Pages",
                hint=hint,
            )
        stride = self.page_bytes if self.stride_bytes is None else self.stride_bytes
        for name, value, low in (
            ("page_bytes", self.page_bytes, 1),
            ("stride_bytes", stride, 1),
            ("offset_bytes", self.offset_bytes, 0),
        ):
            object.__setattr__(self, name, _bounded(name, value, low))
        object.__setattr__(self, "indices", integers(self.indices, "indices", "Pages"))


def _bounded(name: str, value: Any, low: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} must be an integer, not {type(value).__name__}", operation="Pages") from None
    if not low <= number < _MAX_BYTES:
        error = RangeError if name == "offset_bytes" else ArgumentError
        raise error(f"{name} must be from {low} to 2^63 - 1, got {number}", operation="Pages")
    return number


def integers(values: Any, name: str, operation: str) -> numpy.ndarray[Any, Any]:
    """The values as a one-dimensional int32 or int64 array, without a copy where they are one already.

    Args:
        values: an array, tensor or sequence.
        name: what they are called in errors, in the plural.
        operation: the call that they are for.

    Raises:
        ArgumentTypeError: no integers that int64 holds safely.
        ArgumentError: not of one dimension.
    """
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ArgumentTypeError(f"{name} on {values.device}: pass {name} in host memory", operation=operation)
        values = values.detach().numpy()
    elif isinstance(values, range):
        values = np.arange(values.start, values.stop, values.step, dtype=np.int64)
    elif not isinstance(values, np.ndarray):
        try:
            len(values)  # refuses scalars
            values = np.asarray(values)
        except (TypeError, ValueError, OverflowError) as cause:
            raise ArgumentTypeError(f"{name} are no array of integers: {cause}", operation=operation) from None
    array: numpy.ndarray[Any, Any] = values
    if array.ndim != 1:
        raise ArgumentError(f"{name} must have one dimension, got shape {array.shape}", operation=operation)
    if not array.size:  # numpy makes float64 of nothing
        return np.empty(0, np.int64)
    dtype = array.dtype
    if dtype.kind not in "iu" or not np.can_cast(dtype, np.int64, "safe"):
        raise ArgumentTypeError(
            f"{name} of dtype {dtype} do not convert to int64 safely",
            operation=operation,
            hint=f"use int32 or int64 {name}",
        )
    if dtype.kind == "i" and dtype.itemsize in (4, 8) and dtype.isnative:
        return array
    return array.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One contiguous write, in a batch or to prepare: the arguments of `engine.write`."""

    source: Region | RegionSlice
    target: RegionDescriptor | RemoteSlice
    notify: CounterDescriptor | None = None
    flush: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PageWrite:
    """One paged write, in a batch or to prepare: the arguments of `engine.write_pages`."""

    source: Pages
    target: Pages
    notify: CounterDescriptor | None = None
    flush: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """A scatter to prepare: the arguments of `target.scatter`."""

    target: Target
    region: Region | RegionSlice
    _: KW_ONLY
    src_offsets: Any = None
    lengths: Any
    dst_offsets: Any = None
    flush: bool = False
    shard: str | None = None
