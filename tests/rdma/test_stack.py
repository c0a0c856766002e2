"""The guest has what other tests build on: devices that really move bytes, and a network whose faults they meet."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import Any

import pytest

from . import network

SUCCESS, RETRIES_EXCEEDED = 0, 12  # ibv_wc_status
RECEIVED, WRITTEN_WITH_IMMEDIATE = 128, 129  # ibv_wc_opcode
GRH_BYTES = 40
KINDS = {"link-local": 0, "IPv4": 1}  # GID indices


def moved(result: dict[str, Any], count: int, length: int) -> None:
    assert result["sent"]["statuses"] == [SUCCESS] * count
    received = result["received"]
    assert received["statuses"] == [SUCCESS] * count
    assert received["opcodes"] == [WRITTEN_WITH_IMMEDIATE] * count
    assert received["immediates"] == list(range(count))
    assert received["lengths"] == [length] * count
    assert result["equal"]
    assert result["guards"]


DEVICES = [f"rxe{number}" for number in range(4)]


def test_there_are_four_active_devices(player) -> None:
    assert player("devices") == DEVICES
    assert all(network.is_connected(device) for device in DEVICES)


def test_each_device_has_a_link_local_and_an_ipv4_gid() -> None:
    for number, device in enumerate(DEVICES):
        link_local, ipv4 = network.gids(device)
        assert link_local.startswith("fe80:")
        assert ipv4 == f"0000:0000:0000:0000:0000:ffff:0a4d:{number + 1:04x}"
        types = Path(f"/sys/class/infiniband/{device}/ports/1/gid_attrs/types")
        assert {(types / str(index)).read_text().strip() for index in (0, 1)} == {"RoCE v2"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "count"), [(1, 1), (4096, 16), (65537, 16)])
def test_writes_with_immediates_arrive_byte_for_byte(player, kind, length, count) -> None:
    before = network.counters("rxe1")["rcvd_pkts"]
    result = player(
        "write", connection=player("connect", source="rxe0", target="rxe1", gid=KINDS[kind], length=length, count=count)
    )
    moved(result, count, length)
    assert network.counters("rxe1")["rcvd_pkts"] >= before + count


@pytest.mark.parametrize("kind", KINDS)
def test_a_datagram_arrives_behind_its_routing_header(player, kind) -> None:
    result = player("datagram", source="rxe0", target="rxe1", gid=KINDS[kind], length=48)
    assert result["sent"]["statuses"] == [SUCCESS]
    assert result["received"] == {
        "statuses": [SUCCESS], "opcodes": [RECEIVED], "immediates": [0], "lengths": [GRH_BYTES + 48], "grh": True,
    }  # fmt: skip
    assert result["equal"]
    assert result["guards"]


def test_memory_can_be_locked_and_huge_pages_can_be_had() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    map_hugetlb = 0x40000
    with mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_hugetlb) as pages:
        pages[:] = b"\x5a" * len(pages)


# What is lost, late, doubled or in disorder is sent again or put in order: it arrives once and whole.
@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("loss 10%", None),
        ("duplicate 50%", "duplicate_request"),
        ("delay 5ms reorder 10%", "out_of_seq_request"),
    ],
)
def test_writes_arrive_whole_over_a_network_with(player, netem, counters, fault, shows) -> None:
    connection = player("connect", source="rxe0", target="rxe1", gid=1, length=65536, count=8)
    before = counters("rxe1")
    with netem("rxe1", fault) as queue:
        moved(player("write", connection=connection), 8, 65536)
        assert counters("rxe1")[shows] > before[shows] if shows else queue.dropped > 0
    assert queue.kind == "noqueue"


def test_delays_are_met(player, netem) -> None:
    connection = player("connect", source="rxe0", target="rxe1", gid=1, length=64)
    with netem("rxe1", "delay 200ms"):
        result = player("write", connection=connection)
    moved(result, 1, 64)
    assert result["elapsed_s"] >= 0.2


def test_a_pulled_cable_ends_writes_and_the_device_comes_back(player, link_down) -> None:
    there, back, after = (
        player("connect", source=source, target=target, gid=1, length=4096, retries=retries)
        for source, target, retries in (("rxe0", "rxe1", 1), ("rxe1", "rxe0", 1), ("rxe0", "rxe1", 7))
    )
    with link_down("rxe1"):
        assert not network.is_active("rxe1")
        for connection in (there, back):
            result = player("write", connection=connection)
            assert result["sent"]["statuses"] == [RETRIES_EXCEEDED]
            assert not result["equal"]
            assert result["guards"]
    assert network.is_connected("rxe1")
    moved(player("write", connection=after), 1, 4096)


def test_faults_are_gone_when_a_test_fails_in_them(netem, link_down) -> None:
    with pytest.raises(ZeroDivisionError), netem("rxe0", "loss 100%") as queue, link_down("rxe0"):
        raise ZeroDivisionError
    assert queue.kind == "noqueue"
    assert network.is_connected("rxe0")
