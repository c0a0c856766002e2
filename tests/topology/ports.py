"""RDMA ports as sysfs has them: recorded shapes of GID tables, and a writer of trees with them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trees import put

V1, V2 = "IB/RoCE v1", "RoCE v2"
UNREADABLE = object()  # the kernel answers EINVAL


@dataclass(frozen=True)
class Gid:
    """An entry of a GID table. `kind` and `interface` may be UNREADABLE."""

    address: str
    kind: object = V2
    interface: object = "eth0"


ZERO = Gid("::", UNREADABLE, UNREADABLE)


def sysfs_gid(address: str) -> str:
    return ipaddress.IPv6Address(address).exploded


def _attribute(path: Path, value: object) -> None:
    if value is UNREADABLE:  # reading a directory fails for root, too
        path.mkdir(parents=True)
    elif value is not None:
        put(path, value)


def write_port(
    root: Path,
    device: str,
    number: int = 1,
    *,
    gids: Sequence[Gid] = (),
    slots: int = 0,
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    layer: str = "Ethernet",
    lid: int = 0,
    pkeys: Sequence[int] = (0xFFFF,),
    node_type: str = "1: CA",
    parent: str | None = None,
) -> Path:
    """One port; slots of the GID table that `gids` does not fill are as the kernel shows empty ones."""
    folder = root / "sys/class/infiniband" / device
    port = folder / f"ports/{number}"
    put(folder / "node_type", node_type)
    if parent:
        put(folder / "parent", parent)
    values = {
        "state": state,
        "phys_state": physical,
        "link_layer": layer,
        "lid": hex(lid),
        "rate": "400 Gb/sec (4X NDR)",
    }
    for name, value in values.items():
        put(port / name, value)
    for index in range(max(slots, len(gids))):
        gid = gids[index] if index < len(gids) else ZERO
        put(port / f"gids/{index}", sysfs_gid(gid.address))
        _attribute(port / f"gid_attrs/types/{index}", gid.kind)
        _attribute(port / f"gid_attrs/ndevs/{index}", gid.interface)
    for index, key in enumerate(pkeys):
        put(port / f"pkeys/{index}", hex(key))
    return port


def twice(*gids: Gid) -> list[Gid]:
    """Each address as mlx5 lists it: v1, then v2."""
    return [Gid(gid.address, kind, gid.interface) for gid in gids for kind in (V1, V2)]


def write_interfaces(root: Path, **mtus: int) -> None:
    for name, mtu in mtus.items():
        put(root / "sys/class/net" / name.replace("__", ".") / "mtu", mtu)
