"""The command line over the devices of the guest."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from transfer_engine.tools.cli import group
from transfer_engine.tools.doctor import host

from . import network
from .launch import SLOW_ENGINES

COMMAND = str(Path(sysconfig.get_path("scripts")) / "transfer-engine")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLOW_ENGINES.items():
        monkeypatch.setenv(name, value)


def test_loopback_between_two_processes_finds_every_byte_right() -> None:
    done = run("loopback", "--transport", "cx7", "--nics", "rxe0,rxe1", "--quick", "--max-size", "270000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every byte right" in done.stdout
    for operation in ("write", "batch", "pages", "message"):
        assert operation in done.stdout


def test_doctor_finds_the_transport_working_and_names_the_gid_of_each_port_and_why(monkeypatch, capsys) -> None:
    monkeypatch.setattr(host, "_CHILD_S", 250.0)  # it starts eight interpreters at once, on a slow machine
    status = group.main(["doctor", "--transport", "cx7", "--json"], standalone_mode=False)
    said = capsys.readouterr().out
    assert status == 0, said
    findings = json.loads(said)["findings"]
    transport = next(finding for finding in findings if finding["id"] == "transport.cx7")
    assert transport["severity"] == "ok", transport
    texts = "\n".join(finding["what"] for finding in findings)
    for number in range(4):
        assert f"rxe{number}" in texts
        assert f"10.77.0.{number + 1}" in texts
    assert "RoCE v2, IPv4-mapped" in texts


def test_topo_shows_the_gid_of_each_port_and_why_and_which_port_has_no_cable(link_down, capsys) -> None:
    with link_down("rxe3"):
        assert group.main(["topo", "--json"], standalone_mode=False) == 0  # starting Python takes seconds here
    ports = {port["name"]: port for port in json.loads(capsys.readouterr().out)["rdma_ports"]}
    assert list(ports) == [f"rxe{number}:1" for number in range(4)]
    for number in range(3):
        port = ports[f"rxe{number}:1"]
        assert port["gid"] == f"::ffff:10.77.0.{number + 1}"
        assert port["gid_index"] == 1
        assert port["gid_kind"] == "RoCE v2"
        assert "IPv4-mapped" in port["why"]
        assert not port["unusable"]
    assert "DOWN" in ports["rxe3:1"]["unusable"]
    assert network.is_connected("rxe3")
