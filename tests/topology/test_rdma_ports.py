"""Which GID each RDMA port sends from, on recorded trees of many shapes."""

from __future__ import annotations

import dataclasses
import ipaddress
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import UNREADABLE, V1, V2, ZERO, Gid, twice, write_interfaces, write_port
from trees import put

import transfer_engine as te
from transfer_engine import _native
from transfer_engine.topology import RdmaPort, rdma_ports

LINK_LOCAL = Gid("fe80::ba59:9fff:fe0d:1")
IPV4 = Gid("::ffff:10.1.2.3")
IPV6 = Gid("2001:db8::7")
MLX5 = twice(LINK_LOCAL, IPV4)


def only(ports: tuple[RdmaPort, ...]) -> RdmaPort:
    [port] = ports
    return port


def port_with(root: Path, *gids: Gid, slots: int = 0) -> RdmaPort:
    write_port(root, "mlx5_0", gids=gids, slots=slots)
    return only(rdma_ports(root))


# --- the rule on Ethernet -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gids", "index", "kind", "why"),
    [
        ([Gid(LINK_LOCAL.address, V1)], 0, "RoCE v1", "link-local, the only one"),
        ([LINK_LOCAL], 0, "RoCE v2", "link-local, the only one; reaches its own Ethernet segment alone"),
        (twice(LINK_LOCAL), 1, "RoCE v2", "link-local, best of 2"),
        (MLX5, 3, "RoCE v2", "RoCE v2, IPv4-mapped, best of 4"),
        (twice(LINK_LOCAL, IPV6), 3, "RoCE v2", "global IPv6, best of 4"),
        (twice(LINK_LOCAL, IPV6, IPV4), 5, "RoCE v2", "IPv4-mapped, best of 6"),
        (twice(LINK_LOCAL, IPV4, Gid("::ffff:10.1.2.4")), 3, "RoCE v2", "IPv4-mapped, lowest index of 2"),
        # A v2 address that is worse in kind goes before a v1 one that is better.
        ([Gid(IPV4.address, V1), LINK_LOCAL], 1, "RoCE v2", "link-local, best of 2"),
        ([Gid(LINK_LOCAL.address, V1), Gid(IPV6.address, V1), Gid(IPV4.address, V1)], 2, "RoCE v1", "IPv4-mapped"),
        ([LINK_LOCAL, Gid("::ffff:10.77.0.1")], 1, "RoCE v2", "IPv4-mapped, best of 2"),  # rxe
        (twice(LINK_LOCAL, Gid("fd00::5")), 3, "RoCE v2", "global IPv6"),
        (twice(Gid("febf::1"), Gid("fec0::1")), 3, "RoCE v2", "global IPv6"),  # fe80::/10 ends there
    ],
)
def test_version_goes_before_address_and_address_before_index(
    tmp_path: Path, gids: list[Gid], index: int, kind: str, why: str
) -> None:
    port = port_with(tmp_path, *gids)
    assert (port.gid_index, port.gid_kind, port.unusable) == (index, kind, None)
    assert port.gid == gids[index].address
    assert port.interface == "eth0"
    assert why in port.why


def test_a_table_of_256_slots_is_searched_to_its_end(tmp_path: Path) -> None:
    port = port_with(tmp_path, *twice(LINK_LOCAL), *[ZERO] * 252, Gid(IPV4.address, V1), IPV4)
    assert (port.gid_index, port.gid) == (255, IPV4.address)
    (tmp_path / "second").mkdir()
    assert port_with(tmp_path / "second", *MLX5, slots=256).gid_index == 3


def test_entries_without_a_readable_type_are_passed_over(tmp_path: Path) -> None:
    gids = [Gid(IPV4.address, UNREADABLE), Gid(IPV4.address, None), Gid(IPV4.address, "iWARP"), LINK_LOCAL]
    assert port_with(tmp_path, *gids).gid_index == 3


def test_an_entry_without_a_readable_interface_can_be_chosen(tmp_path: Path) -> None:
    port = port_with(tmp_path, LINK_LOCAL, Gid(IPV4.address, V2, UNREADABLE))
    assert (port.gid_index, port.interface) == (1, "eth0"), "that of the port"


