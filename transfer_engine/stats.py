"""Engine statistics as nested plain dictionaries."""

from __future__ import annotations

from typing import Any

from . import _native
from ._handle import EngineHandle
from ._native import ffi, lib, thread_state
from .address import Address, nic_text
from .peers import state_name

_COUNTS = (
    "submitted", "completed", "failed", "polls", "sleeps", "wakeups", "stray_messages", "stray_immediates",
    "damaged_messages", "operations_in_use", "transfers_alive", "regions", "remote_regions", "counters", "peers",
)  # fmt: skip
_NIC_COUNTS = (
    "depth", "in_flight", "bytes_in_flight", "writes", "write_bytes", "sends", "receives", "immediates", "reads",
    "errors", "busy",
)  # fmt: skip
_PEER_COUNTS = (
    "operations", "in_flight", "bytes_in_flight", "immediates_in_flight", "immediate_window", "writes", "write_bytes",
    "messages_sent", "messages_received", "immediates_received", "errors",
)  # fmt: skip


def describe(handle: EngineHandle) -> dict[str, Any]:
    """What the engine chose and what its transport can do."""
    info = ffi.new("te_engine_info *")
    error = thread_state.error
    status = lib.te_engine_describe(handle.pointer, info, error)
    if status != _native.OK:
        raise handle.failure("describe", status, error)
    return {
        "identity": bytes(ffi.buffer(info.identity)).hex(),
        "generation": int(info.generation),
        "transport": _native.text(info.transport),
        "provider": _native.text(info.provider),
        "library": _native.text(info.library),
        "nics": int(info.nic_count),
        "polling": "busy" if info.polling == lib.TE_POLL_BUSY else "adaptive",
        "core": int(info.core) if info.core >= 0 else None,
        "delivery_complete": bool(info.delivery_complete),
        "ordered_writes": bool(info.ordered_writes),
        "keys_enforced": bool(info.keys_enforced),
        "wait_fd": bool(info.wait_fd),
        "max_message_fragment": int(info.max_message_fragment),
        "max_write_bytes": int(info.max_write_bytes),
    }


def nic(handle: EngineHandle, index: int) -> dict[str, Any]:
    """One NIC: name, address, state and counts."""
    info = ffi.new("te_nic_info *")
    error = thread_state.error
    status = lib.te_nic_describe(handle.pointer, index, info, error)
    if status != _native.OK:
        raise handle.failure("describe", status, error)
    counts = {name: int(getattr(info, name)) for name in _NIC_COUNTS}
    return {
        "name": _native.text(info.name),
        "address": nic_text(info.address),
        "up": bool(info.up),
        "state": _native.text(info.state),
        "relaxed_ordering": bool(info.relaxed_ordering),
        "ordering_reason": _native.text(info.ordering_reason),
        **counts,
    }


def peers(handle: EngineHandle, count: int, most: int) -> dict[str, dict[str, Any]]:
    """By the text of their addresses. Indices may have holes where peers were forgotten."""
    found: dict[str, dict[str, Any]] = {}
    for index in range(most):
        if len(found) >= count:
            break
        info = handle.describe_peer(index)
        if info is None:
            continue
        address = Address.from_native(ffi.addressof(info, "address"))
        counts = {name: int(getattr(info, name)) for name in _PEER_COUNTS}
        found[str(address)] = {
            "state": state_name(info.state),
            "nics": list(address.nics),
            "silence_s": info.silence_ns / 1e9,
            **counts,
        }
    return found


def collect(handle: EngineHandle, max_peers: int) -> dict[str, Any]:
    """{"engine": ..., "nics": {name: ...}, "peers": {address: ...}}, ready for json.dumps."""
    totals = ffi.new("te_stats *")
    error = thread_state.error
    status = lib.te_engine_stats(handle.pointer, totals, error)
    if status != _native.OK:
        raise handle.failure("stats", status, error)
    return {
        "engine": {**describe(handle), **{name: int(getattr(totals, name)) for name in _COUNTS}},
        "nics": {name: nic(handle, index) for index, name in enumerate(handle.nic_names)},
        "peers": peers(handle, int(totals.peers), max_peers),
    }
