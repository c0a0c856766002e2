"""Which transports work on this machine."""

from __future__ import annotations

from . import _native
from ._native import ffi, lib
from .errors import TransportUnavailable

PREFERENCE = ("efa", "cx7", "tcp", "shm")


def probe(transport: str) -> dict[str, str]:
    """What a transport would use here: {"transport", "provider", "library"}.

    Raises:
        TransportUnavailable: the library, provider or device is missing; the message says which.
    """
    info = ffi.new("te_engine_info *")
    error = ffi.new("te_error *")
    _native.check(lib.te_transport_probe(transport.encode(), info, error), "probe", error)
    return {
        "transport": transport,
        "provider": _native.text(info.provider),
        "library": _native.text(info.library),
    }


def best() -> str:
    """The first of `PREFERENCE` that works.

    Raises:
        TransportUnavailable: none works; the message gives each one's reason.
    """
    reasons = []
    for transport in PREFERENCE:
        try:
            probe(transport)
        except TransportUnavailable as cause:
            reasons.append(f"{transport}: {cause.message}")
        else:
            return transport
    raise TransportUnavailable("no transport works here; " + "; ".join(reasons), operation="probe")
