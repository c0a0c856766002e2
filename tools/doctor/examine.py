"""All looks together. Nothing that goes wrong in one of them keeps the others from being taken."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import transfer_engine as te
from transfer_engine.topology import Topology
from transfer_engine.topology.sysfs import names_in

from ..results import Exit
from . import gpus, limits, places, rdma, transports, variables
from .findings import Finding, Severity, fine, note
from .host import Host

_PROBLEM = 1  # exit status: something that is wanted cannot work
TRANSPORTS = ("efa", "cx7", "tcp", "shm", "sim")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, in the order in which it is shown, and the status to exit with."""

    findings: tuple[Finding, ...]
    status: int

    @property
    def gravest(self) -> Severity:
        """Of all findings."""
        return max((finding.severity for finding in self.findings), default=Severity.OK)


def examine(wanted: Collection[str] = (), host: Host | None = None) -> Report:
    """Looks at everything. Never raises.

    The status is 2 when the settings in the environment refuse every engine, 3 when a transport that must work does
    not, 1 when there is another problem.

    Args:
        wanted: transports that must work, besides that of TE_TRANSPORT.
        host: what is looked at; None: this machine.
    """
    host = host or Host()
    chosen = host.environment.get("TE_TRANSPORT", "")
    wanted = {*wanted, chosen} & set(TRANSPORTS)
    found = _attempt("topology.discovery", host.topology)
    machine = found if isinstance(found, Topology) else Topology(source="nothing")
    findings = [_versions(host)]
    findings += [found] if isinstance(found, Finding) else []
    wants_rdma = bool({"efa", "cx7"} & set(wanted))
    host.take(("libfabric",), ("cuda",), ("engine", ""), *(("probe", transport) for transport in TRANSPORTS))
    has_rdma = bool(names_in(host.path("/sys/class/infiniband")))
    looks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("transport.look", lambda: transports.look(host, machine, wanted)),
        ("verbs.look", lambda: rdma.look(host, machine, wanted=wants_rdma)),
        ("gpu.look", lambda: gpus.look(host, machine)),
        ("memory.look", lambda: limits.look(host, machine, rdma=has_rdma)),
        ("topology.look", lambda: places.look(host, machine)),
        ("settings.look", lambda: variables.look(host)),
    )
    for name, look in looks:
        result = _attempt(name, look)
        findings += result if isinstance(result, list) else [result]
    working = {finding.id for finding in findings if finding.severity is Severity.OK}
    broken = any(f"transport.{transport}" not in working for transport in wanted)
    refused = any(finding.area == "settings" and finding.severity is Severity.PROBLEM for finding in findings)
    report = Report(tuple(findings), Exit.USAGE if refused else Exit.UNAVAILABLE if broken else Exit.OK)
    if report.status == Exit.OK and report.gravest is Severity.PROBLEM:
        return Report(report.findings, _PROBLEM)
    return report


def _versions(host: Host) -> Finding:
    python = platform.python_version()
    where = "in a container" if host.in_container else "on a host"
    user = "root" if host.is_root else "an unprivileged user"
    what = f"transfer_engine {te.__version__}, Python {python}, {platform.machine()}, {where}, as {user}"
    facts = {
        "python": python,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "executable": sys.executable,
    }
    return fine("package.versions", what, version=te.__version__, **facts)


def _attempt(name: str, look: Callable[[], Any]) -> Any:
    """What a look found, or one finding about how it failed."""
    try:
        return look()
    except Exception as cause:  # noqa: BLE001 - a doctor that dies helps nobody
        what = f"this could not be looked at: {type(cause).__name__}: {cause}"
        return note(name, what, "what is missing here is not known", "report this line as an error of the doctor")
