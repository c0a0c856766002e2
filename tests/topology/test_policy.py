"""Machines by name: what each process must get there."""

from __future__ import annotations

import dataclasses

import pytest
from machines import CONNECTX6_DX, EFA, Branch, Machine, gpu, nic, standard

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology import Distance, Plan, Topology
from transfer_engine.topology.recording import parse


def read(machine: Machine) -> Topology:
    return parse(machine.xml(), "a recording")


def whole(found: Topology, processes: int = 8, **more: object) -> Plan:
    """The plan, after a look that every process of the node computes the same one."""
    plans = [topology.assign(found, rank, processes, **more).plan for rank in range(processes)]  # type: ignore[arg-type]
    assert plans.count(plans[0]) == processes
    return plans[0]


def nics_of(plan: Plan) -> list[tuple[str, ...]]:
    return [share.nics for share in plan.shares]


@pytest.mark.parametrize("count", [8, 16, 32])
def test_each_gpu_gets_the_nics_under_its_switch(count: int) -> None:
    plan = whole(read(standard(count)))
    share = count // 8
    assert nics_of(plan) == [tuple(f"mlx5_{gpu * share + i}" for i in range(share)) for gpu in range(8)]
    assert {distance for one in plan.shares for distance in one.distances} == {Distance.SWITCH}
    assert (plan.left_out, plan.messages) == ((), ())


def test_one_switch_for_all_pairs_nics_and_gpus_in_order() -> None:
    everything = [gpu() for _ in range(8)] + [nic(i) for i in range(16)]
    plan = whole(read(Machine([Branch(everything, 0)], packages=1, cores=32)))
    assert nics_of(plan) == [(f"mlx5_{2 * i}", f"mlx5_{2 * i + 1}") for i in range(8)]


def test_without_locality_nics_and_gpus_pair_in_order_and_it_is_said() -> None:
    branches = [Branch([gpu()], None) for _ in range(8)] + [Branch([nic(i)], None) for i in range(8)]
    plan = whole(read(Machine(branches)))
    assert nics_of(plan) == [(f"mlx5_{i}",) for i in range(8)]
    assert {share.distances for share in plan.shares} == {(Distance.UNKNOWN,)}
    assert any("does not say to which NUMA node" in message for message in plan.messages)
    assert len({share.core for share in plan.shares}) == 8


