"""What must hold on any machine whatever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import CONNECTX6_DX, CONNECTX7, Branch, Device, Machine, gpu, nic

import transfer_engine as te
from transfer_engine import topology
from transfer_engine.topology.matching import spread
from transfer_engine.topology.recording import parse

DEVICES = st.lists(st.sampled_from(("gpu", "fast", "slow", "hidden", "down")), min_size=1, max_size=5)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    packages = draw(st.integers(1, 4))
    serial = iter(range(1000))

    def device(kind: str) -> Device:
        if kind == "gpu":
            return gpu()
        model = CONNECTX6_DX if kind == "slow" else CONNECTX7
        return nic(next(serial), model, hidden=kind == "hidden", active=kind != "down")

    places = st.one_of(st.none(), st.integers(0, packages - 1))
    shapes = draw(st.lists(st.tuples(DEVICES, places), max_size=8))
    branches = [Branch([device(kind) for kind in kinds], place) for kinds, place in shapes]
    return Machine(branches, packages, draw(st.integers(1, 12)), draw(st.integers(1, 2)))


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Machine, int, frozenset[int]]:
    machine = draw(machines())
    allowed = draw(st.one_of(st.just(machine.cpus), st.frozensets(st.sampled_from(sorted(machine.cpus)))))
    return machine, draw(st.integers(1, 16)), allowed


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_all_nics_are_accounted_for_and_shares_are_fair_and_disjoint(node: tuple[Machine, int, frozenset[int]]) -> None:
    machine, processes, allowed = node
    found = parse(machine.xml(), "a recording")
    everybody = [topology.assign(found, rank, processes, allowed=allowed) for rank in range(processes)]
    plan = everybody[0].plan
    assert all(one.plan == plan for one in everybody)

    # Coverage: every NIC is in a share, or left out with a reason, never both.
    used = Counter(name for share in plan.shares for name in share.nics)
    left = [entry.nic for entry in plan.left_out]
    assert sorted((*used, *left)) == sorted(one.name for one in found.nics)
    assert all(entry.reason for entry in plan.left_out)

    # Disjoint: NICs, as long as there are enough of them.
    if len(plan.shares) <= len(used):
        assert max(used.values(), default=1) == 1
    if used:
        assert all(share.nics for share in plan.shares)

    # Cores: allowed, all different, none pinned or all, and siblings only after a word about it.
    chosen = [share.core for share in plan.shares if share.core is not None]
    assert len(chosen) in (0, len(plan.shares))
    assert set(chosen) <= allowed
    assert len(set(chosen)) == len(chosen)
    owners = Counter(core.index for core in found.cores for cpu in core.cpus if cpu in chosen)
    if max(owners.values(), default=1) > 1 or not chosen:
        assert any("may be used" in text or "no CPU" in text for text in plan.messages)


@settings(max_examples=60, deadline=None)
@given(machines(), st.integers(1, 8), st.integers(1, 16))
def test_nic_count_is_a_limit(machine: Machine, processes: int, count: int) -> None:
    found = parse(machine.xml(), "a recording")
    plan = topology.assign(found, 0, processes, te.Settings(nic_count=count)).plan
    assert all(len(share.nics) <= count for share in plan.shares)
    names = {name for share in plan.shares for name in share.nics}
    assert names | {entry.nic for entry in plan.left_out} == {one.name for one in found.nics}


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 24), st.integers(1, 12), st.randoms(use_true_random=False))
def test_spread_is_balanced_and_takes_everything(items: int, holders: int, random: object) -> None:
    table = [[random.randint(0, 50) for _ in range(holders)] for _ in range(items)]  # type: ignore[attr-defined]
    given_to = spread(items, holders, lambda item, holder: table[item][holder])
    counts = Counter(given_to)
    assert len(given_to) == items
    sizes = [counts[holder] for holder in range(holders)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_spread_is_the_cheapest(seed: int) -> None:
    """Against all permutations."""
    import itertools
    import random

    generator = random.Random(seed)
    table = [[generator.randint(0, 9) for _ in range(6)] for _ in range(6)]
    mine = spread(6, 6, lambda item, holder: table[item][holder])
    best = min(sum(table[i][h] for i, h in enumerate(order)) for order in itertools.permutations(range(6)))
    assert sum(table[i][h] for i, h in enumerate(mine)) == best
