"""Scatters: each member gets its bytes and one count, whatever the number of members, NICs and lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .fan import Fan, Home, fars_of
from .rig import SOON_S, Rig, in_threads, on

DIFFERENT = [1, 2, (1, 4), (4, 1), (3, 2)]  # NICs here and there


def spread(lengths: list[int], gap: int = 40) -> list[tuple[int, int, int]]:
    """A piece for each member, at odd places."""
    return [(gap + i % 7, 3 * i % 11, length) for i, length in enumerate(lengths)]


@on(nics=DIFFERENT, nics_apart=(2,))
def test_every_member_gets_its_bytes_between_untouched_guards_and_one_count(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    lengths = [0, 1, 63, 64, 65, 999, 2000, 0, 5001, 64_000, 7]
    fan = Fan(rig, fars_of(rig, len(lengths), shard_bytes=1000), 65_536)
    pieces = spread(lengths)
    fan.scatter(pieces).wait(SOON_S)
    fan.arrived()
    fan.check(pieces)
    fan.counters_stand()


@on(nics=(1, 2), apart=False)
def test_the_own_engine_may_be_a_member_and_a_peer_may_be_several(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 9, home=True, shard_bytes=1000), 20_000)
    for turn in range(5):
        pieces = [(i, turn, 100 + 1500 * i) for i in range(9)]
        fan.poison()
        fan.scatter(pieces).wait(SOON_S)
        fan.arrived()
        fan.check(pieces)


@on(nics=(1, 3), apart=False)
def test_a_group_of_the_own_engine_alone_works(rig: Rig) -> None:
    fan = Fan(rig, [Home(rig.near)], 10_000)
    fan.scatter([(5, 6, 9000)]).wait(SOON_S)
    fan.arrived()
    fan.check([(5, 6, 9000)])


@on(nics=(1, 4), apart=False, transports=("sim",))
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64, 129, 512])
def test_groups_of_any_size_are_written_whole_and_counted_exactly(rig: Rig, count: int) -> None:
    room = 300
    link = rig.link(count * room)
    group = rig.near.peer_group([link.remote.address] * count)
    target = group.target([link.remote] * count, notify=[link.notify] * count)
    rng = np.random.default_rng(count)
    expected = 0
    for _ in range(4):
        lengths = rng.integers(0, room, count)
        places = np.arange(count) * room + rng.integers(0, room - lengths)
        sources = rng.integers(0, count * room - lengths)
        link.poison()
        target.scatter(link.region, src_offsets=sources, lengths=lengths, dst_offsets=places).wait(SOON_S)
        expected += count
        assert link.wait(expected) == expected
        link.check(zip(places.tolist(), sources.tolist(), lengths.tolist(), strict=True), expected)


@on(nics=[(n, 16 // n) for n in (1, 2, 3, 5, 8, 16)] + [(16, 16), (7, 16)], apart=False, transports=("sim", "standin"))
@pytest.mark.parametrize("shard", [None, "peers", "bytes"])
def test_any_numbers_of_nics_and_ways_of_sharding_give_the_same_bytes_and_counts(rig: Rig, shard: str | None) -> None:
    rig.set_up(shard_bytes=2000)
    fan = Fan(rig, fars_of(rig, 6, shard_bytes=2000), 80_000)
    for lengths in ([70_000] * 6, [0, 1, 2000, 4001, 40_000, 79_000], [0] * 6):
        pieces = [(i, 7 * i, length) for i, length in enumerate(lengths)]
        fan.poison()
        fan.scatter(pieces, shard=shard).wait(SOON_S)
        fan.arrived()
        fan.check(pieces)
    fan.counters_stand()


@on(nics=(4,), apart=False)
def test_a_large_part_is_cut_over_the_nics_unless_told_otherwise(rig: Rig) -> None:
    rig.set_up(shard_bytes=10_000)
    fan = Fan(rig, fars_of(rig, 1, engines=1, shard_bytes=10_000), 400_000)

    def used(shard: str | None) -> int:
        before = [nic["write_bytes"] for nic in rig.near.stats()["nics"].values()]
        fan.scatter([(0, 0, 400_000)], shard=shard).wait(SOON_S)
        fan.arrived()
        after = [nic["write_bytes"] for nic in rig.near.stats()["nics"].values()]
        return sum(new - old >= 10_000 for old, new in zip(before, after, strict=True))

    assert used("bytes") == 4
    assert used("peers") == 1
    assert used(None) == 4


@on(nics=(4,), apart=False)
def test_small_parts_are_spread_over_the_nics_by_peer(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 16, engines=4), 1000)
    for _ in range(8):
        fan.scatter([(0, 0, 1000)] * 16).wait(SOON_S)
    fan.arrived(8)
    assert all(nic["write_bytes"] for nic in rig.near.stats()["nics"].values())


@on(nics=(1, 3))
def test_parts_of_zero_bytes_notify_and_touch_nothing(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 4), 1000)
    for _ in range(20):
        fan.target.scatter(fan.region, lengths=[0, 0, 0, 0]).wait(SOON_S)
    fan.arrived(20)
    fan.check([None] * 4)


@on(nics=(2,))
def test_members_may_have_no_counter_or_no_memory(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 4), 1000)
    remotes, notify = [fan.remotes[0], fan.remotes[1], None, None], [fan.notify[0], None, fan.notify[2], None]
    with fan.group.target(remotes, notify=notify) as target:
        target.scatter(fan.region, lengths=[1000, 900, 0, 0], flush=True).wait(SOON_S)
        fan.arrived(but=(1, 3))
        fan.check([(0, 0, 1000), (0, 0, 900), None, None])
        with pytest.raises(te.RangeError, match="member 2"):
            target.scatter(fan.region, lengths=[0, 0, 1, 0])
    fan.counters_stand()


@on(nics=(1, 3))
def test_a_flushed_scatter_is_visible_when_it_is_done_without_counters(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 5, shard_bytes=1000), 30_000, counted=False)
    for length in (1, 64, 5000, 30_000, 0):
        fan.poison()
        pieces = [(0, 0, length)] * 5
        fan.scatter(pieces, flush=True).wait(SOON_S)
        fan.check(pieces)
    fan.counters_stand()


@on(nics=(1, 3))
def test_hundreds_of_scatters_under_way_count_exactly(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000, operations=64)
    fan = Fan(rig, fars_of(rig, 6, shard_bytes=1000), 300 * 40)
    transfers = [
        fan.scatter([(40 * turn, 40 * turn + i, 30 + i) for i in range(6)], request_id=turn) for turn in range(250)
    ]
    for transfer in transfers:
        transfer.wait(SOON_S)
        assert not transfer.failed_members
    fan.arrived(250)
    for i, far in enumerate(fan.fars):
        pieces = [(40 * turn, 40 * turn + i, 30 + i) for turn in range(250)]
        assert far.differs(fan.memories[i], pieces, fan.seed, fan.source_length) is None


@on(nics=(3,))
def test_threads_share_a_target(rig: Rig) -> None:
    rig.set_up(shard_bytes=500)
    threads, turns, share = 16, 20, 2000
    fan = Fan(rig, fars_of(rig, 5, shard_bytes=500), threads * share)

    def work(k: int) -> None:
        for turn in range(turns):
            length = 1 + turn * 100 + k
            fan.scatter([(k * share + i, k * share + i, min(length, share - i)) for i in range(5)]).wait(SOON_S)

    in_threads(threads, work)
    fan.arrived(threads * turns)
    for i, far in enumerate(fan.fars):
        pieces = [(k * share + i, k * share + i, min(1 + (turns - 1) * 100 + k, share - i)) for k in range(threads)]
        assert far.differs(fan.memories[i], pieces, fan.seed, fan.source_length) is None


@on(nics=(2,), apart=False)
def test_engines_scatter_to_each_other_all_at_once(rig: Rig) -> None:
    count, room, turns = 5, 3000, 10
    engines = [rig.engine(shard_bytes=1000) for _ in range(count)]
    memories = [np.zeros(count * room, np.uint8) for _ in engines]
    remotes = [engine.register(memory).descriptor for engine, memory in zip(engines, memories, strict=True)]
    counters = [engine.counter() for engine in engines]
    notify = [counter.descriptor for counter in counters]

    def work(k: int) -> None:
        region = engines[k].register(np.full(room, k + 1, np.uint8))
        group = engines[k].peer_group([engine.address for engine in engines])
        target = group.target(remotes, notify=notify)
        transfers = [
            target.scatter(region, lengths=[room] * count, dst_offsets=[k * room] * count) for _ in range(turns)
        ]
        for transfer in transfers:
            transfer.wait(SOON_S)

    in_threads(count, work)
    for counter, memory in zip(counters, memories, strict=True):
        assert counter.wait(count * turns, timeout_s=SOON_S) == count * turns
        np.testing.assert_array_equal(memory, np.repeat(np.arange(1, count + 1, dtype=np.uint8), room))


# --- arguments --------------------------------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "list": lambda a: a.tolist(),
    "tuple": lambda a: tuple(a.tolist()),
    "int64": lambda a: a,
    "longlong": lambda a: a.astype(np.longlong),
    "int32": lambda a: a.astype(np.int32),
    "uint16": lambda a: a.astype(np.uint16),
    "big_endian": lambda a: a.astype(">i8"),
    "strided": lambda a: np.repeat(a, 2)[::2],
    "backwards": lambda a: a[::-1].copy()[::-1],
    "read_only": lambda a: np.frombuffer(a.tobytes(), np.int64),
}


@on(nics=(1,), apart=False, transports=("sim",))
@pytest.mark.parametrize("form", FORMS)
def test_offsets_and_lengths_may_have_any_form(rig: Rig, form: str) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    convert = FORMS[form]
    sources, lengths, targets = np.array([1, 20, 300]), np.array([100, 0, 700]), np.array([5, 60, 299])
    fan.target.scatter(
        fan.region, src_offsets=convert(sources), lengths=convert(lengths), dst_offsets=convert(targets)
    ).wait(SOON_S)
    fan.arrived()
    fan.check(list(zip(targets.tolist(), sources.tolist(), lengths.tolist(), strict=True)))


@on(nics=(1, 2), apart=False)
def test_arrays_changed_right_after_the_call_change_nothing(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 4), 10_000)
    for _ in range(50):
        arrays = [np.array([1, 2, 3, 4]), np.array([9000, 0, 50, 5000]), np.array([0, 10, 20, 30])]
        expected = list(zip(*(array.tolist() for array in (arrays[2], arrays[0], arrays[1])), strict=True))
        fan.poison()
        transfer = fan.target.scatter(fan.region, src_offsets=arrays[0], lengths=arrays[1], dst_offsets=arrays[2])
        for array in arrays:
            array[:] = -1
        transfer.wait(SOON_S)
        fan.arrived()
        fan.check(expected)


@on(nics=(1,), apart=False, transports=("sim",))
def test_offsets_in_a_slice_count_from_its_start_and_end_with_it(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 2), 1000)
    part = fan.region[100:600]
    fan.target.scatter(part, src_offsets=[0, 400], lengths=[500, 100], dst_offsets=[7, 8]).wait(SOON_S)
    fan.arrived()
    fan.check([(7, 100, 500), (8, 500, 100)])
    for offsets, lengths, member in (
        ([0, 401], [500, 100], 1), ([-1, 0], [1, 1], 0), ([0, 0], [501, 0], 0), ([0, 0], [0, -1], 1),
        ([0, 2**63 - 1], [0, 2**63 - 1], 1), ([0, -(2**63)], [0, 0], 1),
    ):  # fmt: skip
        with pytest.raises(te.RangeError, match=f"member {member}"):
            fan.target.scatter(part, src_offsets=offsets, lengths=lengths)
    fan.counters_stand()


@on(nics=(1, 3), apart=False)
@pytest.mark.parametrize(
    ("member", "source", "length", "target"),
    [
        (0, 0, 1001, 0), (1, 1000, 1, 0), (2, 0, 1, 1000), (0, -1, 1, 0), (1, 0, -1, 0), (2, 0, 1, -1),
        (0, 2**63 - 1, 1, 0), (1, 1, 2**63 - 1, 0), (2, 0, 2**63 - 1, 2**63 - 1), (0, -(2**63), 0, 0),
        (1, 0, 0, 1001),
    ],
)  # fmt: skip
def test_a_range_outside_refuses_the_whole_scatter_and_names_the_member(
    rig: Rig, member: int, source: int, length: int, target: int
) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    pieces = [(0, 0, 10)] * 3
    pieces[member] = (target, source, length)
    with pytest.raises(te.RangeError, match=f"member {member}") as caught:
        fan.scatter(pieces)
    assert any(str(value) in str(caught.value) for value in (source, length, target) if value)
    fan.scatter([(0, 0, 10)] * 3).wait(SOON_S)
    fan.arrived()
    fan.check([(0, 0, 10)] * 3)
    fan.counters_stand()


# --- what a transfer tells --------------------------------------------------------------------------------------------


@on(nics=(1, 2))
def test_its_times_are_in_order(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    for _ in range(2):  # the first connects and attaches
        transfer = fan.scatter([(0, 0, 1000)] * 3)
        transfer.wait(SOON_S)
        times = transfer.times
        assert None not in (times.taken_s, times.posted_s, times.finished_s)
        passed = [0.0, times.taken_s, times.first_post_s or times.taken_s, times.posted_s, times.finished_s]
        assert passed == sorted(passed, key=float)  # type: ignore[arg-type]
    write = rig.near.write(fan.region, fan.remotes[0])
    write.wait(SOON_S)
    assert write.times.first_post_s is None
    assert write.times.finished_s is not None
    assert write.times.finished_s > 0
    fan.arrived(2)


@on(nics=(2,), apart=False)
def test_every_form_of_waiting_works(rig: Rig) -> None:
    import asyncio
    import threading

    fan = Fan(rig, fars_of(rig, 3), 1000)
    called = threading.Event()
    fan.scatter([(0, 0, 10)] * 3).add_done_callback(lambda _: called.set())
    assert called.wait(SOON_S)

    async def awaits() -> None:
        await asyncio.gather(*(fan.scatter([(0, 0, 10)] * 3) for _ in range(10)))

    asyncio.run(awaits())
    fan.arrived(11)


@pytest.mark.soak
@on(nics=(1, 3), apart=False)
def test_a_hundred_thousand_scatters_count_exactly(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 8), 4096)
    lengths, places = np.array([0, 1, 64, 256, 1000, 2000, 3000, 4000]), np.arange(8)
    under_way: list[te.Transfer] = []
    for _ in range(100_000):
        under_way.append(fan.target.scatter(fan.region, src_offsets=places, lengths=lengths, dst_offsets=places))
        if len(under_way) == 32:
            under_way.pop(0).wait(SOON_S)
    for transfer in under_way:
        transfer.wait(SOON_S)
    fan.arrived(100_000)
    fan.check([(i, i, int(length)) for i, length in enumerate(lengths)])