def test_a_gpu_without_a_nic_under_its_switch_gets_the_nearest_free_one() -> None:
    lonely = Branch([gpu()], 1)
    branches = [Branch([gpu(), nic(i)], i // 4) for i in range(7)] + [lonely, Branch([nic(7)], 1)]
    plan = whole(read(Machine(branches)))
    assert plan.shares[7].nics == ("mlx5_7",)
    assert plan.shares[7].distances == (Distance.NUMA,)
    assert any("GPU 7 has no NIC under its own PCIe switch" in message for message in plan.messages)
    assert plan.left_out == ()


def test_mixed_models_use_the_group_with_most_bandwidth_and_report_the_others() -> None:
    branches = [Branch([gpu(), nic(i)], i // 4) for i in range(8)]
    branches += [Branch([nic(8 + i, CONNECTX6_DX)], 0) for i in range(2)]
    plan = whole(read(Machine(branches)))
    assert nics_of(plan) == [(f"mlx5_{i}",) for i in range(8)]
    assert [entry.nic for entry in plan.left_out] == ["mlx5_8", "mlx5_9"]
    for entry in plan.left_out:
        assert "ConnectX-6 Dx" in entry.reason
        assert "ConnectX-7" in entry.reason


def test_few_fast_nics_win_over_many_slow_ones() -> None:
    branches = [Branch([nic(i, CONNECTX6_DX)], 0) for i in range(3)] + [Branch([nic(9)], 1)]
    plan = whole(read(Machine(branches)), 1)
    assert nics_of(plan) == [("mlx5_9",)]
    assert len(plan.left_out) == 3


def test_hidden_and_inactive_nics_are_listed_with_the_reason() -> None:
    branches = [Branch([gpu(), nic(i, hidden=i == 2, active=i != 3)], i // 4) for i in range(8)]
    plan = whole(read(Machine(branches)))
    reasons = {entry.nic: entry.reason for entry in plan.left_out}
    assert set(reasons) == {"mlx5_3", "0003:04:00.0"}
    assert "not active" in reasons["mlx5_3"]
    assert "container" in reasons["0003:04:00.0"]
    assert all(share.nics for share in plan.shares)
    assert any("6 NICs for 8 GPUs" in message for message in plan.messages)


def test_a_hidden_gpu_is_not_served_and_its_nic_is_not_lost() -> None:
    found = read(standard(8))
    gpus = [dataclasses.replace(one, unusable="hidden" if one.index == 3 else None) for one in found.gpus]
    plan = whole(dataclasses.replace(found, gpus=tuple(gpus)), 7)
    assert [share.gpu for share in plan.shares] == [0, 1, 2, 4, 5, 6, 7]
    assert sorted(name for nics in nics_of(plan) for name in nics) == [f"mlx5_{i}" for i in range(8)]


def test_a_nic_across_the_machine_is_not_used_beside_a_nearer_one() -> None:
    branches = [Branch([gpu(), nic(i)], 0) for i in range(4)] + [Branch([nic(4 + i)], 1) for i in range(4)]
    plan = whole(read(Machine(branches)), 4)
    assert nics_of(plan) == [(f"mlx5_{i}",) for i in range(4)]
    assert [entry.nic for entry in plan.left_out] == [f"mlx5_{4 + i}" for i in range(4)]
    assert all("NUMA" in entry.reason for entry in plan.left_out)


def test_gpus_with_only_far_nics_use_them_and_it_is_said() -> None:
    branches = [Branch([gpu()], i // 4) for i in range(8)] + [Branch([nic(i)], 0) for i in range(8)]
    plan = whole(read(Machine(branches)))
    assert [len(nics) for nics in nics_of(plan)] == [1] * 8
    assert sum("has no NIC on its own NUMA node" in message for message in plan.messages) == 4


def test_four_processes_on_eight_gpus_take_all_near_nics() -> None:
    found = read(standard(16))
    plan = whole(found, 4)
    assert [share.gpu for share in plan.shares] == [0, 1, 2, 3]
    near = {one.name for one in found.nics if one.place.numa == 0}
    assert {name for nics in nics_of(plan) for name in nics} == near
    assert {entry.nic for entry in plan.left_out} == {one.name for one in found.nics} - near


def test_one_process_serves_all_gpus_and_the_host_with_all_nics() -> None:
    found = topology.assign(read(standard(8)), 0, 1)
    assert [share.gpu for share in found.shares] == list(range(8))
    assert found.nics == tuple(f"mlx5_{i}" for i in range(8))
    assert found.for_gpu(5).nics == ("mlx5_5",)
    with pytest.raises(te.ArgumentError, match="GPU 9"):
        found.for_gpu(9)


def test_a_process_that_was_given_one_gpu_gets_that_ones_nics() -> None:
    found = read(standard(16))
    mine = [topology.assign(found, rank, 4, gpus=(7 - rank,)) for rank in range(4)]
    assert [one.nics for one in mine] == [(f"mlx5_{2 * (7 - i)}", f"mlx5_{2 * (7 - i) + 1}") for i in range(4)]
    assert len({one.core for one in mine}) == 4


def test_two_processes_a_gpu_divide_its_nics() -> None:
    plan = whole(read(standard(16)), 16)
    assert sorted(nics_of(plan)) == sorted((f"mlx5_{i}",) for i in range(16))
    assert {share.distances for share in plan.shares} == {(Distance.SWITCH,)}


def test_processes_without_gpus_divide_the_nics() -> None:
    branches = [Branch([nic(i, EFA)], i // 2) for i in range(4)]
    plan = whole(read(Machine(branches)), 2)
    assert nics_of(plan) == [("rdmap0s0", "rdmap1s0"), ("rdmap2s0", "rdmap3s0")]
    assert [share.gpu for share in plan.shares] == [None, None]


def test_the_settings_names_are_used_as_they_are() -> None:
    settings = te.Settings(nics=("mlx5_3", "mlx5_99"))
    plan = whole(read(standard(8)), settings=settings)
    assert nics_of(plan) == [("mlx5_3",)] * 8
    assert {entry.nic for entry in plan.left_out} == {f"mlx5_{i}" for i in range(8)} - {"mlx5_3"}
    assert plan.messages == ("mlx5_99: no NIC of this name is known here",)


def test_nic_count_keeps_the_nearest_and_lists_the_others() -> None:
    plan = whole(read(standard(32)), settings=te.Settings(nic_count=3))
    assert {len(nics) for nics in nics_of(plan)} == {3}
    assert len(plan.left_out) == 8
    assert all("nic_count" in entry.reason for entry in plan.left_out)


def test_a_transport_gets_only_nics_that_it_drives() -> None:
    branches = [Branch([gpu(), nic(i)], 0) for i in range(2)] + [Branch([nic(2, EFA)], 0)]
    plan = whole(read(Machine(branches)), 2, settings=te.Settings(transport="efa"))
    assert nics_of(plan) == [("rdmap2s0",)] * 2
    assert all("efa transport does not drive" in entry.reason for entry in plan.left_out)


def test_shared_memory_uses_no_nic() -> None:
    plan = whole(read(standard(8)), settings=te.Settings(transport="shm"))
    assert nics_of(plan) == [()] * 8
    assert len(plan.left_out) == 8


def test_a_machine_without_devices_still_has_cores_to_give() -> None:
    plan = whole(read(Machine([], packages=1, cores=8)), 2)
    assert [share.core for share in plan.shares] == [1, 2]
    assert nics_of(plan) == [(), ()]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(te.ArgumentError, match="local rank 8 of 8"):
        topology.assign(read(standard(8)), 8, 8)


def test_the_plan_is_plain_json() -> None:
    document = whole(read(standard(8))).to_dict()
    assert document["shares"][0] == {"local_rank": 0, "gpu": 0, "nics": ("mlx5_0",), "distances": ["PIX"], "core": 1}
