"""hwloc, loaded at run time: a live or recorded topology as XML text.

Only functions are called and their text is read, never hwloc's structures, so any library of this ABI serves.
Components that would start a GPU's driver are left out: looking must not create a context on a device.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_VERSION = re.compile(r'name="hwlocVersion" value="([^"]+)"')
LIBRARY = "libhwloc.so.15"
VARIABLE = "TE_HWLOC"  # another file to load

_KEEP_IMPORTANT = 3
_INCLUDE_DISALLOWED = 1
_BLACKLIST = 1
_INTRUSIVE = ("cuda", "nvml", "opencl", "rsmi", "levelzero", "gl")


class HwlocUnavailable(Exception):
    """hwloc cannot be loaded, or does not take the topology. The text says which and why."""


def load() -> tuple[ctypes.CDLL, str]:
    """The library and the version of its interface ("2.8.0").

    Raises:
        HwlocUnavailable: it is not installed, or not of this ABI.
    """
    name = os.environ.get(VARIABLE) or LIBRARY
    try:
        library = ctypes.CDLL(name, use_errno=True)
        library.hwloc_get_api_version.restype = ctypes.c_uint
        number = int(library.hwloc_get_api_version())
    except (OSError, AttributeError) as cause:
        raise HwlocUnavailable(f"{name} cannot be loaded ({cause})") from None
    if number >> 16 != 2:
        raise HwlocUnavailable(f"{name} has API version {number >> 16}.{number >> 8 & 0xFF}, 2 is needed")
    return library, f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"


def export(recorded: Path | None = None) -> tuple[str, str, bool]:
    """The topology of this machine, or of a recorded XML file.

    Returns:
        The XML text, hwloc's version, and whether it describes this machine (HWLOC_XMLFILE may name another).

    Raises:
        HwlocUnavailable: no hwloc, or it refuses; the text says why.
    """
    library, version = load()
    topology = ctypes.c_void_p()
    if library.hwloc_topology_init(ctypes.byref(topology)) != 0:
        raise HwlocUnavailable("hwloc_topology_init failed")
    try:
        if recorded is not None and library.hwloc_topology_set_xml(topology, os.fsencode(recorded)) != 0:
            raise HwlocUnavailable(f"hwloc {version} does not take {recorded}: {_reason()}")
        if hasattr(library, "hwloc_topology_set_components"):  # since 2.1
            for component in _INTRUSIVE:
                library.hwloc_topology_set_components(topology, ctypes.c_ulong(_BLACKLIST), component.encode())
        library.hwloc_topology_set_io_types_filter(topology, ctypes.c_int(_KEEP_IMPORTANT))
        library.hwloc_topology_set_flags(topology, ctypes.c_ulong(_INCLUDE_DISALLOWED))
        if library.hwloc_topology_load(topology) != 0:
            raise HwlocUnavailable(f"hwloc {version} cannot load {recorded or 'this machine'}: {_reason()}")
        this_machine = library.hwloc_topology_is_thissystem(topology) == 1
        text = _text(library, topology)
        exact = _VERSION.search(text) if recorded is None else None
        return text, exact.group(1) if exact else version, this_machine
    finally:
        library.hwloc_topology_destroy(topology)


def _text(library: ctypes.CDLL, topology: ctypes.c_void_p) -> str:
    buffer = ctypes.c_void_p()
    length = ctypes.c_int()
    if library.hwloc_topology_export_xmlbuffer(topology, ctypes.byref(buffer), ctypes.byref(length), ctypes.c_ulong(0)):
        raise HwlocUnavailable(f"hwloc_topology_export_xmlbuffer failed: {_reason()}")
    try:
        return ctypes.string_at(buffer, max(length.value - 1, 0)).decode("utf-8", "replace")
    finally:
        library.hwloc_free_xmlbuffer(topology, buffer)


def _reason() -> str:
    number = ctypes.get_errno()
    return os.strerror(number) if number else "no reason given"
