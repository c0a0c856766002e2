"""libibverbs, RDMA devices, their ports and GIDs, and whether this process may open them."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import transfer_engine as te
from transfer_engine.settings import variable_of
from transfer_engine.topology import RdmaPort, Topology, rdma_ports
from transfer_engine.topology.sysfs import names_in, read_number, read_text, uverbs_of

from .findings import Finding, fine, note, problem, warning
from .host import Host

_CLASS = "/sys/class/infiniband"
_NO_GID = {"", "0000:0000:0000:0000:0000:0000:0000:0000"}
_HEADERS = 96  # bytes: GRH, UDP, BTH, the longest extended header and the check sum
_FULL_MTU = 4096 + _HEADERS


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
                _remedy_for_devices(host, wanted or bool(hidden)),
                devices=[],
            )
        )
        return findings
    findings.append(fine("verbs.devices", f"RDMA devices: {', '.join(devices)}", devices=devices))
    ports = _chosen_ports(host)
    for name in devices:
        findings += [_access(host, name), *(_port(host, port) for port in ports.get(name, ()))]
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


def _remedy_for_devices(host: Host, needed: bool) -> str:
    if host.in_container:
        remedy = "start the container with the devices under /dev/infiniband, or with the RDMA device plug-in"
    else:
        remedy = "load the NICs' RDMA driver (`modprobe mlx5_ib`, `modprobe efa`); dmesg tells when it fails"
    return remedy if needed else f"nothing, unless RDMA NICs should be here: then {remedy}"


def _library(host: Host, devices: bool, wanted: bool) -> Finding:
    named = host.environment.get("TE_LIBIBVERBS")
    name, reason = host.library(named or "libibverbs.so.1")
    if name is not None:
        return fine("verbs.library", "libibverbs can be loaded", file=name)
    make = problem if wanted else warning if devices else note
    return make(
        "verbs.library",
        f"{f'TE_LIBIBVERBS={named}' if named else 'libibverbs'} cannot be loaded ({reason})",
        "RDMA devices cannot be reached through verbs",
        "correct TE_LIBIBVERBS, the path of a libibverbs.so.1, or unset it"
        if named
        else "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or rdma-core (others)",
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


def _chosen_ports(host: Host) -> dict[str, list[RdmaPort]]:
    """The ports of each device, with the GIDs that the settings of the environment give."""
    wishes: dict[str, Any] = {}
    for name in ("gid_index", "pkey_index"):
        value = host.environment.get(variable_of(name))
        if value is not None:
            with suppress(te.TransferEngineError):  # which is said of the setting
                wishes[name] = te.Settings.check(name, value)
    found: dict[str, list[RdmaPort]] = {}
    for port in rdma_ports(host.root, **wishes):
        found.setdefault(port.device, []).append(port)
    return found


def _port(host: Host, port: RdmaPort) -> Finding:
    folder = host.path(f"{_CLASS}/{port.device}/ports/{port.port}")
    rate = read_text(folder / "rate") or "unknown rate"
    mtu = read_number(host.path(f"/sys/class/net/{port.interface}/mtu")) if port.interface else None
    facts = {"rate": rate, "interface_mtu": mtu, "gids": _gids(folder)}
    facts.update((key, value) for key, value in port.to_dict().items() if key not in ("name", "remedy"))
    name = f"verbs.port.{port.device}.{port.port}"
    what = f"{port.name}: {port.state}, {port.link_layer or 'unknown link layer'}, {rate}"
    if port.link_layer not in ("Ethernet", "InfiniBand") and port.active:
        return fine(name, f"{what}; not for cx7: {port.unusable}", **facts)
    if port.unusable:
        so = "cx7 cannot use the port" if port.active else "the port carries nothing"
        other = "nothing: other ports, or transport=tcp, serve instead"
        return warning(name, f"{what}: {port.unusable}", so, port.remedy or other, **facts)
    what += f", LID {port.lid}" if port.lid else ""
    what += f", GID {port.gid_index} is {port.gid}"
    what += f" of {port.interface} ({port.why})" if port.interface else f" ({port.why})"
    better = f"give {port.interface or 'its network interface'} an IPv4 address; RoCE v2 GIDs appear by themselves"
    if host.environment.get(variable_of("gid_index")):
        better = f"unset {variable_of('gid_index')}: then the best GID there is will be taken"
    if port.gid_kind == "RoCE v1":
        so = "without a RoCE v2 GID the port cannot be routed, and most fabrics drop its packets"
        return warning(name, what, so, better, **facts)
    if port.gid and port.link_layer == "Ethernet" and ipaddress.ip_address(port.gid).is_link_local:
        return note(name, what, "only peers on the same Ethernet segment can be reached", better, **facts)
    if port.link_layer == "Ethernet" and mtu is not None and mtu < _FULL_MTU:
        so = f"packets carry at most {_path_mtu(mtu)} bytes of 4096: more packets, less bandwidth"
        remedy = f"where the switches allow it, `ip link set {port.interface} mtu 9000` on all hosts"
        return note(name, f"{what}, MTU {mtu}", so, remedy, **facts)
    return fine(name, what, **facts)


def _path_mtu(mtu: int) -> int:
    """Of RDMA packets on an interface with this MTU, as the kernel's iboe_get_mtu has it."""
    return max((size for size in (256, 512, 1024, 2048, 4096) if size + _HEADERS <= mtu), default=256)


def _gids(port: Path) -> list[dict[str, Any]]:
    found = []
    for index in sorted(names_in(port / "gids"), key=lambda text: int(text) if text.isdecimal() else 0):
        gid = read_text(port / "gids" / index) or ""
        if gid not in _NO_GID:
            kind = read_text(port / "gid_attrs/types" / index) or "unknown"
            interface = read_text(port / "gid_attrs/ndevs" / index) or None
            found.append({"index": index, "gid": gid, "type": kind, "interface": interface})
    return found
