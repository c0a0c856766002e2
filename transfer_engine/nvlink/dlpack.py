"""Memory as a DLPack capsule: one dimension of bytes, on the device that we say.

(By __cuda_array_interface__ a consumer asks the driver for the device. Of a peer's memory that is the peer's device,
from where the mapping cannot be reached, and torch would copy it there.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_NAME = b"dltensor"  # a consumer renames the capsule to "used_dltensor" and calls the deleter itself
_UNSIGNED = 1


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_alive: dict[int, tuple[_Managed, Any, Callable[[], None]]] = {}  # by address; until the consumer's last reference

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_valid = ctypes.pythonapi.PyCapsule_IsValid
_valid.restype, _valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)


def capsule(pointer: int, nbytes: int, device: tuple[int, int], dropped: Callable[[], None]) -> Any:
    """A capsule named "dltensor"; `dropped()` is called once when nobody uses the memory any more."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    tensor = _Tensor(
        pointer,
        _Device(*device),
        1,
        _Type(_UNSIGNED, 8, 1),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        None,
        0,
    )
    managed = _Managed(tensor, None, _deleter)
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape, dropped)
    return _new(address, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))


# What these use is bound to them: tensors may be dropped while the interpreter ends and modules are emptied.
def _delete(address: int, alive: Any = _alive) -> None:
    entry = alive.pop(address, None)
    if entry is not None:
        entry[2]()


def _destroy(
    capsule_address: int, valid: Any = _valid, pointer: Any = _pointer, name: bytes = _NAME, delete: Any = _delete
) -> None:
    """Of a capsule that nobody consumed."""
    if valid(capsule_address, name):
        delete(pointer(capsule_address, name))


_deleter = _Deleter(_delete)
_destructor = _Deleter(_destroy)  # takes the capsule as an address: its last reference is gone already
for _immortal in (_deleter, _destructor):  # C++ may call them after this module is gone
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))
