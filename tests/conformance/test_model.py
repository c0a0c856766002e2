"""Any mixture of writes, page lists and batches, against a byte array that is written in the obvious way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import transfer_engine as te

from .rig import POISON, SOON_S, TRANSPORTS, Case, Link, Rig, eventually, on, pattern

SIZE = 1 << 14

# Networks of the simulated fabric, and settings of the engines on them.
NETWORKS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "scattered": (1, "delay=5,mtu=100,busy=0.1,seed=3", {}),
    "cut": (3, "delay=3,mtu=64,seed=4", {"shard_bytes": 64, "chunk_bytes": 200}),
    "cut_fine": (8, "delay=2,seed=5", {"shard_bytes": 1, "chunk_bytes": 33, "page_immediates": "each"}),
    "last_page": (3, "delay=4,mtu=50,seed=6", {"shard_bytes": 100, "page_immediates": "last"}),
    "in_order": (3, "reorder=0,delay=3,seed=7", {"shard_bytes": 64, "chunk_bytes": 100}),
    "early_completion": (2, "reorder=0,delivery_complete=0,delay=5,seed=8", {"shard_bytes": 300}),
    "loose_keys": (2, "keys_enforced=0,virtual_addresses=0,delay=2,seed=9", {"shard_bytes": 300}),
    "no_reads": (2, "reads=0,delay=2,seed=10", {"shard_bytes": 300}),
    "connected": (2, "connected=1,reorder=0,seed=11", {"shard_bytes": 300}),
    "narrow": (
        3,
        "delay=4,busy=0.3,depth=4,seed=12",
        {"shard_bytes": 64, "immediate_window": 2, "assembly_slots": 1, "operations": 16, "peer_depth": 2},
    ),
}

write_plans = st.fixed_dictionaries(
    {
        "length": st.one_of(st.integers(0, 300), st.integers(0, 6000)),
        "source": st.integers(0, SIZE - 6000),
        "gap": st.integers(0, 70),
        "notify": st.integers(-1, 1),  # which counter, -1: none
        "flush": st.booleans(),
    }
)
page_plans = st.fixed_dictionaries(
    {
        "page": st.one_of(st.integers(1, 64), st.integers(1, 700)),
        "between": st.integers(0, 50),
        "count": st.integers(0, 12),
        "seed": st.integers(0, 1000),
        "narrow": st.booleans(),  # int32 indices
        "gap": st.integers(0, 70),
        "notify": st.integers(-1, 1),
        "flush": st.booleans(),
    }
)
rounds = st.lists(st.tuples(st.booleans(), st.lists(st.one_of(write_plans, page_plans), max_size=12)), max_size=3)


class Model:
    """A link and what it should hold. Writes of one round do not overlap, since transfers have no order."""

    def __init__(self, rig: Rig) -> None:
        self.link = rig.link(SIZE)
        self.counters = [(self.link.counter, self.link.notify), rig.far.counter()]
        self.expected = np.full(SIZE, POISON, np.uint8)
        self.counts = [0, 0]

    def entry(self, plan: dict[str, Any], at: int) -> tuple[te.Write | te.PageWrite | None, int]:
        """The operation that a plan describes, from target offset `at` on, and the end of what it covers."""
        link = self.link
        at += plan["gap"]
        notify = None if plan["notify"] < 0 else self.counters[plan["notify"]][1]
        flush = plan["flush"] or notify is None  # so that its end proves that it is in memory
        if "length" in plan:
            source, length = plan["source"], plan["length"]
            if at + length > SIZE:
                return None, at
            self.expected[at : at + length] = link.source[source : source + length]
            self._count(plan["notify"], 1)
            return te.Write(
                link.region[source : source + length], link.remote[at : at + length], notify, flush
            ), at + length
        page, stride, count = plan["page"], plan["page"] + plan["between"], plan["count"]
        end = at + stride * max(count, 1)
        if end > SIZE:
            return None, at
        rng = np.random.default_rng(plan["seed"])
        dtype = np.int32 if plan["narrow"] else np.int64
        targets = rng.permutation(count).astype(dtype)
        sources = rng.integers(0, (SIZE - page) // stride + 1, count).astype(dtype)
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            self.expected[at + target * stride :][:page] = link.source[source * stride :][:page]
        self._count(plan["notify"], count)
        from_pages = te.Pages(link.region, sources, page, stride)
        to_pages = te.Pages(link.remote, targets, page, stride, at)
        return te.PageWrite(from_pages, to_pages, notify, flush), end

    def _count(self, counter: int, by: int) -> None:
        if counter >= 0:
            self.counts[counter] += by

    def run(self, plans: list[dict[str, Any]], *, batched: bool) -> None:
        entries, at = [], 0
        for plan in plans:
            entry, at = self.entry(plan, at)
            if entry is not None:
                entries.append(entry)
        near = self.link.near
        transfers = [near.write_batch(entries)] if batched else [submit(near, entry) for entry in entries]
        for transfer in transfers:
            transfer.wait(SOON_S)
        self.check()

    def check(self) -> None:
        for (number, _), count in zip(self.counters, self.counts, strict=True):
            assert self.link.far.wait(number, count) == count
        np.testing.assert_array_equal(np.frombuffer(self.link.far.read(self.link.memory), np.uint8), self.expected)


def submit(engine: te.Engine, entry: te.Write | te.PageWrite) -> te.Transfer:
    if isinstance(entry, te.Write):
        return engine.write(entry.source, entry.target, notify=entry.notify, flush=entry.flush)
    return engine.write_pages(entry.source, entry.target, notify=entry.notify, flush=entry.flush)


@pytest.fixture
def model(rig: Rig) -> Model:
    return Model(rig)


on_every_network = pytest.mark.cases(
    [
        Case(TRANSPORTS["sim"], nics, nics, False, name, (("sim", options), *changes.items()))
        for name, (nics, options, changes) in NETWORKS.items()
        if "sim" in TRANSPORTS
    ]
    + [
        Case(transport, nics, nics, False, f"{transport.name}-{nics}", (("shard_bytes", 64), ("chunk_bytes", 500)))
        for transport in TRANSPORTS.values()
        if transport.engine == "cx7"
        for nics in (1, 3)
    ]
)

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)


@on_every_network
@settings(unhurried, max_examples=20)
@given(script=rounds)
def test_the_far_memory_is_what_the_model_says(model: Model, script: Any) -> None:
    for batched, plans in script:
        model.run(plans, batched=batched)


@pytest.mark.soak
@on_every_network
@settings(unhurried, max_examples=2000)
@given(script=rounds)
def test_the_far_memory_is_what_the_model_says_thousands_of_times(model: Model, script: Any) -> None:
    for batched, plans in script:
        model.run(plans, batched=batched)


# --- regions, counters and acquaintances that come and go ------------------------------------------------------------


class Traffic(RuleBasedStateMachine):
    """Two links between two engines. Regions and counters may be closed and made anew, and the engines may part."""

    rig: Rig

    @initialize()
    def begin(self) -> None:
        self.links: list[Link] = []
        self.expected: list[np.ndarray[Any, Any]] = []
        self.counts: list[int] = []
        self.under_way: list[te.Transfer] = []
        for _ in range(2):
            self.add()

    def add(self) -> None:
        self.links.append(self.rig.link(SIZE))
        self.expected.append(np.full(SIZE, POISON, np.uint8))
        self.counts.append(0)

    @rule(which=st.integers(0, 1), at=st.integers(0, SIZE), source=st.integers(0, SIZE), length=st.integers(0, 5000))
    def write(self, which: int, at: int, source: int, length: int) -> None:
        self.settle()
        length = min(length, SIZE - at, SIZE - source)
        link = self.links[which]
        self.under_way.append(link.write(at, source, length))
        self.expected[which][at : at + length] = link.source[source : source + length]
        self.counts[which] += 1

    @rule(which=st.integers(0, 1), count=st.integers(1, 30), seed=st.integers(0, 99))
    def write_pages(self, which: int, count: int, seed: int) -> None:
        self.settle()
        targets = np.random.default_rng(seed).permutation(SIZE // 128)[:count]
        link = self.links[which]
        self.under_way.append(link.pages(targets, np.arange(count), 100, stride=128))
        for source, target in enumerate(targets.tolist()):
            self.expected[which][target * 128 :][:100] = link.source[source * 128 :][:100]
        self.counts[which] += count

    @rule(which=st.integers(0, 1))
    def replace_region(self, which: int) -> None:
        self.settle()
        link = self.links[which]
        self.rig.far.close_memory(link.memory)
        with pytest.raises(te.RegionClosed):
            link.write(0, 0, 1).wait(SOON_S)
        link.memory, link.remote = self.rig.far.memory(SIZE)
        self.expected[which][:] = POISON

    @rule(which=st.integers(0, 1))
    def replace_counter(self, which: int) -> None:
        self.settle()
        link = self.links[which]
        self.rig.far.close_counter(link.counter)
        with pytest.raises(te.TransferEngineError):
            link.write(0, 0, 1).wait(SOON_S)
        link.counter, link.notify = self.rig.far.counter()
        self.counts[which] = 0

    @rule(which=st.integers(0, 1))
    def replace_source(self, which: int) -> None:
        link = self.links[which]
        link.region.close(SOON_S)  # what is under way drains first
        with pytest.raises(te.RegionClosed):
            link.write(0, 0, 1)
        link.seed = self.rig.next_seed()
        link.source = pattern(link.seed, SIZE)
        link.region = self.rig.near.register(link.source)

    @rule()
    def part(self) -> None:
        self.settle()
        self.rig.near.disconnect(self.rig.far.address()).wait(SOON_S)

    @rule()
    def part_from_the_other_side(self) -> None:
        self.settle()
        self.rig.far.disconnect(self.rig.near.address)
        eventually(self.met_again)

    def met_again(self) -> bool:
        """What comes while the other side takes its leave may fail; then they meet again."""
        link = self.links[0]
        try:
            link.write(0, 0, 0, notify=False).wait(SOON_S)
        except te.PeerLost:
            return False
        return True

    @rule()
    def fence(self) -> None:
        self.rig.far.fence(self.rig.near.address)

    @precondition(lambda self: self.under_way)
    @rule()
    def settle(self) -> None:
        for transfer in self.under_way:
            transfer.wait(SOON_S)
        self.under_way.clear()
        for which, link in enumerate(self.links):
            assert link.wait(self.counts[which]) == self.counts[which]

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        for which, link in enumerate(self.links):
            assert link.value <= self.counts[which]

    def teardown(self) -> None:
        if not hasattr(self, "under_way"):
            return
        self.settle()
        for which, link in enumerate(self.links):
            found = np.frombuffer(self.rig.far.read(link.memory), np.uint8)
            np.testing.assert_array_equal(found, self.expected[which])
            self.rig.far.close_memory(link.memory)
            self.rig.far.close_counter(link.counter)
            link.region.close(SOON_S)


def run_traffic(rig: Rig, examples: int, steps: int) -> None:
    rig.set_up(shard_bytes=1000)
    machine = type("Traffic", (Traffic,), {"rig": rig})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(unhurried, max_examples=examples, stateful_step_count=steps)
    )


@on(nics=(2,), apart=False)
def test_regions_counters_and_peers_may_come_and_go(rig: Rig) -> None:
    run_traffic(rig, 10, 20)


@pytest.mark.soak
@on(nics=(1, 3))
def test_regions_counters_and_peers_may_come_and_go_thousands_of_times(rig: Rig) -> None:
    run_traffic(rig, 500, 50)
