"""Looks that load foreign libraries, each in a process of its own: `python .../doctor/child.py LOOK [ARGUMENT]`.

The last line of standard output is the answer, one JSON object. Runs as a script, so it imports nothing from beside it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from typing import Any

# --- transports -----------------------------------------------------------------------------------------------------


def probe(transport: str) -> dict[str, Any]:
    """What a transport would use here."""
    import transfer_engine as te  # only here: the other looks start faster without it

    try:
        return dict(te.probe(transport))
    except te.TransferEngineError as cause:
        return {"unavailable": cause.message}


def engine(transport: str) -> dict[str, Any]:
    """Opens an engine with the settings of the environment and closes it; "" is the transport that it would choose."""
    import transfer_engine as te

    try:
        with te.Engine(transport or None) as opened:
            return {"transport": opened.transport, "nics": list(opened.nics), "core": opened.describe()["core"]}
    except te.TransportUnavailable as cause:
        return {"unavailable": cause.message}
    except te.TransferEngineError as cause:
        return {"refused": cause.message, "hint": cause.hint}


# --- libfabric: only what has not moved since 1.0 is read -----------------------------------------------------------


class _FabricAttributes(ctypes.Structure):
    _fields_ = (("fabric", ctypes.c_void_p), ("name", ctypes.c_char_p), ("provider", ctypes.c_char_p))


class _DomainAttributes(ctypes.Structure):
    _fields_ = (("domain", ctypes.c_void_p), ("name", ctypes.c_char_p))


class _Info(ctypes.Structure):
    pass


_Info._fields_ = (
    ("next", ctypes.POINTER(_Info)),
    ("caps", ctypes.c_uint64),
    ("mode", ctypes.c_uint64),
    ("address_format", ctypes.c_uint32),
    ("source_length", ctypes.c_size_t),
    ("target_length", ctypes.c_size_t),
    ("source", ctypes.c_void_p),
    ("target", ctypes.c_void_p),
    ("handle", ctypes.c_void_p),
    ("transmit", ctypes.c_void_p),
    ("receive", ctypes.c_void_p),
    ("endpoint", ctypes.c_void_p),
    ("domain", ctypes.POINTER(_DomainAttributes)),
    ("fabric", ctypes.POINTER(_FabricAttributes)),
)


def libfabric(_argument: str) -> dict[str, Any]:
    """Its version, and what each provider offers: {"version", "file", "providers": {name: [domain, ...]}}."""
    name = os.environ.get("TE_LIBFABRIC") or "libfabric.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as cause:
        return {"missing": str(cause)}
    library.fi_version.restype = ctypes.c_uint32
    number = int(library.fi_version())
    found = ctypes.POINTER(_Info)()
    library.fi_getinfo.argtypes = [ctypes.c_uint32, *(ctypes.c_void_p,) * 4, ctypes.POINTER(ctypes.POINTER(_Info))]
    status = library.fi_getinfo(number, None, None, 0, None, ctypes.byref(found))
    providers: dict[str, list[str]] = {}
    entry = found
    while status == 0 and not _is_null(entry):
        info = entry.contents
        provider = _text(info.fabric.contents.provider) if info.fabric else "?"
        domain = _text(info.domain.contents.name) if info.domain else "?"
        domains = providers.setdefault(provider, [])
        if domain not in domains:
            domains.append(domain)
        entry = info.next
    library.fi_tostr.restype = ctypes.c_char_p
    exact = _text(library.fi_tostr(b"", 18))  # FI_TYPE_VERSION
    version = exact if exact[:1].isdigit() else f"{number >> 16}.{number & 0xFFFF}"
    return {"version": version, "file": name, "providers": providers}


def _is_null(pointer: Any) -> bool:
    return not pointer


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


# --- CUDA: no context is made ---------------------------------------------------------------------------------------

_ATTRIBUTES = {
    "gpudirect_rdma": 116,
    "flush_options": 117,
    "write_ordering": 118,
    "dma_buf": 124,
    "fabric_handles": 128,
}


def cuda(_argument: str) -> dict[str, Any]:
    """The driver's version and its devices, as far as it says so without a context on any of them."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as cause:
        return {"missing": str(cause)}
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    answer: dict[str, Any] = {"version": f"{version.value // 1000}.{version.value % 1000 // 10}", "devices": []}
    status = library.cuInit(0)
    if status != 0:
        reason = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(reason))
        answer["failed"] = f"cuInit: {_text(reason.value) or 'error'} ({status})"
        return answer
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device = ctypes.c_int()
        name = ctypes.create_string_buffer(128)
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(name, len(name), device)
        entry: dict[str, Any] = {"index": index, "name": _text(name.value)}
        for label, attribute in _ATTRIBUTES.items():
            value = ctypes.c_int()
            if library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0:
                entry[label] = value.value
        answer["devices"].append(entry)
    return answer


# --- process_vm_readv, as the shm provider's large writes need it ---------------------------------------------------


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_from(argument: str) -> dict[str, Any]:
    """Reads 8 bytes of another process: "PID:ADDRESS"."""
    pid, address = map(int, argument.split(":"))
    here = ctypes.create_string_buffer(8)
    library = ctypes.CDLL(None, use_errno=True)
    mine = _Vector(ctypes.cast(here, ctypes.c_void_p), 8)
    theirs = _Vector(address, 8)
    got = library.process_vm_readv(
        pid, ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    return {"read": here.raw.hex()} if got == 8 else {"errno": ctypes.get_errno()}


LOOKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "cuda": cuda,
    "engine": engine,
    "libfabric": libfabric,
    "probe": probe,
    "read_from": read_from,
}


def main() -> None:
    """The answer is the last line, whatever a library wrote before."""
    look, argument = [*sys.argv[1:], "", ""][:2]
    answer = LOOKS[look](argument)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the libraries' destructors have nothing to add


if __name__ == "__main__":
    main()
