"""libfabric, and which of our transports work here."""

from __future__ import annotations

from collections.abc import Collection

import transfer_engine as te

from .findings import Finding, Severity, fine, note, problem, warning
from .host import ChildFailed, Host

_INSTALL = "install libfabric1 (Debian, Ubuntu), libfabric (others), or AWS's EFA installer"
_BEST_TCP = ("tcp", "net", "tcp;ofi_rxm")  # `net` became `tcp` in libfabric 1.18

_WHAT_IT_COSTS = {
    "efa": "AWS EFA cannot be used",
    "cx7": "ConnectX and other InfiniBand or RoCE NICs cannot be used through verbs",
    "tcp": "no data can move between nodes without RDMA",
    "shm": "processes of this node talk over tcp, several times slower",
    "sim": "the simulated fabric, and tests on it, cannot be used",
}


def look(host: Host, wanted: Collection[str]) -> list[Finding]:
    """First libfabric, then each transport; those in `wanted` must work.

    Args:
        host: what is looked at.
        wanted: transports that were asked for.
    """
    findings = [_libfabric(host)]
    working = []
    for transport in ("efa", "cx7", "tcp", "shm", "sim"):
        found = _transport(host, transport, transport in wanted)
        findings.append(found)
        working += [transport] if found.severity is Severity.OK else []
    real = [transport for transport in working if transport != "sim"]
    if real:
        findings.append(fine("transport.default", f"transport=None picks {real[0]} here", working=working))
    else:
        findings.append(
            problem(
                "transport.default",
                "no transport but the simulated one works here",
                "engines can only talk within one process",
                _INSTALL,
                working=working,
            )
        )
    return findings


def _libfabric(host: Host) -> Finding:
    try:
        found = host.child("libfabric")
    except ChildFailed as cause:
        return warning(
            "libfabric.library",
            f"libfabric fails while it looks for providers: {cause}",
            "transports over libfabric may fail in the same way",
            "set FI_LOG_LEVEL=warn to see which provider it is, and leave it out with FI_PROVIDER=^NAME",
        )
    if "missing" in found:
        return warning(
            "libfabric.library",
            f"libfabric cannot be loaded ({found['missing']})",
            "the transports efa, tcp and shm are not there",
            f"{_INSTALL}, or set TE_LIBFABRIC to the library's path",
        )
    providers = found["providers"]
    names = ", ".join(sorted(providers)) or "none"
    best = next((name for name in _BEST_TCP if name in providers), None)
    facts = {"version": found["version"], "file": found["file"], "providers": providers, "tcp_provider": best}
    filtered = host.environment.get("FI_PROVIDER")
    if filtered:
        return note(
            "libfabric.library",
            f"libfabric {found['version']} with the providers {names}; FI_PROVIDER={filtered} leaves out others",
            "transports whose provider is left out do not work",
            "unset FI_PROVIDER unless this is meant",
            **facts,
        )
    return fine("libfabric.library", f"libfabric {found['version']} with the providers {names}", **facts)


def _transport(host: Host, transport: str, wanted: bool) -> Finding:
    name = f"transport.{transport}"
    try:
        found = host.probe(transport)
    except te.TransportUnavailable as cause:
        reason, remedy = cause.message, ""
    except ChildFailed as cause:
        reason, remedy = f"looking for it failed: {cause}", "set FI_LOG_LEVEL=warn and look again"
    else:
        how = f"{transport} works here ({found['provider']}, {found['library']})"
        return fine(name, how, provider=found["provider"], library=found["library"])
    remedy = remedy or (_INSTALL if "libfabric.so" in reason else _REMEDIES.get(transport, _INSTALL))
    if wanted:
        return problem(
            name, f"{transport} was asked for and does not work: {reason}", _WHAT_IT_COSTS[transport], remedy
        )
    if transport in ("efa", "cx7"):  # most machines have neither
        return note(name, f"{transport} does not work here: {reason}", _WHAT_IT_COSTS[transport], remedy)
    return warning(name, f"{transport} does not work here: {reason}", _WHAT_IT_COSTS[transport], remedy)


_REMEDIES = {
    "efa": "run on an instance with EFA interfaces, with AWS's EFA installer (libfabric 1.18 or later)",
    "cx7": "see the findings about verbs; transport=tcp works without RDMA",
}
