"""Where an object with a DLPack interface keeps its bytes. Structures as in dlpack.h, 0.x and 1.x."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Exported:
    """`length_bytes` at `pointer`; `capsule` keeps them alive."""

    pointer: int
    length_bytes: int
    contiguous: bool
    capsule: object


def export(memory: Any) -> Exported:
    """Takes the memory's capsule without consuming it. No stream is synchronised: that is the caller's business.

    Raises:
        BufferError, RuntimeError, TypeError, ValueError: what the object, or CPython, says of it.
    """
    try:
        capsule = memory.__dlpack__(stream=-1)
    except TypeError:  # before the array API standard
        capsule = memory.__dlpack__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(pointer_of(capsule, b"dltensor"))
    shape = tensor.shape[: tensor.ndim]
    items = 1
    for extent in shape:
        items *= extent
    length = items * ((tensor.bits * tensor.lanes + 7) // 8)
    strides = tensor.strides[: tensor.ndim] if tensor.strides else None
    contiguous = strides is None or items == 0 or is_contiguous(shape, strides)
    return Exported((tensor.data or 0) + tensor.byte_offset, length, contiguous, capsule)


def is_contiguous(shape: list[int], strides: list[int]) -> bool:
    """Do strides, in items, run over the shape without holes? Dimensions in any order; extents of one do not matter."""
    expected = 1
    for stride, extent in sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        if stride != expected:
            return False
        expected *= extent
    return True
