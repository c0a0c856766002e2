"""libfabric, and which of our transports work here."""

from __future__ import annotations

from collections.abc import Collection

import transfer_engine as te
from transfer_engine.topology import Topology

from .findings import Finding, Severity, fine, note, problem, warning
from .host import ChildFailed, ChildTimedOut, Host

_INSTALL = "install libfabric1 (Debian, Ubuntu), libfabric (others), or AWS's EFA installer"
_AMAZON = "1d0f:"
_LOOK_AGAIN = "look again when the machine is less busy; FI_LOG_LEVEL=warn shows what libfabric waits for"

_WHAT_IT_COSTS = {
    "efa": "AWS EFA cannot be used",
    "cx7": "ConnectX and other InfiniBand or RoCE NICs cannot be used through verbs",
    "tcp": "no data can move between nodes without RDMA",
    "shm": "processes of this node talk over tcp, several times slower",
    "sim": "the simulated fabric, and tests on it, cannot be used",
}


def look(host: Host, topology: Topology, wanted: Collection[str]) -> list[Finding]:
    """First libfabric, then each transport; those in `wanted` must work.

    Args:
        host: what is looked at.
        topology: of the machine: whether it has EFA devices.
        wanted: transports that were asked for.
    """
    has_efa = any(nic.model.startswith(_AMAZON) for nic in topology.nics if nic.for_rdma)
    findings = [_libfabric(host)]
    working = []
    for transport in ("efa", "cx7", "tcp", "shm", "sim"):
        found = _transport(host, transport, transport in wanted, has_efa)
        findings.append(found)
        working += [transport] if found.severity is Severity.OK else []
    real = [transport for transport in working if transport != "sim"]
    unknown = [finding.id.partition(".")[2] for finding in findings if finding.facts.get("unknown")]
    if real:
        findings.append(fine("transport.default", f"without a choice, engines take {real[0]} here", working=working))
    elif unknown:
        findings.append(
            warning(
                "transport.default",
                f"unknown: looking for {', '.join(unknown)} took too long",
                "which transports work here is not known",
                _LOOK_AGAIN,
                working=working,
            )
        )
    else:
        findings.append(
            problem(
                "transport.default",
                "no transport but the simulated one works here",
                "engines can only talk within one process",
                _get_library(host),
                working=working,
            )
        )
    return findings


def _libfabric(host: Host) -> Finding:
    try:
        found = host.child("libfabric")
    except ChildTimedOut as cause:
        text = f"libfabric and its providers: {cause}"
        return warning("libfabric.library", text, "transports over libfabric may take as long to open", _LOOK_AGAIN)
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
            f"{_named(host)} cannot be loaded ({found['missing']})",
            "the transports efa, tcp and shm are not there",
            _get_library(host),
        )
    providers = found["providers"]
    names = ", ".join(sorted(providers)) or "none"
    facts = {"version": found["version"], "file": found["file"], "providers": providers}
    facts["tcp_provider"] = _tcp_provider(host)
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


def _named(host: Host) -> str:
    path = host.environment.get("TE_LIBFABRIC")
    return f"the libfabric of TE_LIBFABRIC={path}" if path else "libfabric"


def _get_library(host: Host) -> str:
    if host.environment.get("TE_LIBFABRIC"):
        return "correct TE_LIBFABRIC, the path of a libfabric.so.1, or unset it"
    return f"{_INSTALL}, or set TE_LIBFABRIC to the library's path"


def _tcp_provider(host: Host) -> str | None:
    """The provider that the tcp transport takes here."""
    try:
        return host.probe("tcp")["provider"]
    except (te.TransportUnavailable, ChildFailed):
        return None


def _transport(host: Host, transport: str, wanted: bool, has_efa: bool) -> Finding:
    name = f"transport.{transport}"
    try:
        found = host.probe(transport)
    except te.TransportUnavailable as cause:
        reason, remedy = _judged(host, transport, cause.message, has_efa)
    except ChildTimedOut as cause:
        so = "whether it works here is not known"
        return (problem if wanted else warning)(name, f"{transport}: {cause}", so, _LOOK_AGAIN, unknown=True)
    except ChildFailed as cause:
        reason, remedy = f"looking for it failed: {cause}", "set FI_LOG_LEVEL=warn and look again"
    else:
        how = f"{transport} works here ({found['provider']}, {found['library']})"
        return fine(name, how, provider=found["provider"], library=found["library"])
    if wanted:
        by = " (TE_TRANSPORT)" if host.environment.get("TE_TRANSPORT") == transport else ""
        return problem(
            name, f"{transport} was asked for{by} and does not work: {reason}", _WHAT_IT_COSTS[transport], remedy
        )
    if transport in ("efa", "cx7"):  # most machines have neither
        return note(name, f"{transport} does not work here: {reason}", _WHAT_IT_COSTS[transport], remedy)
    return warning(name, f"{transport} does not work here: {reason}", _WHAT_IT_COSTS[transport], remedy)


def _judged(host: Host, transport: str, reason: str, has_efa: bool) -> tuple[str, str]:
    """Why a transport is missing, and what to do about it: the first cause comes first."""
    if "this build has no" in reason:
        return (
            reason,
            f"nothing on this machine: use another build of transfer_engine, or a transport other than {transport}",
        )
    if transport == "efa" and not has_efa:
        return "no EFA device is here", "nothing, unless this is an AWS instance: then give it EFA interfaces"
    if transport == "cx7":
        if "TE_LIBIBVERBS" in reason:
            return reason.removesuffix(": correct or unset it"), "correct TE_LIBIBVERBS, or unset it"
        if reason.startswith("no RDMA device"):
            reason = "no RDMA device is here"
        return reason, "see RDMA devices below; tcp works without RDMA"
    if transport in ("efa", "tcp", "shm") and _is_missing(host):
        return f"{_named(host)} cannot be loaded", _get_library(host)
    provider = host.environment.get("TE_TCP_PROVIDER")
    if transport == "tcp" and provider:
        return f"TE_TCP_PROVIDER={provider}: {reason}", "correct TE_TCP_PROVIDER (net, tcp, tcp;ofi_rxm), or unset it"
    if transport == "efa":
        return reason, "run AWS's EFA installer (libfabric 1.18 or later)"
    return reason, _get_library(host)


def _is_missing(host: Host) -> bool:
    try:
        return "missing" in host.child("libfabric")
    except ChildFailed:
        return False
