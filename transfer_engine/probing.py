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
    reasons: dict[str, list[str]] = {}  # most have the same one: the library is not there
    for transport in PREFERENCE:
        try:
            probe(transport)
        except TransportUnavailable as cause:
            reasons.setdefault(cause.message, []).append(transport)
        else:
            return transport
    texts = [f"{', '.join(transports)}: {reason}" for reason, transports in reasons.items()]
    raise TransportUnavailable(
        "no transport works here; " + "; ".join(texts),
        operation="probe",
        hint="`transfer-engine doctor` says what is missing and what to do about it",
    )