def test_addresses_of_other_network_namespaces_come_last_among_equals(tmp_path: Path) -> None:
    """Pods that share a device: macvlan interfaces, whose addresses are all in its table."""
    write_interfaces(tmp_path, lo=65536, net1=9000)
    gids = [LINK_LOCAL, Gid("::ffff:10.1.0.1", V2, "host0"), Gid("::ffff:10.2.0.9", V2, "net1")]
    port = port_with(tmp_path, *gids)
    assert (port.gid_index, port.interface) == (2, "net1")
    port = port_with(tmp_path, *gids[:2], Gid("2001:db8::1", V2, "net1"))
    assert port.gid_index == 1, "the kind of address counts more"


def test_the_interface_of_a_bond_or_vlan_is_shown(tmp_path: Path) -> None:
    gids = [Gid("fe80::1", V2, "bond0"), Gid("::ffff:10.1.0.1", V2, "bond0"), Gid("::ffff:10.9.0.1", V2, "bond0.9")]
    write_port(tmp_path, "mlx5_bond_0", gids=gids)
    port = only(rdma_ports(tmp_path))
    assert (port.name, port.gid_index, port.interface) == ("mlx5_bond_0:1", 1, "bond0")
    assert only(rdma_ports(tmp_path, gid_index=2)).interface == "bond0.9"


@dataclasses.dataclass(frozen=True)
class Entry:
    gid: Gid
    rank: tuple[int, int, int]  # worse is greater


def _entries() -> st.SearchStrategy[Entry | None]:
    addresses = (
        st.integers(1, 5).map(lambda n: (0, f"::ffff:10.0.0.{n}")),
        st.integers(1, 5).map(lambda n: (1, f"2001:db8::{n}")),
        st.integers(1, 5).map(lambda n: (2, f"fe80::{n}")),
    )

    def entry(address: tuple[int, str], kind: str, interface: str) -> Entry:
        return Entry(Gid(address[1], kind, interface), (int(kind == V1), address[0], int(interface != "eth0")))

    filled = st.builds(entry, st.one_of(*addresses), st.sampled_from((V1, V2)), st.sampled_from(("eth0", "pod7")))
    return st.one_of(st.none(), filled)


