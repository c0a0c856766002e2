"""`transfer-engine topo`, on this machine and on recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from machines import CONNECTX6_DX, Branch, Machine, gpu, nic, standard
from ports import V1, V2, Gid, twice, write_port
from transfer_engine.tools.topo import topo

from transfer_engine import topology


def run(*arguments: str) -> str:
    result = CliRunner().invoke(topo, arguments, standalone_mode=False)
    assert result.exception is None, result.output
    assert result.return_value == 0
    return result.output


def test_this_machine_is_shown() -> None:
    assert "process" in run()
    document = json.loads(run("--json"))
    assert document["schema"] == "transfer-engine/topo/1"
    assert document["topology"]["cores"]
    assert document["plan"]["shares"]


@pytest.mark.parametrize("count", [8, 16, 32])
def test_every_nic_of_a_recorded_machine_is_shown(count: int, tmp_path: Path) -> None:
    path = str(standard(count).write_xml(tmp_path / "machine.xml"))
    text = run("--xml", path, "--matrix")
    assert all(f"mlx5_{index} " in text for index in range(count))
    assert "plan for 8 processes" in text
    document = json.loads(run("--xml", path, "--json"))
    used = [name for share in document["plan"]["shares"] for name in share["nics"]]
    assert sorted(used) == sorted(f"mlx5_{index}" for index in range(count))
    assert document["distances"][0][0] == "PIX"


def test_what_is_not_used_is_shown_with_the_reason(tmp_path: Path) -> None:
    branches = [Branch([gpu(), nic(i, hidden=i == 1)], i) for i in range(2)] + [Branch([nic(9, CONNECTX6_DX)], 0)]
    path = str(Machine(branches).write_xml(tmp_path / "machine.xml"))
    left_out = {entry["nic"]: entry["reason"] for entry in json.loads(run("--xml", path, "--json"))["plan"]["left_out"]}
    assert set(left_out) == {"mlx5_9", "0003:04:00.0"}  # branches of package 0 come first
    text = " ".join(run("--xml", path).split())
    assert text.count("not used:") == 2
    assert "1 NIC for 2 GPUs" in text


def test_what_was_asked_for_and_is_not_there_is_said(tmp_path: Path) -> None:
    bare = str(Machine([]).write_xml(tmp_path / "bare.xml"))
    assert "no GPU and no NIC is here" in run("--xml", bare, "--matrix")
    assert "no EFA device is here" in run("--xml", bare, "--transport", "efa")
    mellanox = str(Machine([Branch([nic(0)], 0)]).write_xml(tmp_path / "mellanox.xml"))
    assert "no GPU is here" in run("--xml", mellanox, "--matrix")
    assert "no EFA device is here" in run("--xml", mellanox, "--transport", "efa")
    assert "note: " not in run("--xml", mellanox, "--transport", "cx7")


def test_the_number_of_processes_comes_from_the_option_or_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(standard(8).write_xml(tmp_path / "machine.xml"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert json.loads(run("--xml", path, "--json"))["processes"] == 2
    assert json.loads(run("--xml", path, "--json", "--processes", "4"))["processes"] == 4


def test_a_file_that_is_no_recording_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text("nonsense")
    result = CliRunner().invoke(topo, ["--xml", str(tmp_path / "x.xml")], standalone_mode=False)
    assert "x.xml: not XML" in str(result.exception)


def test_the_gid_of_every_rdma_port_is_shown_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = {"state": "1: DOWN", "physical": "3: Disabled"}
    write_port(tmp_path, "mlx5_0", gids=twice(Gid("fe80::1"), Gid("::ffff:10.1.2.3")))
    write_port(tmp_path, "mlx5_1", gids=[Gid("fe80::2", V2, "eth1")], **down)  # type: ignore[arg-type]
    write_port(tmp_path, "mlx5_2", gids=[Gid("fe80::3", V1, None)], layer="InfiniBand", lid=7)
    look = topology.rdma_ports
    monkeypatch.setattr(topology, "rdma_ports", lambda **more: look(tmp_path, **more))
    text = " ".join(run().split())
    for part in (
        "mlx5_0:1 ACTIVE Ethernet eth0 3: ::ffff:10.1.2.3 RoCE v2, IPv4-mapped, best of 4",
        "mlx5_1:1 DOWN Ethernet eth1",
        "not used: the port is DOWN (Disabled); `ip link set eth1 up`",
        "mlx5_2:1 ACTIVE InfiniBand LID 7 - 0: fe80::3 InfiniBand, index 0",
    ):
        assert part in text
    ports = json.loads(run("--json"))["rdma_ports"]
    assert [port["name"] for port in ports] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]
    assert [port["gid_index"] for port in ports] == [3, 0, 0]
    monkeypatch.setenv("TE_GID_INDEX", "2")
    assert "2: ::ffff:10.1.2.3 RoCE v1, IPv4-mapped, gid_index 2 as set" in " ".join(run().split())


def test_a_recorded_machine_shows_no_ports_of_this_one(tmp_path: Path) -> None:
    path = str(standard(8).write_xml(tmp_path / "machine.xml"))
    assert json.loads(run("--xml", path, "--json"))["rdma_ports"] == []
