"""hwloc, network interfaces, and whether NICs and GPUs are near each other."""

from __future__ import annotations

from typing import Any

from transfer_engine.topology import Topology, hwloc
from transfer_engine.topology.policy import plan
from transfer_engine.topology.sysfs import names_in, read_number, read_text
from transfer_engine.topology.words import count

from .findings import Finding, fine, note
from .host import Host


def look(host: Host, topology: Topology) -> list[Finding]:
    """Everything that has to do with where things are."""
    return [_hwloc(), *_locality(topology), _interfaces(host)]


def _hwloc() -> Finding:
    try:
        _, version, _ = hwloc.export()  # the library's version, as `topo` shows it
    except hwloc.HwlocUnavailable as cause:
        return note(
            "topology.hwloc",
            f"hwloc is not here: {cause}",
            "the topology is read from sysfs alone, which suffices on most machines",
            "install libhwloc15 (Debian, Ubuntu) or hwloc-libs (others)",
        )
    return fine("topology.hwloc", f"hwloc {version} is here", version=version)


def _locality(topology: Topology) -> list[Finding]:
    usable = [gpu.index for gpu in topology.gpus if gpu.unusable is None]
    workers: list[tuple[int, int | None]] = [(rank, gpu) for rank, gpu in enumerate(usable)] or [(0, None)]
    found = plan(topology, workers)
    nics = {name for share in found.shares for name in share.nics}
    facts: dict[str, Any] = {"left_out": [f"{entry.nic}: {entry.reason}" for entry in found.left_out]}
    remarks = [text for text in found.messages if "would need" not in text]
    if not topology.nics:
        return [note("topology.nics", "no NIC hangs on a bus that can be seen", "nothing can be said about locality")]
    if remarks or (found.left_out and usable):
        text = "; ".join((*remarks, *(f"{entry.nic} is not used: {entry.reason}" for entry in found.left_out)))
        return [note("topology.nics", f"NICs and GPUs: {text}", "`transfer-engine topo` shows the whole plan", **facts)]
    if not usable:
        return [fine("topology.nics", f"{count(len(nics), 'NIC')} for the host", **facts)]
    what = f"{count(len(nics), 'NIC')} for {count(len(usable), 'GPU')}, each near its own"
    return [fine("topology.nics", what, **facts)]


def _interfaces(host: Host) -> Finding:
    found: dict[str, dict[str, Any]] = {}
    folder = host.path("/sys/class/net")
    for name in names_in(folder):
        state = read_text(folder / name / "operstate") or "unknown"
        found[name] = {"state": state, "mtu": read_number(folder / name / "mtu")}
        speed = read_number(folder / name / "speed") if state == "up" else None
        if speed is not None and speed > 0:
            found[name]["gbps"] = speed / 1000
    up = [name for name, facts in found.items() if name != "lo" and facts["state"] in ("up", "unknown")]
    if not up:
        return note(
            "network.interfaces",
            "no network interface but the loopback is up",
            "only processes of this node can talk to each other",
            "check the network of this container, or `ip link`",
            interfaces=found,
        )
    details = ", ".join(f"{name} (MTU {found[name]['mtu']})" for name in up)
    return fine("network.interfaces", f"network interfaces: {details}", interfaces=found)
