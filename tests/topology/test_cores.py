"""Which cores: near, apart, allowed, and what happens when there are few."""

from __future__ import annotations

import pytest
from machines import Machine, standard

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology.recording import parse

MACHINE = standard(8)
FOUND = parse(MACHINE.xml(), "a recording")


def cores_of(plan: topology.Plan) -> list[int | None]:
    return [share.core for share in plan.shares]


def test_cores_are_on_the_numa_node_of_the_nics() -> None:
    plan = topology.assign(FOUND, 0, 8).plan
    for share in plan.shares:
        assert share.core in MACHINE.cpus_of(0 if share.local_rank < 4 else 1)


def test_the_machines_first_core_is_left_to_interrupts() -> None:
    assert not {0, 32} & set(cores_of(topology.assign(FOUND, 0, 8).plan))


def test_no_two_workers_are_siblings() -> None:
    chosen = cores_of(topology.assign(FOUND, 0, 8).plan)
    owners = [core.index for core in FOUND.cores if set(core.cpus) & set(chosen)]
    assert len(owners) == len(chosen) == len(set(chosen)) == 8


def test_the_mask_is_respected_and_far_cores_are_better_than_none() -> None:
    allowed = MACHINE.cpus_of(1)
    plan = topology.assign(FOUND, 0, 8, allowed=allowed).plan
    assert set(cores_of(plan)) <= allowed
    assert plan.messages == ()


def test_with_few_cores_workers_share_a_core_with_its_sibling_and_it_is_said() -> None:
    allowed = frozenset(range(8)) | frozenset(range(32, 40))  # 8 cores, 16 hardware threads
    plan = topology.assign(FOUND, 0, 8, allowed=allowed).plan
    chosen = cores_of(plan)
    assert set(chosen) <= allowed
    assert len(set(chosen)) == 8
    assert any("SMT sibling" in message for message in plan.messages)


@pytest.mark.parametrize("allowed", [frozenset((5,)), frozenset(range(8)), frozenset()])
def test_with_fewer_still_nobody_is_pinned_and_it_is_said(allowed: frozenset[int]) -> None:
    plan = topology.assign(FOUND, 0, 8, allowed=allowed).plan
    assert cores_of(plan) == [None] * 8
    assert len(plan.messages) == 1


def test_one_process_on_one_cpu_is_not_pinned() -> None:
    lone = parse(Machine([], packages=1, cores=4).xml(), "a recording")
    assert topology.assign(lone, 0, 1, allowed=frozenset((2,))).core is None
    assert topology.assign(lone, 0, 1, allowed=frozenset((1, 2))).core == 2


def test_a_quota_counts_like_fewer_cores() -> None:
    plan = topology.assign(FOUND, 0, 8, quota=4.0).plan
    assert cores_of(plan) == [None] * 8
    assert "4 CPUs' time is granted" in plan.messages[0]
    assert None not in cores_of(topology.assign(FOUND, 0, 8, quota=16.0).plan)


def test_a_mask_of_ones_own_need_only_suffice_for_oneself() -> None:
    allowed = frozenset((4, 5))
    mine = topology.assign(FOUND, 3, 8, allowed=allowed, own_cpus=True)
    assert mine.core == 5
    assert mine.messages == ()


def test_the_settings_wish_is_taken_as_it_is() -> None:
    assert topology.assign(FOUND, 2, 8, te.Settings(core=17)).core == 17
    assert topology.assign(FOUND, 2, 8, te.Settings(core="none")).core is None
