"""Machines that nobody has to own: hwloc's XML of them, and the same as a tree of sysfs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import quoteattr

CONNECTX7 = ("15b3", "1021", "mlx5_{}", 63.0)
CONNECTX6_DX = ("15b3", "101d", "mlx5_{}", 15.75)
EFA = ("1d0f", "efa2", "rdmap{}s0", 31.5)


@dataclass
class Device:
    """A PCI function. `name` is that of its RDMA device; None: it has none (hidden, or a GPU)."""

    kind: str  # "gpu" or "nic"
    vendor: str = "10de"
    device: str = "2330"
    name: str | None = None
    link: float = 63.0  # 10^9 bytes per second
    active: bool = True


@dataclass
class Branch:
    """What hangs below one root port: a switch with devices, or a single device."""

    devices: list[Device]
    package: int | None = 0  # None: no locality


@dataclass
class Machine:
    """Packages of cores, one NUMA node each, and branches of devices."""

    branches: list[Branch]
    packages: int = 2
    cores: int = 16  # of each package
    smt: int = 2
    disallowed: frozenset[int] = field(default_factory=frozenset)

    def cpus_of(self, package: int | None) -> frozenset[int]:
        """SMT siblings are numbered as Linux does on most machines: all first threads, then all second ones."""
        total = self.packages * self.cores
        packages = range(self.packages) if package is None else (package,)
        return frozenset(
            thread * total + one * self.cores + core
            for one in packages
            for core in range(self.cores)
            for thread in range(self.smt)
        )

    @property
    def cpus(self) -> frozenset[int]:
        return self.cpus_of(None)

    def xml(self) -> str:
        return _Writer(self).text()

    def write_xml(self, path: Path) -> Path:
        path.write_text(self.xml())
        return path


def gpu() -> Device:
    return Device("gpu")


def nic(
    index: int, model: tuple[str, str, str, float] = CONNECTX7, *, hidden: bool = False, active: bool = True
) -> Device:
    vendor, device, name, link = model
    return Device("nic", vendor, device, None if hidden else name.format(index), link, active)


def standard(nics: int, *, package_of: tuple[int | None, ...] = (0, 0, 0, 0, 1, 1, 1, 1)) -> Machine:
    """8 GPUs, each with its share of the NICs under a switch of its own."""
    share = nics // 8
    return Machine(
        [Branch([gpu(), *(nic(index * share + i) for i in range(share))], package_of[index]) for index in range(8)]
    )


def bitmap(cpus: frozenset[int]) -> str:
    number = sum(1 << cpu for cpu in cpus)
    words = []
    while number or not words:
        words.append(f"0x{number & 0xFFFFFFFF:08x}")
        number >>= 32
    return ",".join(reversed(words))


class _Writer:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<!DOCTYPE topology SYSTEM "hwloc2.dtd">']
        self.serial = itertools.count(1)

    def open(self, kind: str, *, leaf: bool = False, **attributes: object) -> None:
        attributes["gp_index"] = next(self.serial)
        text = " ".join(f"{name}={quoteattr(str(value))}" for name, value in attributes.items())
        self.lines.append(f'<object type="{kind}" {text}{"/" if leaf else ""}>')

    def close(self) -> None:
        self.lines.append("</object>")

    def sets(self, cpus: frozenset[int], nodes: frozenset[int]) -> dict[str, object]:
        both = {"cpuset": bitmap(cpus), "complete_cpuset": bitmap(cpus)}
        return {**both, "nodeset": bitmap(nodes), "complete_nodeset": bitmap(nodes)}

    def text(self) -> str:
        machine = self.machine
        nodes = frozenset(range(machine.packages))
        self.lines.append('<topology version="2.0">')
        self.open(
            "Machine",
            os_index=0,
            **self.sets(machine.cpus, nodes),
            allowed_cpuset=bitmap(machine.cpus - machine.disallowed),
            allowed_nodeset=bitmap(nodes),
        )
        buses = itertools.count(1)
        for package in range(machine.packages):
            self.open("Package", os_index=package, **self.sets(machine.cpus_of(package), frozenset((package,))))
            self.open(
                "NUMANode", leaf=True, os_index=package, local_memory=1 << 38,
                **self.sets(machine.cpus_of(package), frozenset((package,))),
            )  # fmt: skip
            total = machine.packages * machine.cores
            for core in range(machine.cores):
                threads = [t * total + package * machine.cores + core for t in range(machine.smt)]
                self.open("Core", os_index=core, **self.sets(frozenset(threads), frozenset((package,))))
                for thread in threads:
                    self.open(
                        "PU", leaf=True, os_index=thread, **self.sets(frozenset((thread,)), frozenset((package,)))
                    )
                self.close()
            for branch in machine.branches:
                if branch.package == package:
                    self.branch(branch, next(buses))
            self.close()
        for branch in machine.branches:
            if branch.package is None:
                self.branch(branch, next(buses))
        self.close()
        self.lines.append("</topology>")
        return "\n".join(self.lines)

    def branch(self, branch: Branch, bus: int) -> None:
        """A host bridge, a root port, a switch's upstream port, and a downstream port for each device."""
        domain, last = f"{bus:04x}", 2 + len(branch.devices)
        self.open("Bridge", bridge_type="0-1", depth=0, bridge_pci=f"{domain}:[00-{last:02x}]")
        self.bridge(f"{domain}:00:01.0", 1, f"{domain}:[01-{last:02x}]")
        if len(branch.devices) == 1:
            self.device(branch.devices[0], f"{domain}:01:00.0")
        else:
            self.bridge(f"{domain}:01:00.0", 2, f"{domain}:[02-{last:02x}]")
            for index, device in enumerate(branch.devices):
                inner = f"{3 + index:02x}"
                self.bridge(f"{domain}:02:{index:02x}.0", 3, f"{domain}:[{inner}-{inner}]")
                self.device(device, f"{domain}:{inner}:00.0")
                self.close()
            self.close()
        self.close()
        self.close()

    def bridge(self, busid: str, depth: int, below: str) -> None:
        kind = "0604 [8086:352a] [0000:0000] 04"
        self.open(
            "Bridge",
            bridge_type="1-1",
            depth=depth,
            bridge_pci=below,
            pci_busid=busid,
            pci_type=kind,
            pci_link_speed=63.0,
        )

    def device(self, device: Device, busid: str) -> None:
        pci_class = "0302" if device.kind == "gpu" else "0207" if device.vendor == "15b3" else "0200"
        kind = f"{pci_class} [{device.vendor}:{device.device}] [0000:0000] a1"
        self.open("PCIDev", pci_busid=busid, pci_type=kind, pci_link_speed=f"{device.link:.6f}")
        if device.name is not None:
            self.open("OSDev", name=device.name, osdev_type=3)
            self.lines.append(f'<info name="Port1State" value="{4 if device.active else 1}"/>')
            self.close()
        self.close()
