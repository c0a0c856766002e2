"""The fallback without hwloc, and what only sysfs knows."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from machines import EFA, Branch, Machine, gpu, nic, standard
from trees import put, write_tree

from transfer_engine.topology import Distance, Topology, assign, distance, sysfs
from transfer_engine.topology.recording import parse


def look(root: Path) -> Topology:
    return sysfs.complete(sysfs.discover(root), root)


@pytest.mark.parametrize("package_of", [(0, 0, 0, 0, 1, 1, 1, 1), (None,) * 8], ids=["locality", "no locality"])
def test_the_fallback_gives_the_same_plan_as_hwloc(package_of: tuple[int | None, ...], tmp_path: Path) -> None:
    machine = standard(16, package_of=package_of)
    without = look(write_tree(machine, tmp_path))
    through_hwloc = parse(machine.xml(), "a recording")
    assert [core.cpus for core in without.cores] == [core.cpus for core in through_hwloc.cores]
    assert assign(without, 3, 8).plan == assign(through_hwloc, 3, 8).plan


def test_rates_and_names_come_from_the_kernel(tmp_path: Path) -> None:
    found = look(write_tree(standard(8), tmp_path))
    assert {one.rate_gbps for one in found.nics} == {400.0}
    assert (found.gpus[2].model, found.gpus[2].uuid) == ("NVIDIA H200", "GPU-00000002-aaaa")
    assert all(one.unusable is None for one in (*found.gpus, *found.nics))
    assert distance(found.gpus[0].place, found.nics[0].place) is Distance.SWITCH


def test_a_device_file_that_the_container_lacks_is_named(tmp_path: Path) -> None:
    write_tree(standard(8), tmp_path)
    (tmp_path / "dev/infiniband/uverbs3").unlink()
    (tmp_path / "dev/nvidia5").unlink()
    found = look(tmp_path)
    hidden = {one.name: one.unusable for one in found.nics if one.unusable}
    assert hidden == {"mlx5_3": "/dev/infiniband/uverbs3 is missing: hidden from this container"}
    assert [one.unusable for one in found.gpus if one.unusable] == [
        "/dev/nvidia5 is missing: hidden from this container"
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_device_file_that_this_user_may_not_open_is_named(tmp_path: Path) -> None:
    write_tree(standard(8), tmp_path)
    (tmp_path / "dev/infiniband/uverbs0").chmod(0)
    assert look(tmp_path).nics[0].unusable == "/dev/infiniband/uverbs0 may not be opened by this user"


def test_without_the_driver_gpus_are_there_but_not_usable(tmp_path: Path) -> None:
    found = look(write_tree(standard(8), tmp_path, driver=False))
    assert len(found.gpus) == 8
    assert all("driver" in (one.unusable or "") for one in found.gpus)


def test_nics_without_an_rdma_device_and_with_a_dead_port_say_so(tmp_path: Path) -> None:
    machine = Machine([Branch([gpu(), nic(0, hidden=True)], 0), Branch([nic(1, EFA, active=False)], 1)])
    reasons = [one.unusable or "" for one in look(write_tree(machine, tmp_path)).nics]
    assert "mlx5_ib" in reasons[0]
    assert reasons[1] == "its port is not active (DOWN)"


def test_soft_roce_has_no_place_and_is_found(tmp_path: Path) -> None:
    device = tmp_path / "sys/class/infiniband/rxe0"
    put(device / "parent", "eth0")
    put(device / "ports/1/state", "4: ACTIVE")
    found = look(tmp_path)
    assert [(one.name, one.model, one.interfaces) for one in found.nics] == [("rxe0", "software", ("eth0",))]
    assert found.nics[0].place.bus_id is None


def test_interfaces_of_plain_and_virtual_nics_are_found(tmp_path: Path) -> None:
    for address, inner in (("0000:00:03.0", "virtio0/net/eth0"), ("0000:00:04.0", "net/ens4")):
        folder = tmp_path / "sys/devices/pci0000:00" / address
        put(folder / "class", "0x020000")
        put(folder / "vendor", "0x1af4")
        put(folder / "device", "0x1041")
        (folder / inner).mkdir(parents=True)
        link = tmp_path / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    put(tmp_path / "sys/class/net/ens4/speed", 25000)
    put(tmp_path / "sys/class/net/eth0/speed", -1)
    found = look(tmp_path)
    assert [(one.name, one.rate_gbps, one.unusable) for one in found.nics] == [
        ("eth0", None, None),
        ("ens4", 25.0, None),
    ]
    assert assign(found, 0, 1).nics == ("ens4",)


def test_an_empty_tree_is_an_empty_topology(tmp_path: Path) -> None:
    assert look(tmp_path) == Topology(source="sysfs")


def test_nonsense_in_files_is_passed_over(tmp_path: Path) -> None:
    write_tree(standard(8), tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(b"\xff\xfenonsense \x00")
    found = look(tmp_path)
    assert isinstance(found, Topology)
    dataclasses.asdict(found)
