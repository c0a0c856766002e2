"""RDMA ports as the transport `cx7` sees them: which GID each sends from, and why."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from dataclasses import dataclass
from typing import Any

from .. import _native
from .._native import ffi, lib
from ..settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device: its name ("mlx5_0").
        port: its number on the device, from 1.
        state: "ACTIVE", "DOWN", "INIT", ... as the kernel names it.
        link_layer: "Ethernet" (RoCE) or "InfiniBand"; ports with any other are not used.
        lid: its address on an InfiniBand subnet; 0: it has none.
        interface: the network interface of the GID, else of the port, or None.
        gid_index: index of the chosen GID; None: there is none to choose.
        gid: the chosen GID, as IPv6 addresses are written; IPv4-mapped ones with a dotted end.
        gid_kind: "RoCE v2", "RoCE v1" or "InfiniBand".
        why: why this GID.
        unusable: why nothing can be sent from this port, or None.
        remedy: what to do about that, or None.
    """

    device: str
    port: int
    state: str
    link_layer: str
    lid: int
    interface: str | None
    gid_index: int | None
    gid: str | None
    gid_kind: str | None
    why: str
    unusable: str | None
    remedy: str | None

    @property
    def name(self) -> str:
        """As setting `nics` takes it: "mlx5_0:1"."""
        return f"{self.device}:{self.port}"

    @property
    def active(self) -> bool:
        """The link is up."""
        return self.state == "ACTIVE"

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {"name": self.name, **dataclasses.asdict(self)}


def rdma_ports(
    root: str | os.PathLike[str] = "/", *, gid_index: int | None = None, pkey_index: int = 0
) -> tuple[RdmaPort, ...]:
    """All RDMA ports, by device and number, usable or not, each with the GID that `cx7` would take.

    The rule: RoCE v2 before RoCE v1; in each an IPv4-mapped address before a global IPv6 one before a link-local one;
    then those of interfaces in this network namespace; then the lowest index. InfiniBand takes index 0.

    Args:
        root: of the file tree; "/" but for recorded machines.
        gid_index: as the setting of this name; None: by the rule.
        pkey_index: likewise.

    Raises:
        ConfigError: an index out of range.
        ArgumentTypeError: an index that is no integer.
    """
    Settings.check("gid_index", gid_index)
    Settings.check("pkey_index", pkey_index)
    settings = ffi.new("te_settings *")
    lib.te_settings_defaults(settings)
    rdma = settings.rdma
    rdma.gid_index = -1 if gid_index is None else gid_index
    rdma.pkey_index = pkey_index
    error = ffi.new("te_error *")
    count = ffi.new("uint32_t *")
    tree = os.fsencode(root).rstrip(b"/")
    capacity = 64
    while True:
        found = ffi.new("te_rdma_port[]", capacity)
        _native.check(lib.te_rdma_ports(tree, ffi.addressof(rdma), found, capacity, count, error), "rdma_ports", error)
        if count[0] <= capacity:
            return tuple(_port(found[index]) for index in range(count[0]))
        capacity = count[0]


def _port(native: Any) -> RdmaPort:
    text = _native.text
    chosen = native.gid_index >= 0
    return RdmaPort(
        device=text(native.device),
        port=native.port,
        state=text(native.state),
        link_layer=text(native.link_layer),
        lid=native.lid,
        interface=text(native.interface) or None,
        gid_index=native.gid_index if chosen else None,
        gid=_gid(bytes(native.gid)) if chosen else None,
        gid_kind=text(native.gid_kind) or None,
        why=text(native.why),
        unusable=text(native.unusable) or None,
        remedy=text(native.remedy) or None,
    )


def _gid(raw: bytes) -> str:
    address = ipaddress.IPv6Address(raw)
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)
