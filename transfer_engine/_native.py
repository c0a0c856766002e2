"""The boundary to the compiled core: the only module that touches it.

Everything that the core says through a te_status and a te_error becomes an exception here. The thread's te_error is
reused, so code that may interrupt other code of its thread (signal handlers, `__del__`, close) brings its own.
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import errors


def _why_no_core() -> str:
    """What to do about it: most often the source folder stands before the installed package on sys.path."""
    here = Path(__file__).parent
    if not (here.parent / "pyproject.toml").exists():
        return "Install a wheel, or build it with `pip install .` from the source tree."
    source = f"{here} is the source folder, which has no compiled core"
    for entry in sys.path:
        installed = Path(entry or ".", "transfer_engine")
        if any(installed.glob("_core*.so")):
            return (
                f"{source}, and sys.path has {str(here.parent)!r} before the installed package in "
                f"{str(installed.parent)!r}. Run Python from another folder, or as `python -P` (3.11 or newer) or "
                "`python -I`."
            )
    return (
        f"{source}, and no installed package is on sys.path. `make build` installs one in .venv, `pip install .` "
        "in this environment; then run Python from another folder, or as `python -P` (3.11 or newer) or `python -I`."
    )


try:
    from ._core import ffi as ffi
    from ._core import lib as lib
except ImportError as cause:
    raise ImportError(
        "transfer_engine's compiled core (transfer_engine._core) is missing or cannot be loaded: "
        f"{cause}. {_why_no_core()}"
    ) from cause

ABI_VERSION = 5

OK: int = lib.TE_OK
AGAIN: int = lib.TE_AGAIN
STALE: int = lib.TE_ERR_STALE
TIMEOUT: int = lib.TE_ERR_TIMEOUT
CLOSED: int = lib.TE_ERR_CLOSED
REGION_CLOSED: int = lib.TE_ERR_REGION_CLOSED
NONE: int = lib.TE_NONE
FLAG_FLUSH: int = lib.TE_FLAG_FLUSH
NULL: Any = ffi.NULL

SLICE_NS = 100_000_000  # longest native wait: between two of them Python handles signals
FOREVER_NS = 1 << 62

_STRUCTS = (
    "te_error", "te_settings", "te_nic_address", "te_address", "te_region_descriptor", "te_counter_descriptor",
    "te_engine_info", "te_nic_info", "te_peer_info", "te_stats", "te_event", "te_message", "te_write_args",
    "te_page_args", "te_batch_entry", "te_rdma_settings", "te_rdma_port", "te_target_member", "te_scatter_args",
    "te_times", "te_region_info", "te_device_info", "te_flag_info", "te_watcher_info", "te_trigger_args",
    "te_trigger_info",
)  # fmt: skip


def _check_abi() -> None:
    found = lib.te_abi_version()
    if found != ABI_VERSION or lib.TE_ABI_VERSION != ABI_VERSION:
        raise ImportError(f"transfer_engine._core has ABI version {found}, this package needs {ABI_VERSION}; reinstall")
    for name in _STRUCTS:
        theirs, ours = lib.te_struct_bytes(name.encode()), ffi.sizeof(name)
        if theirs != ours:
            raise ImportError(
                f"transfer_engine._core: {name} has {theirs} bytes, this package expects {ours}; reinstall"
            )


_check_abi()

_CLASSES: dict[int, type[errors.TransferEngineError]] = {
    lib.TE_ERR_ARGUMENT: errors.ArgumentError,
    lib.TE_ERR_RANGE: errors.RangeError,
    lib.TE_ERR_CONFIG: errors.ConfigError,
    lib.TE_ERR_TRANSPORT_UNAVAILABLE: errors.TransportUnavailable,
    lib.TE_ERR_REGISTRATION: errors.RegistrationError,
    lib.TE_ERR_PEER_UNREACHABLE: errors.PeerUnreachable,
    lib.TE_ERR_PEER_LOST: errors.PeerLost,
    lib.TE_ERR_PEER_RESTARTED: errors.PeerRestarted,
    lib.TE_ERR_REMOTE_ACCESS: errors.RemoteAccessError,
    lib.TE_ERR_REGION_CLOSED: errors.RegionClosed,
    lib.TE_ERR_TIMEOUT: errors.TransferTimeout,
    lib.TE_ERR_CANCELLED: errors.TransferCancelled,
    lib.TE_ERR_TRANSPORT: errors.TransportError,
    lib.TE_ERR_CLOSED: errors.EngineClosed,
    lib.TE_ERR_FORKED: errors.ForkedEngine,
    lib.TE_ERR_EXHAUSTED: errors.ResourceExhausted,
    lib.TE_ERR_DESCRIPTOR: errors.DescriptorError,
    lib.TE_ERR_STALE: errors.RegionClosed,
}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.error = ffi.new("te_error *")


thread_state = _ThreadState()  # thread_state.error: this thread's te_error, valid until its next native call


def text(value: Any) -> str:
    """A terminated C string, or char array, as text."""
    return str(ffi.string(value).decode("utf-8", "replace"))


def status_name(status: int) -> str:
    return text(lib.te_status_name(status))


# enum ibv_wc_status of <infiniband/verbs.h>, without the prefix IBV_WC_.
_VERBS_STATUSES = (
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR", "MW_BIND_ERR",
    "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR", "REM_ABORT_ERR", "INV_EECN_ERR", "INV_EEC_STATE_ERR",
    "FATAL_ERR", "RESP_TIMEOUT_ERR", "GENERAL_ERR", "TM_ERR", "TM_RNDV_INCOMPLETE",
)  # fmt: skip
# enum efa_io_comp_status of the EFA driver's efa_io_defs.h.
_EFA_STATUSES = (
    "OK", "FLUSHED", "LOCAL_ERROR_QP_INTERNAL_ERROR", "LOCAL_ERROR_UNSUPPORTED_OP", "LOCAL_ERROR_INVALID_AH",
    "LOCAL_ERROR_INVALID_LKEY", "LOCAL_ERROR_BAD_LENGTH", "REMOTE_ERROR_BAD_ADDRESS", "REMOTE_ERROR_ABORT",
    "REMOTE_ERROR_BAD_DEST_QPN", "REMOTE_ERROR_RNR", "REMOTE_ERROR_BAD_LENGTH", "REMOTE_ERROR_BAD_STATUS",
    "LOCAL_ERROR_UNRESP_REMOTE", "REMOTE_ERROR_UNKNOWN_PEER", "LOCAL_ERROR_UNREACH_REMOTE",
)  # fmt: skip


def provider_status_name(number: int) -> str:
    """Of a te_error's provider_status: an errno (some providers negate it), or what a device said.

    What has no name keeps its number.
    """
    for base, prefix, names in (
        (lib.TE_STATUS_EFA, "EFA_IO_COMP_STATUS_", _EFA_STATUSES),
        (lib.TE_STATUS_VERBS, "IBV_WC_", _VERBS_STATUSES),
    ):
        if number >= base:
            at = number - base
            return prefix + (names[at] if at < len(names) else str(at))
    return errno.errorcode.get(abs(number), str(number))


def failure(
    operation: str,
    status: int,
    error: Any,
    *,
    peer: str | None = None,
    nics: Sequence[str] = (),
    note: str = "",
    hint: str | None = None,
) -> errors.TransferEngineError:
    """The exception for a failed call. `error` is the te_error that the call filled."""
    provider_status = error.provider_status
    if hint is None and "libcuda" in text(error.message):
        hint = "install NVIDIA's driver, and give the container access to the GPU; `transfer-engine doctor` looks"
    return _CLASSES.get(status, errors.TransferEngineError)(
        (text(error.message) or status_name(status)) + note,
        operation=operation,
        peer=peer,
        nic=nics[error.nic] if 0 <= error.nic < len(nics) else None,
        status=provider_status_name(provider_status) if provider_status else status_name(status),
        elapsed_s=error.elapsed_ns / 1e9 if error.elapsed_ns else None,
        hint=hint,
    )


def set_message(error: Any, message: str) -> None:
    """Replaces the text of a te_error."""
    encoded = message.encode()[: lib.TE_MESSAGE_BYTES - 1]
    ffi.memmove(error.message, encoded + b"\0", len(encoded) + 1)


def check(status: int, operation: str, error: Any) -> None:
    """Raises unless OK; for calls that concern neither an engine nor a peer."""
    if status != OK:
        raise failure(operation, status, error)


def nanoseconds(timeout_s: float | None) -> int:
    """Seconds to the core's nanoseconds: None (the engine's default) is -1, infinity is some hundred years.

    Raises:
        ArgumentError: negative or not a number.
        ArgumentTypeError: neither a number nor None.
    """
    if timeout_s is None:
        return -1
    try:
        if timeout_s >= 1e9:
            return FOREVER_NS
        if timeout_s >= 0:
            return int(timeout_s * 1e9)
    except TypeError:
        raise errors.ArgumentTypeError(f"timeout_s must be seconds or None, not {type(timeout_s).__name__}") from None
    raise errors.ArgumentError(f"timeout_s must be zero or more seconds, got {timeout_s}")


def pointer_to(array: Any) -> Any:
    """A pointer into a C-contiguous buffer; the returned object keeps the buffer alive and in place."""
    return ffi.from_buffer(array)


def encode(function: Any, value: Any, operation: str) -> bytes:
    """Runs one of the core's te_*_encode functions."""
    capacity = lib.TE_DESCRIPTOR_BYTES
    out = ffi.new("uint8_t[]", capacity)
    length = ffi.new("uint64_t *")
    error = ffi.new("te_error *")
    check(function(value, out, capacity, length, error), operation, error)
    return bytes(ffi.buffer(out, length[0]))


def decode(function: Any, struct: str, data: bytes, operation: str) -> Any:
    """Runs one of the core's te_*_decode functions; returns a new `struct *`.

    Raises:
        DescriptorError: the bytes are foreign, truncated or damaged.
    """
    out = ffi.new(struct + " *")
    error = ffi.new("te_error *")
    status = function(ffi.from_buffer(data), len(data), out, error)
    if status != OK:
        found = _KINDS.get(data[:3], struct)
        if found != struct:
            set_message(error, f"these are the bytes of {_KIND_NAMES[found]}, not of {_KIND_NAMES[struct]}")
        raise failure(operation, status, error)
    return out


_KINDS = {b"tea": "te_address", b"ter": "te_region_descriptor", b"tec": "te_counter_descriptor"}  # as wire.cc has them
_KIND_NAMES = {
    "te_address": "an address",
    "te_region_descriptor": "a region descriptor",
    "te_counter_descriptor": "a counter descriptor",
}


def foreign_bytes(data: object, what: str) -> bytes:
    """Accepts anything with a buffer interface.

    Raises:
        ArgumentTypeError: it has none.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    raise errors.ArgumentTypeError(f"{what} must be bytes, bytearray or memoryview, not {type(data).__name__}")
