"""The launcher's variables, CUDA's numbering, masks and quotas."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from machines import EFA, Branch, Machine, gpu, nic, standard
from trees import put

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology import LocalProcess, assignment, processes
from transfer_engine.topology.recording import parse

GPUS = tuple(dataclasses.replace(one, uuid=f"GPU-{one.index}0") for one in parse(standard(8).xml(), "x").gpus)


def test_torchruns_variables_are_understood() -> None:
    environment = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    assert topology.local_process(environment) == LocalProcess(3, 8, known=True)
    assert topology.local_process({}) == LocalProcess(0, 1, known=False)


@pytest.mark.parametrize("values", [("3", ""), ("", "8"), ("8", "8"), ("-1", "8"), ("a", "8"), ("0", "0")])
def test_contradictions_are_refused_and_named(values: tuple[str, str]) -> None:
    environment = dict(zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), values, strict=True))
    with pytest.raises(te.ConfigError, match="LOCAL_RANK"):
        topology.local_process(environment)


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        (None, tuple(range(8))),
        ("", ()),
        ("3", (3,)),
        ("2,0", (2, 0)),
        (" 1 , 2 ", (1, 2)),
        ("1,1,2", (1,)),
        ("0,9,1", (0,)),
        ("-1", ()),
        ("GPU-5", (5,)),
        ("GPU-50,GPU-1", (5, 1)),
        ("GPU-", ()),
        ("MIG-abc", ()),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts(value: str | None, visible: tuple[int, ...]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert processes.visible_gpus(GPUS, environment) == visible


def test_hidden_gpus_have_no_number() -> None:
    gpus = (dataclasses.replace(GPUS[0], unusable="hidden"), *GPUS[1:])
    assert processes.visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "0,1"}) == (1, 2)


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    put(tmp_path / "proc/self/cgroup", "0::/slice/pod")
    put(tmp_path / "sys/fs/cgroup/cpu.max", "max 100000")
    put(tmp_path / "sys/fs/cgroup/slice/cpu.max", "250000 100000")
    put(tmp_path / "sys/fs/cgroup/slice/pod/cpu.max", "400000 100000")
    assert processes.cpu_quota(tmp_path) == 2.5


def test_the_quota_of_older_control_groups_counts(tmp_path: Path) -> None:
    put(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n0::/")
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    put(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", 150000)
    put(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    assert processes.cpu_quota(tmp_path) == 1.5
    put(folder / "docker/abc/cpu.cfs_quota_us", -1)
    put(folder / "docker/abc/cpu.cfs_period_us", 100000)
    assert processes.cpu_quota(tmp_path) is None


def test_no_control_group_is_no_quota(tmp_path: Path) -> None:
    assert processes.cpu_quota(tmp_path) is None


def test_a_mask_narrower_than_the_parents_is_ones_own(tmp_path: Path) -> None:
    put(tmp_path / f"proc/{os.getppid()}/status", "Name:\tx\nCpus_allowed_list:\t0-15")
    put(tmp_path / "proc/self/status", "Cpus_allowed_list:\t0-15")
    assert not processes.mask_is_own(tmp_path)
    put(tmp_path / "proc/self/status", "Cpus_allowed_list:\t4-7")
    assert processes.mask_is_own(tmp_path)
    assert not processes.mask_is_own(tmp_path / "absent")


# --- place(): from the settings of an engine to those that this machine gives -----------------------------------------


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process is on a machine with 8 GPUs, 16 EFA NICs and 64 CPUs."""
    machine = Machine([Branch([gpu(), nic(2 * i, EFA), nic(2 * i + 1, EFA)], i // 4) for i in range(8)])
    monkeypatch.setattr(assignment, "discover", lambda: parse(machine.xml(), "a recording"))
    monkeypatch.setattr(processes, "allowed_cpus", lambda: machine.cpus)
    monkeypatch.setattr(processes, "cpu_quota", lambda: None)
    monkeypatch.setattr(processes, "mask_is_own", lambda: False)
    return machine


def test_a_process_of_torchrun_gets_its_nics_and_core(on: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settings, found = topology.place(te.Settings(transport="efa"), gpu=5)
    assert settings.nics == ("rdmap10s0", "rdmap11s0")
    assert settings.core in on.cpus_of(1)
    assert found is not None


def test_without_a_launcher_no_core_is_taken(on: Machine) -> None:
    settings, _ = topology.place(te.Settings(transport="efa"), gpu=2)
    assert (settings.nics, settings.core) == (("rdmap4s0", "rdmap5s0"), "auto")
    assert topology.place(te.Settings(transport="efa"))[0].nics == tuple(f"rdmap{i}s0" for i in range(16))


def test_what_is_set_stays(on: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    wished = te.Settings(transport="efa", nics=("rdmap7s0",), core=9)
    assert topology.place(wished) == (wished, None)
    assert topology.place(te.Settings(transport="sim"))[0] == te.Settings(transport="sim")


def test_a_gpu_that_is_not_there_is_refused(on: Machine) -> None:
    with pytest.raises(te.ConfigError, match="cuda:8: this process sees 8 GPUs"):
        topology.place(te.Settings(transport="efa"), gpu=8)
