"""`serve` on one host, `loopback` and `bench` on another: what they say when it works, and why when it does not."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from pathlib import Path

import pytest

import transfer_engine as te

from .conftest import Host, Wire

pytestmark = pytest.mark.multiprocess


def paste(host: Host, line: str, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the line that the other host printed."""
    program, *arguments = shlex.split(line)
    assert program == "transfer-engine"
    return host.run(*arguments, *more, **environment)


@pytest.mark.parametrize(("family", "mtu"), [("v4", 1500), ("v4", 9000), ("v6", 1500), ("v6", 9000), ("both", 1500)])
def test_two_hosts_exchange_verified_bytes(wire: Wire, family: str, mtu: int) -> None:
    wire.mtu(mtu)
    if family != "v6":
        wire.v4()
    if family != "v4":
        wire.v6()
    with wire.one.serving("--once") as (server, line):
        done = paste(wire.other, line, "--quick")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "every byte right" in done.stdout
        assert server.wait(20) == 0


def test_the_address_is_that_of_the_interface_other_hosts_see(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        [nic] = te.Address.from_text(line.split()[-1]).nics
    assert nic.startswith("10.77.0.1:")


def test_ports_stay_in_the_range_that_a_firewall_opens(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving("--nics", "3", "--once", TE_PORTS="20100-20105") as (_, line):
        nics = te.Address.from_text(line.split()[-1]).nics
        assert len(nics) == 3
        assert all(20100 <= int(nic.rpartition(":")[2]) <= 20105 for nic in nics)
        done = paste(wire.other, line, "--quick", "--nics", "2", TE_PORTS="20200-20205")
        assert done.returncode == 0, done.stdout + done.stderr


def test_bench_between_hosts_measures_both_ways_and_draws_a_picture(wire: Wire, tmp_path: Path) -> None:
    wire.v4()
    picture = tmp_path / "bench.png"
    with wire.one.serving("--once") as (_, line):
        done = wire.other.run(
            "bench", line.split()[-1], "--json", "--bidirectional", "--depth", "4", "--max-size", "65536",
            "--seconds", "0.02", "--plot", str(picture),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    [transport] = document["transports"]
    assert transport["remote"]["transport"] == "tcp"
    for row in transport["rows"]:
        assert set(row["measured"]) == {"outgoing", "incoming", "both"}
        assert row["measured"]["outgoing"]["latency"]["p99.9"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_measuring(wire: Wire, tmp_path: Path) -> None:
    for name in ("picture.txt", "nowhere/picture.png"):
        done = wire.one.run("bench", "--transport", "tcp", "--plot", str(tmp_path / name))
        assert done.returncode == 2
        assert "--plot" in done.stderr
        assert done.stdout == ""


def test_a_dropped_port_is_named_as_a_firewall(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        port = int(te.Address.from_text(line.split()[-1]).nics[0].rpartition(":")[2])
        wire.one.drop_port(port)
        done = paste(wire.other, line, "--quick", "--timeout", "20", TE_CONNECT_TIMEOUT_S="2")
    assert done.returncode == 4
    assert f"10.77.0.1:{port} does not answer a plain TCP connection" in done.stderr
    assert "firewall" in done.stderr
    assert "TE_PORTS" in done.stderr


def test_an_address_of_a_server_that_has_ended_is_told_from_a_firewall(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        pass
    done = paste(wire.other, line, "--quick", TE_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 4
    assert "refuses connections: nothing listens there, or a firewall rejects them in its name" in done.stderr
    assert "still running" in done.stderr


def test_a_firewall_that_rejects_is_named(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving(TE_PORTS="20100-20100") as (server, line):
        wire.one.reject_port(20100)
        done = paste(wire.other, line, "--quick", TE_CONNECT_TIMEOUT_S="2")
        assert server.poll() is None
    assert done.returncode == 4
    assert "10.77.0.1:20100 cannot be reached (No route to host), although this host has a route" in done.stderr
    assert "firewall" in done.stderr


@pytest.mark.parametrize("kind", ["blackhole", "prohibit", "unreachable"])
def test_a_route_of_this_host_that_forbids_the_way_is_named(wire: Wire, kind: str) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        wire.other.ip("route", "add", kind, "10.77.0.1/32")
        done = paste(wire.other, line, "--quick", TE_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 4
    assert ("this host has no route there" if kind == "unreachable" else f"a {kind} route of this host") in done.stderr
    assert "ip route get 10.77.0.1" in done.stderr


def test_the_client_needs_no_open_port(wire: Wire) -> None:
    wire.v4()
    wire.other.drop_port(20200)
    with wire.one.serving("--once") as (_, line):
        done = paste(wire.other, line, "--quick", TE_PORTS="20200-20200")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_time_out_shorter_than_connecting_still_gets_its_cause(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        wire.one.ip("link", "set", wire.one.interface, "down")
        done = paste(wire.other, line, "--quick", "--timeout", "1")
    assert done.returncode == 4
    assert "why: 10.77.0.1:" in done.stderr


def test_a_host_whose_own_link_is_down_says_so_at_once(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        wire.other.ip("link", "set", wire.other.interface, "down")
        begin = time.monotonic()
        done = wire.other.run("bench", line.split()[-1])
    assert done.returncode == 4
    assert time.monotonic() - begin < 8  # and not the 10 s that connecting may take
    assert "no network interface of it is up" in done.stderr
    assert f"{wire.other.interface} (10.77.0.2, down)" in done.stderr


def test_topo_names_the_virtual_interfaces_where_there_is_no_nic(wire: Wire) -> None:
    done = wire.one.run("topo")
    assert done.returncode == 0
    assert ("0 NICs" in done.stdout) is (f"are virtual serve tcp all the same: {wire.one.interface}" in done.stdout)


def test_serve_says_where_it_listens(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving(TE_PORTS="20400-20400") as (server, _):
        assert server.stdout is not None
        assert server.stdout.readline() == f"serving tcp on {wire.one.interface} at 10.77.0.1:20400\n"
    with wire.one.serving("--json", TE_PORTS="20401-20401") as (_, line):
        document = json.loads(line)
        assert (document["transport"], document["nics"]) == ("tcp", [wire.one.interface])
        assert document["listens"] == ["10.77.0.1:20401"]


def test_an_address_of_an_earlier_server_at_the_same_port_is_told(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving(TE_PORTS="20300-20300") as (_, first):
        pass
    with wire.one.serving(TE_PORTS="20300-20300"):
        done = paste(wire.other, first, "--quick", TE_CONNECT_TIMEOUT_S="2")
    assert done.returncode == 4
    assert "restarted" in done.stderr or "earlier run" in done.stderr


def test_a_host_without_a_route_is_named(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        wire.other.ip("address", "del", "10.77.0.2/24", "dev", wire.other.interface)
        wire.other.give("10.99.0.2", 24)
        done = paste(wire.other, line, "--quick", TE_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 4
    assert "no route" in done.stderr


def test_a_host_that_is_down_is_named(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        wire.one.ip("link", "set", wire.one.interface, "down")
        done = paste(wire.other, line, "--quick", TE_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 4
    assert "not up" in done.stderr or "does not answer" in done.stderr


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_a_name_that_leads_every_node_to_itself_is_refused(wire: Wire, name: str) -> None:
    wire.v4()
    done = wire.one.run("serve", "--host", name)
    assert done.returncode == 2
    assert "every node finds itself" in done.stderr
    assert "/etc/hosts" in done.stderr


def test_the_name_of_this_host_chooses_the_nic(wire: Wire) -> None:
    wire.v4()
    wire.one.give("10.77.1.1", 24)
    with wire.one.serving("--host", "10.77.1.1") as (_, line):
        assert te.Address.from_text(line.split()[-1]).nics[0].startswith("10.77.1.1:")
    done = wire.one.run("serve", "--host", "10.77.0.2")
    assert done.returncode == 2
    assert "10.77.0.2: cannot bind to this address" in done.stderr
    assert f"this host has {wire.one.interface} (10.77.0.1)" in done.stderr
    done = wire.one.run("serve", "--host", "no-such-host.invalid")
    assert done.returncode == 2
    assert "cannot be resolved" in done.stderr


def test_a_host_with_nothing_but_its_loopback_says_that_others_cannot_reach_it(wire: Wire) -> None:
    with wire.one.started("serve", "--transport", "tcp") as process:
        assert process.stderr is not None
        assert "only this host can reach 127.0.0.1" in process.stderr.readline()


def test_a_loopback_address_from_another_host_is_named(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving("--nics", "lo") as (_, line):
        done = paste(wire.other, line, "--quick", "--nics", wire.other.interface, TE_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 4
    assert "is a loopback address: it leads to this very host" in done.stderr


def test_a_side_that_uses_its_loopback_cannot_be_answered_and_is_told(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (_, line):
        done = paste(wire.other, line, "--quick", "--nics", "lo", TE_CONNECT_TIMEOUT_S="1")
    assert done.returncode == 4
    assert "a loopback address, so the other cannot answer" in done.stderr


def test_a_cut_wire_ends_in_a_named_loss_within_the_bound(wire: Wire) -> None:
    wire.v4()
    with wire.one.serving() as (server, line):
        with wire.other.started(*line.split()[1:], TE_PEER_TIMEOUT_S="1") as client:
            assert server.stderr is not None
            assert server.stderr.readline().startswith("client")
            wire.one.ip("link", "set", wire.one.interface, "down")
            _, error = client.communicate(timeout=30)
            assert client.returncode == 4
            assert "lost" in error or "no sign of life" in error
            assert "why: 10.77.0.1:" in error
            assert "disconnect()" not in error
        assert server.poll() is None  # it waits for the next client