@settings(max_examples=120, deadline=None)
@given(st.lists(_entries(), max_size=12), st.integers(0, 14))
def test_no_entry_is_better_than_the_chosen_one(table: list[Entry | None], index: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_interfaces(root, eth0=9000)
        write_port(root, "mlx5_0", gids=[entry.gid if entry else ZERO for entry in table])
        by_rule, as_set = only(rdma_ports(root)), only(rdma_ports(root, gid_index=index))
    filled = {at: entry for at, entry in enumerate(table) if entry}
    if filled:
        best = min(filled, key=lambda at: (filled[at].rank, at))
        assert by_rule.unusable is None
        assert (by_rule.gid_index, by_rule.gid) == (best, filled[best].gid.address)
    else:
        assert by_rule.gid_index is None
        assert "no GID" in (by_rule.unusable or "")
    if index in filled:
        assert as_set.unusable is None
        assert (as_set.gid_index, as_set.gid) == (index, filled[index].gid.address)
    else:
        assert as_set.gid_index is None
        assert as_set.unusable is not None


# --- settings -------------------------------------------------------------------------------------------------------


def test_an_index_that_is_set_wins_also_over_a_better_one(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", gids=MLX5, slots=16)
    port = only(rdma_ports(tmp_path, gid_index=0))
    assert (port.gid_index, port.gid_kind, port.unusable) == (0, "RoCE v1", None)
    assert port.why == "RoCE v1, link-local, gid_index 0 as set"


@pytest.mark.parametrize(("index", "reason"), [(16, "has 16 slots"), (65535, "has 16 slots"), (7, "is empty")])
def test_an_index_that_leads_nowhere_is_refused_with_those_that_do(tmp_path: Path, index: int, reason: str) -> None:
    write_port(tmp_path, "mlx5_0", gids=[*MLX5, ZERO, IPV6], slots=16)
    port = only(rdma_ports(tmp_path, gid_index=index))
    assert f"setting gid_index is {index}" in (port.unusable or "")
    assert reason in (port.unusable or "")
    assert port.remedy == "set one of those that are filled: 0-3, 5"


def test_a_partition_key_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", gids=MLX5, pkeys=(0xFFFF, 0, 0x8001, 0x8000))
    assert only(rdma_ports(tmp_path, pkey_index=2)).unusable is None
    for index, reason in ((1, "is empty"), (3, "is empty"), (4, "has 4 slots")):
        port = only(rdma_ports(tmp_path, pkey_index=index))
        assert reason in (port.unusable or "")
        assert "pkey_index" in (port.unusable or "")
        assert port.remedy == "set one of those that are filled: 0, 2"


@pytest.mark.parametrize("index", [-1, 65536, 1 << 40])
def test_an_index_out_of_range_is_a_config_error(index: int) -> None:
    with pytest.raises(te.ConfigError, match="gid_index"):
        rdma_ports(gid_index=index)
    with pytest.raises(te.ConfigError, match="pkey_index"):
        rdma_ports(pkey_index=index)


def test_the_core_checks_the_settings_itself(tmp_path: Path) -> None:
    error = _native.ffi.new("te_error *")
    count = _native.ffi.new("uint32_t *", 77)
    native = _native.ffi.new("te_settings *")
    for name, value in (
        ("gid_index", -2), ("gid_index", 65536), ("pkey_index", 65536), ("path_mtu", 1500), ("path_mtu", 8192),
        ("path_mtu", 128), ("service_level", 16), ("traffic_class", 256), ("ack_timeout", 0), ("ack_timeout", 32),
        ("retry_count", 8), ("rnr_retry", 8), ("rnr_timer", 32),
    ):  # fmt: skip
        _native.lib.te_settings_defaults(native)
        setattr(native.rdma, name, value)
        rdma = _native.ffi.addressof(native.rdma)
        status = _native.lib.te_rdma_ports(b"/", rdma, _native.NULL, 0, count, error)
        assert status == _native.lib.TE_ERR_CONFIG
        assert f"setting {name} is {value}" in _native.text(error.message)
    assert count[0] == 77, "outputs are set only on success"


# --- ports ----------------------------------------------------------------------------------------------------------


def test_of_two_ports_the_one_that_is_down_says_what_to_do(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx4_0", 1, gids=MLX5)
    down = {"state": "1: DOWN", "physical": "3: Disabled"}
    write_port(tmp_path, "mlx4_0", 2, gids=twice(Gid("fe80::2", V2, "eth1")), **down)  # type: ignore[arg-type]
    up, other = rdma_ports(tmp_path)
    assert (up.name, up.active, up.unusable) == ("mlx4_0:1", True, None)
    assert (other.name, other.active, other.state) == ("mlx4_0:2", False, "DOWN")
    assert other.unusable == "the port is DOWN (Disabled)"
    assert other.remedy == "`ip link set eth1 up`, then check cable and switch"
    assert other.gid_index == 1, "what it would have"


def test_infiniband_takes_index_0_and_its_lid(tmp_path: Path) -> None:
    gids = [Gid("fe80::506b:4b03:0:1", V1, UNREADABLE), Gid("2001:db8::5", V1, UNREADABLE)]
    write_port(tmp_path, "mlx5_0", gids=gids, slots=8, layer="InfiniBand", lid=0x11)
    port = only(rdma_ports(tmp_path))
    assert (port.lid, port.gid_index, port.gid, port.gid_kind) == (17, 0, "fe80::506b:4b03:0:1", "InfiniBand")
    assert (port.unusable, port.why) == (None, "InfiniBand, index 0")
    assert only(rdma_ports(tmp_path, gid_index=1)).gid == "2001:db8::5"


@pytest.mark.parametrize(
    ("state", "lid", "reason"),
    [("2: INIT", 0, "INIT"), ("3: ARMED", 0, "ARMED"), ("4: ACTIVE", 0, "LID 0"), ("4: ACTIVE", 0xFFFF, "LID 65535")],
)
def test_infiniband_without_a_subnet_manager_is_not_usable(tmp_path: Path, state: str, lid: int, reason: str) -> None:
    write_port(tmp_path, "mlx5_0", gids=[Gid("fe80::1", V1)], layer="InfiniBand", state=state, lid=lid)
    port = only(rdma_ports(tmp_path))
    assert reason in (port.unusable or "")
    assert "no subnet manager" in (port.unusable or "")
    assert "opensm" in (port.remedy or "")


def test_infiniband_that_is_unplugged_is_told_from_it(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_0", layer="InfiniBand", state="1: DOWN", physical="2: Polling")
    port = only(rdma_ports(tmp_path))
    assert port.unusable == "the port is DOWN (Polling)"
    assert (port.remedy or "").startswith("check cable")


def test_the_interface_of_an_infiniband_port_is_found_by_its_number(tmp_path: Path) -> None:
    for number in (1, 2):
        write_port(tmp_path, "mlx4_0", number, gids=[Gid("fe80::1", V1, None)], layer="InfiniBand", lid=number)
        put(tmp_path / f"sys/class/infiniband/mlx4_0/device/net/ib{number + 4}/dev_port", number - 1)
    assert [port.interface for port in rdma_ports(tmp_path)] == ["ib5", "ib6"]


def test_a_device_of_another_kind_says_so_and_leaves_others_alone(tmp_path: Path) -> None:
    efa = {"layer": "Unspecified", "node_type": "7: unspecified", "lid": 1}
    write_port(tmp_path, "efa_0", gids=[Gid("fe80::9", V1)], **efa)  # type: ignore[arg-type]
    write_port(tmp_path, "iwp1", gids=[Gid("fe80::8", V1)], node_type="4: RNIC")
    write_port(tmp_path, "usnic_0", gids=[Gid("fe80::7", V1)], node_type="6: usNIC UDP")
    write_port(tmp_path, "mlx5_0", gids=MLX5)
    found = {port.device: port for port in rdma_ports(tmp_path)}
    assert "EFA device" in (found["efa_0"].unusable or "")
    assert found["efa_0"].remedy == "use it with transport efa"
    assert "iWARP" in (found["iwp1"].unusable or "")
    assert "6: usNIC UDP" in (found["usnic_0"].unusable or "")
    assert found["mlx5_0"].unusable is None


def test_an_efa_device_is_known_by_its_driver_alone(tmp_path: Path) -> None:
    write_port(tmp_path, "rdmap0s6", gids=[Gid("fe80::9", V1)])
    device = tmp_path / "sys/class/infiniband/rdmap0s6/device"
    device.mkdir()
    (device / "driver").symlink_to("../../../../bus/pci/drivers/efa")
    assert "EFA device" in (only(rdma_ports(tmp_path)).unusable or "")


def test_a_soft_roce_port_without_addresses_names_its_interface(tmp_path: Path) -> None:
    write_port(tmp_path, "rxe0", slots=1024, parent="roce0")
    port = only(rdma_ports(tmp_path))
    assert (port.unusable, port.interface) == ("the port has no GID", "roce0")
    assert "dev roce0" in (port.remedy or "")


def test_devices_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["mlx5_0", "mlx5_2", "mlx5_10", "mlx5_bond_0", "rocep23s0f1np1", "rocep101s0f0np0"]
    for name in reversed(names):
        write_port(tmp_path, name, gids=MLX5)
    assert [port.device for port in rdma_ports(tmp_path)] == names


def test_more_ports_than_usual_are_all_listed(tmp_path: Path) -> None:
    for index in range(70):
        write_port(tmp_path, f"mlx5_{index}")
    assert [port.device for port in rdma_ports(tmp_path)] == [f"mlx5_{index}" for index in range(70)]


def test_without_rdma_there_are_no_ports(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == ()
    assert rdma_ports(tmp_path / "absent") == ()
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert rdma_ports(tmp_path) == ()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300))
def test_no_content_of_files_raises(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_port(root, "weird: name, 100%s", gids=MLX5)
        put(root / "sys/class/infiniband/mlx5_0/ports/x/state", "4: ACTIVE")
        put(root / "sys/class/infiniband/file", "")
        for path in root.rglob("*"):
            if path.is_file():
                path.write_bytes(content)
        port = only(rdma_ports(root))
        assert port.device == "weird: name, 100%s"
        assert port.unusable


def test_ports_are_plain_values() -> None:
    for port in rdma_ports():
        document = port.to_dict()
        assert document["name"] == f"{port.device}:{port.port}"
        assert all(value is None or isinstance(value, (str, int)) for value in document.values())
        assert port.gid is None or ipaddress.ip_address(port.gid)
        assert bool(port.unusable) or bool(port.why)
