"""libibverbs, RDMA devices, their ports and GIDs, and whether this process may open them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transfer_engine.topology import Topology
from transfer_engine.topology.sysfs import names_in, read_text, uverbs_of

from .findings import Finding, fine, note, problem, warning
from .host import Host

_CLASS = "/sys/class/infiniband"
_NO_GID = {"", "0000:0000:0000:0000:0000:0000:0000:0000"}


def look(host: Host, topology: Topology, *, wanted: bool) -> list[Finding]:
    """What RDMA has here.

    Args:
        host: what is looked at.
        topology: with the NICs that are hidden.
        wanted: an RDMA transport was asked for, so that what is missing is a problem.
    """
    devices = names_in(host.path(_CLASS))
    hidden = [nic for nic in topology.nics if nic.rdma is None and nic.unusable is not None]
    findings = [_library(host, bool(devices), wanted)]
    missing = problem if wanted else note
    if not devices:
        what = "no RDMA device is here"
        if hidden:
            names = ", ".join(nic.name for nic in hidden)
            what = f"{len(hidden)} RDMA NICs are in the machine ({names}), but no RDMA device is visible"
            missing = problem if wanted else warning
        findings.append(
            missing(
                "verbs.devices",
                what,
                "data between nodes goes over TCP, through the kernel",
                _remedy_for_devices(host, bool(hidden)),
                devices=[],
            )
        )
        return findings
    findings.append(fine("verbs.devices", f"RDMA devices: {', '.join(devices)}", devices=devices))
    for name in devices:
        findings += [_access(host, name), *_ports(host, name)]
    if hidden:
        names = ", ".join(f"{nic.name} ({nic.unusable})" for nic in hidden)
        findings.append(
            warning(
                "verbs.hidden",
                f"NICs without an RDMA device: {names}",
                "their bandwidth is not used",
                _remedy_for_devices(host, True),
            )
        )
    return findings


def _remedy_for_devices(host: Host, hidden: bool) -> str:
    if host.in_container:
        remedy = "start the container with the devices under /dev/infiniband, or with the RDMA device plug-in"
    else:
        remedy = "load the NICs' RDMA driver (`modprobe mlx5_ib`, `modprobe efa`); dmesg tells when it fails"
    return remedy if hidden else f"nothing, unless RDMA NICs should be here: then {remedy}"


def _library(host: Host, devices: bool, wanted: bool) -> Finding:
    name, reason = host.library("libibverbs.so.1")
    if name is not None:
        return fine("verbs.library", "libibverbs can be loaded", file=name)
    make = problem if wanted else warning if devices else note
    return make(
        "verbs.library",
        f"libibverbs cannot be loaded ({reason})",
        "RDMA devices cannot be reached through verbs",
        "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core (others)",
    )


def _access(host: Host, device: str) -> Finding:
    node = uverbs_of(device, host.root)
    shown = str(Path("/") / node.relative_to(host.root)) if node else "/dev/infiniband/uverbs*"
    name = f"verbs.access.{device}"
    if node is None:
        return warning(
            name,
            f"{device}: the kernel offers no verbs for it",
            "it cannot be used from user space",
            "load ib_uverbs: `modprobe ib_uverbs`",
        )
    if not node.exists():
        return warning(
            name,
            f"{device}: {shown} is missing",
            "this process cannot open the device",
            _remedy_for_devices(host, True),
            node=shown,
        )
    if not os.access(node, os.R_OK | os.W_OK):
        return warning(
            name,
            f"{device}: this user may not open {shown}",
            "this process cannot open the device",
            f"let the user read and write {shown}: udev rule of rdma-core, or the group that owns it",
            node=shown,
        )
    return fine(name, f"{device} can be opened ({shown})", node=shown)


def _ports(host: Host, device: str) -> list[Finding]:
    findings = []
    ports = host.path(f"{_CLASS}/{device}/ports")
    for port in names_in(ports):
        folder = ports / port
        state = (read_text(folder / "state") or "unknown").partition(": ")[2] or "unknown"
        layer = read_text(folder / "link_layer") or "unknown"
        rate = read_text(folder / "rate") or "unknown rate"
        gids = _gids(folder)
        facts = {"state": state, "link_layer": layer, "rate": rate, "gids": gids}
        name = f"verbs.port.{device}.{port}"
        what = f"{device} port {port}: {state}, {layer}, {rate}, {len(gids)} GIDs"
        if "ACTIVE" not in state:
            findings.append(
                warning(
                    name,
                    what,
                    "the port carries nothing",
                    "check cable and switch; for RoCE `ip link set INTERFACE up`; for InfiniBand the subnet manager",
                    **facts,
                )
            )
        elif layer == "Ethernet" and not any("v2" in gid["type"] for gid in gids):
            findings.append(
                warning(
                    name,
                    what,
                    "without a RoCE v2 GID the port cannot be routed, and most fabrics drop its packets",
                    "give the network interface an IPv4 address; RoCE v2 GIDs appear by themselves",
                    **facts,
                )
            )
        else:
            findings.append(fine(name, what, **facts))
    return findings


def _gids(port: Path) -> list[dict[str, Any]]:
    found = []
    for index in sorted(names_in(port / "gids"), key=lambda text: int(text) if text.isdecimal() else 0):
        gid = read_text(port / "gids" / index) or ""
        if gid not in _NO_GID:
            kind = read_text(port / "gid_attrs/types" / index) or "unknown"
            interface = read_text(port / "gid_attrs/ndevs" / index) or None
            found.append({"index": index, "gid": gid, "type": kind, "interface": interface})
    return found
