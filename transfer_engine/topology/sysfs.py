"""What Linux says under /sys and /proc: the whole topology where hwloc is missing, and what hwloc does not know.

Every function takes the root of the file tree, so that recorded trees serve as well as "/".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from . import cpusets, identify
from .model import NOWHERE, Core, Gpu, Nic, Place, Topology

_ROOT = Path("/")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", re.IGNORECASE)


def read_text(path: Path) -> str | None:
    """A small file's text without its end of line; None when it cannot be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def read_number(path: Path, base: int = 10) -> int | None:
    """A small file's number; None when there is none."""
    try:
        return int(read_text(path) or "", base)
    except ValueError:
        return None


def read_cpus(path: Path) -> frozenset[int]:
    """A small file's list of CPUs; empty when there is none."""
    try:
        return cpusets.from_list(read_text(path) or "")
    except ValueError:
        return frozenset()


def names_in(path: Path) -> list[str]:
    """The entries of a directory, sorted; none when it cannot be read."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def discover(root: Path = _ROOT) -> Topology:
    """The topology from sysfs alone; what is missing there is missing in the result. Never raises."""
    cores = _cores(root)
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    bus = root / "sys/bus/pci/devices"
    for bus_id in names_in(bus):
        folder = bus / bus_id
        pci_class = (read_number(folder / "class", 16) or 0) >> 8
        vendor, device = (read_number(folder / name, 16) or 0 for name in ("vendor", "device"))
        model = identify.model_of(vendor, device)
        if identify.is_gpu(pci_class, vendor):
            gpus.append(Gpu(index=len(gpus), model=model, place=place_of(folder, cores)))
        elif identify.is_network(pci_class):
            rdma_model = identify.speaks_rdma(pci_class, vendor, device)
            nics.extend(_nics(folder, place_of(folder, cores), model, rdma_model, vendor))
    return Topology(source="sysfs", cores=cores, gpus=tuple(gpus), nics=tuple(nics), allowed=_online(root))


def _online(root: Path) -> frozenset[int]:
    return read_cpus(root / "sys/fs/cgroup/cpuset.cpus.effective") or read_cpus(root / "sys/devices/system/cpu/online")


def _cores(root: Path) -> tuple[Core, ...]:
    numa_of: dict[int, int] = {}
    nodes = root / "sys/devices/system/node"
    for name in reversed(names_in(nodes)):  # of two nodes with the same CPUs the first counts
        if name.startswith("node") and name[4:].isdigit():
            numa_of.update(dict.fromkeys(read_cpus(nodes / name / "cpulist"), int(name[4:])))
    found = {}
    cpus = root / "sys/devices/system/cpu"
    for cpu in sorted(read_cpus(cpus / "online")):
        topology = cpus / f"cpu{cpu}/topology"
        siblings = read_cpus(topology / "thread_siblings_list") or frozenset((cpu,))
        found[tuple(sorted(siblings))] = read_number(topology / "physical_package_id")
    return tuple(
        Core(index=index, cpus=threads, numa=numa_of.get(threads[0]), package=package if package != -1 else None)
        for index, (threads, package) in enumerate(sorted(found.items()))
    )


def place_of(folder: Path, cores: tuple[Core, ...]) -> Place:
    """Where the PCI device behind a sysfs folder sits."""
    real = Path(os.path.realpath(folder))
    path = tuple(part for part in real.parts[:-1] if _PCI_ADDRESS.fullmatch(part) or _HOST_BRIDGE.fullmatch(part))
    node = read_number(folder / "numa_node")
    nodes = {core.numa for core in cores}
    numa = node if node is not None and node >= 0 else next(iter(nodes)) if len(nodes) == 1 else None
    packages = {core.package for core in cores if numa is None or core.numa == numa}
    package = next(iter(packages)) if len(packages) == 1 else None
    return Place(bus_id=real.name.lower(), path=path, numa=numa, package=package)


def _nics(folder: Path, place: Place, model: str, rdma_model: bool, vendor: int) -> Iterator[Nic]:
    interfaces = tuple(names_in(folder / "net")) or tuple(
        name for child in names_in(folder) if child.startswith("virtio") for name in names_in(folder / child / "net")
    )
    devices = names_in(folder / "infiniband")
    for name in devices:
        yield Nic(name=name, model=model, place=place, rdma=name, interfaces=interfaces)
    if not devices and (rdma_model or interfaces):
        yield Nic(
            name=interfaces[0] if interfaces else str(place.bus_id),
            model=model,
            place=place,
            interfaces=interfaces,
            unusable=identify.why_hidden(vendor) if rdma_model else None,
        )


# --- what hwloc does not know ---------------------------------------------------------------------------------------


def complete(topology: Topology, root: Path = _ROOT) -> Topology:
    """Adds rates, port states, software RDMA devices, and what is hidden from this process. Never raises."""
    nics = [_with_state(nic, root) for nic in topology.nics]
    known = {nic.rdma for nic in nics}
    for name in names_in(root / "sys/class/infiniband"):
        if name not in known:
            nics.append(_with_state(_software(name, root, topology.cores), root))
    gpus = tuple(_with_access(gpu, root) for gpu in topology.gpus)
    return replace(topology, nics=tuple(nics), gpus=gpus)


def _software(name: str, root: Path, cores: tuple[Core, ...]) -> Nic:
    """An RDMA device that the PCI tree does not show: Soft-RoCE, or one passed through without its tree."""
    device = root / "sys/class/infiniband" / name
    parent = read_text(device / "parent")
    place = place_of(device / "device", cores) if (device / "device").exists() else NOWHERE
    model = "software" if parent else "unknown"
    return Nic(name=name, model=model, place=place, rdma=name, interfaces=(parent,) if parent else ())


def _with_state(nic: Nic, root: Path) -> Nic:
    if nic.rdma is None:
        rates = [read_number(root / "sys/class/net" / name / "speed") or 0 for name in nic.interfaces]
        return replace(nic, rate_gbps=max(rates) / 1000) if rates and max(rates) > 0 else nic
    ports = root / "sys/class/infiniband" / nic.rdma / "ports"
    names = names_in(ports)
    rates_gbps = [_rate(read_text(ports / port / "rate")) for port in names]
    rate = max((value for value in rates_gbps if value), default=None)
    states = [read_text(ports / port / "state") or "" for port in names]
    unusable = nic.unusable
    if states and not any("ACTIVE" in state for state in states):
        unusable = f"its port is not active ({states[0].partition(': ')[2] or states[0]})"
    unusable = unusable or _closed_door(nic.rdma, root)
    return replace(nic, rate_gbps=rate or nic.rate_gbps, unusable=unusable)


def _rate(text: str | None) -> float | None:
    """The number in "400 Gb/sec (4X NDR)"."""
    match = re.match(r"([0-9.]+)\s*Gb/sec", text or "")
    try:
        return float(match.group(1)) if match else None
    except ValueError:
        return None


def uverbs_of(device: str, root: Path = _ROOT) -> Path | None:
    """The device file through which a process reaches an RDMA device; None when the kernel names none."""
    classes = root / "sys/class/infiniband_verbs"
    for name in names_in(classes):
        if read_text(classes / name / "ibdev") == device:
            return root / "dev/infiniband" / name
    return None


def _closed_door(device: str, root: Path) -> str | None:
    """Why this process cannot open an RDMA device, or None."""
    node = uverbs_of(device, root)
    if node is None:
        return None if not names_in(root / "sys/class/infiniband_verbs") else "the kernel offers no verbs for it"
    shown = Path("/") / node.relative_to(root)
    if not node.exists():
        return f"{shown} is missing: hidden from this container"
    return None if os.access(node, os.R_OK | os.W_OK) else f"{shown} may not be opened by this user"


def _with_access(gpu: Gpu, root: Path) -> Gpu:
    """The driver's view of a GPU: its name, its number, and whether this process may open it."""
    folder = root / "proc/driver/nvidia/gpus"
    if not folder.is_dir():
        return replace(gpu, unusable="the NVIDIA driver is not loaded, or hidden from this container")
    information = read_text(folder / str(gpu.place.bus_id) / "information")
    if information is None:
        return replace(gpu, unusable="the NVIDIA driver does not serve it")
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in information.splitlines())}
    node = root / "dev" / f"nvidia{facts.get('Device Minor', '')}"
    unusable = None
    if not node.exists():
        unusable = f"{Path('/') / node.relative_to(root)} is missing: hidden from this container"
    elif not os.access(node, os.R_OK | os.W_OK):
        unusable = f"{Path('/') / node.relative_to(root)} may not be opened by this user"
    return replace(gpu, model=facts.get("Model") or gpu.model, uuid=facts.get("GPU UUID"), unusable=unusable)
