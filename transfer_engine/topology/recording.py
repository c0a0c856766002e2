"""hwloc's XML (version 2) to a Topology. Pure.

hwloc does not export a device's NUMA node: it hangs the device below the object whose CPUs are local to it. So a device
below the machine as a whole has no known place, unless the machine has only one node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

from . import cpusets, identify
from .model import Core, Gpu, Nic, Place, Topology

MOST_BYTES = 256 << 20
_NETWORK, _OPENFABRICS = "2", "3"
_PORT_ACTIVE = "4"
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\]", re.IGNORECASE)


class RecordingError(ValueError):
    """The text is no topology of hwloc's; the message says why."""


@dataclass
class _Found:
    """What the walk over the tree collects."""

    cores: list[tuple[tuple[int, ...], int | None]] = field(default_factory=list)  # CPUs, package
    nodes: list[tuple[int, frozenset[int]]] = field(default_factory=list)  # NUMA node, CPUs
    devices: list[tuple[ElementTree.Element, tuple[str, ...], frozenset[int]]] = field(default_factory=list)


def parse(text: str, source: str) -> Topology:
    """A topology from the text of an XML file.

    Args:
        text: as `lstopo --of xml` writes it; GPUs and NICs are found when I/O objects were kept.
        source: what `Topology.source` says.

    Raises:
        RecordingError: not such a file.
    """
    if len(text) > MOST_BYTES or "<!ENTITY" in text:
        raise RecordingError(f"{source}: no topology of hwloc's")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as cause:
        raise RecordingError(f"{source}: not XML: {cause}") from None
    machine = root.find("object")
    if root.tag != "topology" or machine is None or machine.get("type") not in ("Machine", "System"):
        raise RecordingError(f"{source}: XML, but no topology of hwloc's")
    if not (root.get("version") or "").startswith("2"):
        raise RecordingError(f"{source}: version {root.get('version', '1')} of hwloc's XML; 2 is needed")
    try:
        return _topology(machine, source)
    except (ValueError, RecursionError) as cause:
        raise RecordingError(f"{source}: damaged topology: {cause}") from None


def _topology(machine: ElementTree.Element, source: str) -> Topology:
    found = _Found()
    _walk(machine, found, None, frozenset(), ())
    numa_of = _numa_by_cpu(found.nodes)
    cores = tuple(
        Core(index=index, cpus=cpus, numa=numa_of.get(cpus[0]), package=package)
        for index, (cpus, package) in enumerate(sorted(found.cores))
    )
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    for element, path, cpus in sorted(found.devices, key=lambda device: device[0].get("pci_busid", "")):
        place = Place(
            bus_id=element.get("pci_busid"),
            path=path,
            numa=_only({core.numa for core in cores}, {core.numa for core in cores if cpus & set(core.cpus)}),
            package=_only({core.package for core in cores}, {core.package for core in cores if cpus & set(core.cpus)}),
        )
        match = _PCI_TYPE.search(element.get("pci_type", ""))
        if match is None:
            continue
        pci_class, vendor, device = (int(group, 16) for group in match.groups())
        model = identify.model_of(vendor, device)
        if identify.is_gpu(pci_class, vendor):
            gpus.append(Gpu(index=len(gpus), model=_info(element, "PCIDevice") or model, place=place))
        elif identify.is_network(pci_class):
            nics.extend(_nics(element, place, model, identify.speaks_rdma(pci_class, vendor, device), vendor))
    allowed = machine.get("allowed_cpuset")
    return Topology(
        source=source,
        cores=cores,
        gpus=tuple(gpus),
        nics=tuple(nics),
        allowed=cpusets.from_bitmap(allowed) if allowed else frozenset(),
    )


def _walk(
    element: ElementTree.Element, found: _Found, package: int | None, cpus: frozenset[int], path: tuple[str, ...]
) -> None:
    kind = element.get("type")
    if "cpuset" in element.attrib:
        cpus = cpusets.from_bitmap(element.attrib["cpuset"])
    if kind == "Package":
        package = int(element.get("os_index", "0"))
    elif kind == "NUMANode":
        found.nodes.append((int(element.get("os_index", "0")), cpus))
    elif kind == "Bridge":
        path = (*path, element.get("pci_busid") or element.get("bridge_pci") or f"#{element.get('gp_index')}")
    elif kind == "PCIDev":
        found.devices.append((element, path, cpus))
        return
    elif kind in ("Core", "PU"):
        threads = sorted(int(unit.get("os_index", "-1")) for unit in _units(element))
        if threads and not 0 <= threads[0] <= threads[-1] < cpusets.MOST_CPUS:
            raise ValueError("a hardware thread without its number")
        if threads:
            found.cores.append((tuple(threads), package))
        return
    for child in element.iterfind("object"):
        _walk(child, found, package, cpus, path)


def _units(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    return (unit for unit in element.iter("object") if unit.get("type") == "PU")


def _numa_by_cpu(nodes: list[tuple[int, frozenset[int]]]) -> dict[int, int]:
    """Of several nodes with the same CPUs (memory of GPUs counts as a node on some machines) the lowest counts."""
    result: dict[int, int] = {}
    for index, cpus in sorted(nodes, key=lambda node: (-len(node[1]), -node[0])):
        result.update(dict.fromkeys(cpus, index))
    return result


def _only(everywhere: set[int | None], near: set[int | None]) -> int | None:
    """The one node or package that is near; None when there are several, that is: no locality."""
    candidates = near or everywhere
    return next(iter(candidates)) if len(candidates) == 1 else None


def _nics(element: ElementTree.Element, place: Place, model: str, rdma_model: bool, vendor: int) -> Iterator[Nic]:
    """One NIC for each RDMA device of a PCI function, else one for the function."""
    children = [child for child in element.iter("object") if child.get("type") == "OSDev"]
    interfaces = tuple(sorted(str(child.get("name")) for child in children if child.get("osdev_type") == _NETWORK))
    devices = [child for child in children if child.get("osdev_type") == _OPENFABRICS]
    gigabytes = float(element.get("pci_link_speed") or 0)  # 10^9 bytes per second, as hwloc counts
    pcie = round(8 * gigabytes, 1) or None
    for device in devices:
        name = str(device.get("name"))
        state = _info(device, "Port1State")
        unusable = None if state in (None, _PORT_ACTIVE) else "its port is not active"
        yield Nic(
            name=name, model=model, place=place, rdma=name, interfaces=interfaces, pcie_gbps=pcie, unusable=unusable
        )
    if not devices and (rdma_model or interfaces):
        yield Nic(
            name=interfaces[0] if interfaces else str(place.bus_id),
            model=model,
            place=place,
            interfaces=interfaces,
            pcie_gbps=pcie,
            unusable=identify.why_hidden(vendor) if rdma_model else None,
        )


def _info(element: ElementTree.Element, name: str) -> str | None:
    for info in element.iterfind("info"):
        if info.get("name") == name:
            return info.get("value")
    return None
