"""A machine's topology as plain values: cores, GPUs, NICs, where each sits, and how far apart two of them are."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any


class Distance(enum.IntEnum):
    """What lies between two PCI devices, nearest first. Labels are those of `nvidia-smi topo -m`, where it has one."""

    SWITCH = 0
    SWITCHES = 1
    HOST_BRIDGE = 2
    NUMA = 3
    UNKNOWN = 4  # at least one of the two has no known place: no better and no worse than any other
    PACKAGE = 5
    MACHINE = 6

    @property
    def label(self) -> str:
        """PIX, PXB, PHB, NODE, ?, PKG or SYS."""
        return ("PIX", "PXB", "PHB", "NODE", "?", "PKG", "SYS")[self]

    @property
    def far(self) -> bool:
        """Bytes cross between NUMA nodes."""
        return self > Distance.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a device sits.

    Attributes:
        bus_id: PCI address ("0000:17:00.0"); None for devices without hardware.
        path: the bridges above it, from the host bridge down; what two devices share is how close they are.
        numa: its NUMA node; None when the platform does not say.
        package: its processor package; None likewise.
    """

    bus_id: str | None = None
    path: tuple[str, ...] = ()
    numa: int | None = None
    package: int | None = None


NOWHERE = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """A physical core.

    Attributes:
        index: its position in `Topology.cores`.
        cpus: its hardware threads by CPU number; more than one are SMT siblings.
        numa: its NUMA node, or None.
        package: its processor package, or None.
    """

    index: int
    cpus: tuple[int, ...]
    numa: int | None = None
    package: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. `index` counts in the order of PCI addresses; `unusable`: why this process cannot use it, or None."""

    index: int
    model: str
    place: Place
    uuid: str | None = None
    unusable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A NIC: one PCI function, or a software device.

    Attributes:
        name: of the RDMA device, else of the network interface, else the PCI address.
        model: "vendor:device" as PCI numbers them, or the name of the software driver.
        place: where it sits.
        rdma: name of its RDMA device ("mlx5_0"); None: it has none.
        interfaces: names of its network interfaces.
        rate_gbps: of the network link, in 10^9 bits per second; None when unknown.
        pcie_gbps: of the PCIe link, likewise.
        unusable: why RDMA cannot use it, or None.
    """

    name: str
    model: str
    place: Place
    rdma: str | None = None
    interfaces: tuple[str, ...] = ()
    rate_gbps: float | None = None
    pcie_gbps: float | None = None
    unusable: str | None = None

    @property
    def for_rdma(self) -> bool:
        """It is an RDMA NIC, usable or not."""
        return self.rdma is not None or self.unusable is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A machine as this process sees it.

    Attributes:
        source: "hwloc 2.9.0", "sysfs", or the file that it was read from.
        cores: all physical cores, in order.
        gpus: all GPUs, those that are hidden included.
        nics: all NICs, likewise.
        allowed: CPUs that the control group allows; empty when unknown.
        notes: what limits this picture, in sentences.
    """

    source: str
    cores: tuple[Core, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    allowed: frozenset[int] = frozenset()
    notes: tuple[str, ...] = field(default=())

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that have cores."""
        return tuple(sorted({core.numa for core in self.cores if core.numa is not None}))

    @property
    def cpus(self) -> frozenset[int]:
        """All hardware threads."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    def to_dict(self) -> dict[str, Any]:
        """Plain types only: `json.dumps` takes it as it is."""
        return {**asdict(self), "allowed": sorted(self.allowed)}


def distance(one: Place, other: Place) -> Distance:
    """How far apart two devices are."""
    shared = _shared(one.path, other.path)
    if shared >= 2:  # the host bridge and at least one bridge below it
        deepest = max(len(one.path), len(other.path)) - shared
        return Distance.SWITCH if deepest <= 1 else Distance.SWITCHES
    if shared == 1:
        return Distance.HOST_BRIDGE
    if one.numa is None or other.numa is None:
        return Distance.UNKNOWN
    if one.numa == other.numa:
        return Distance.NUMA
    known = one.package is not None and other.package is not None
    return Distance.PACKAGE if known and one.package == other.package else Distance.MACHINE


def hops(one: Place, other: Place) -> int:
    """Bridges between two devices, counted on both sides: refines `distance` among equals."""
    return len(one.path) + len(other.path) - 2 * _shared(one.path, other.path)


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
