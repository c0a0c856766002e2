"""The same machines as trees of /sys, /proc and /dev."""

from __future__ import annotations

import itertools
from pathlib import Path

from machines import Device, Machine

from transfer_engine.topology.cpusets import to_list


def put(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


def write_tree(machine: Machine, root: Path, *, driver: bool = True) -> Path:
    """`driver`: NVIDIA's driver is loaded and its device files are there."""
    _cpus(machine, root)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    minors = itertools.count()
    bus = 0
    for package in (*range(machine.packages), None):
        for branch in machine.branches:
            if branch.package != package:
                continue
            bus += 1
            domain = f"{bus:04x}"
            port = root / f"sys/devices/pci{domain}:00/{domain}:00:01.0"
            if len(branch.devices) == 1:
                _device(root, port / f"{domain}:01:00.0", branch.devices[0], package, minors if driver else None)
                continue
            switch = port / f"{domain}:01:00.0"
            for index, device in enumerate(branch.devices):
                folder = switch / f"{domain}:02:{index:02x}.0/{domain}:{3 + index:02x}:00.0"
                _device(root, folder, device, package, minors if driver else None)
    return root


def _cpus(machine: Machine, root: Path) -> None:
    cpus = root / "sys/devices/system/cpu"
    put(cpus / "online", to_list(machine.cpus))
    total = machine.packages * machine.cores
    for package in range(machine.packages):
        own = machine.cpus_of(package)
        put(root / f"sys/devices/system/node/node{package}/cpulist", to_list(own))
        for cpu in own:
            put(cpus / f"cpu{cpu}/topology/physical_package_id", package)
            siblings = [thread * total + cpu % total for thread in range(machine.smt)]
            put(cpus / f"cpu{cpu}/topology/thread_siblings_list", to_list(siblings))


def _device(root: Path, folder: Path, device: Device, package: int | None, minors: itertools.count[int] | None) -> None:
    pci_class = "0x030200" if device.kind == "gpu" else "0x020700" if device.vendor == "15b3" else "0x020000"
    for name, value in (("class", pci_class), ("vendor", f"0x{device.vendor}"), ("device", f"0x{device.device}")):
        put(folder / name, value)
    put(folder / "numa_node", -1 if package is None else package)
    (root / "sys/bus/pci/devices" / folder.name).symlink_to(folder)
    if device.kind == "gpu" and minors is not None:
        minor = next(minors)
        information = f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{minor:08x}-aaaa\nDevice Minor: \t {minor}"
        put(root / "proc/driver/nvidia/gpus" / folder.name / "information", information)
        put(root / f"dev/nvidia{minor}", "")
    if device.name is not None:
        (folder / "infiniband" / device.name).mkdir(parents=True)
        efa = device.vendor == "1d0f"
        put(folder / "infiniband" / device.name / "node_type", "7: unspecified" if efa else "1: CA")
        port = folder / "infiniband" / device.name / "ports/1"
        put(port / "state", "4: ACTIVE" if device.active else "1: DOWN")
        put(port / "rate", "400 Gb/sec (4X NDR)")
        put(port / "link_layer", "Unspecified" if efa else "Ethernet")
        link = root / "sys/class/infiniband" / device.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder / "infiniband" / device.name)
        number = len(list(link.parent.iterdir())) - 1
        put(root / f"sys/class/infiniband_verbs/uverbs{number}/ibdev", device.name)
        put(root / f"dev/infiniband/uverbs{number}", "")
