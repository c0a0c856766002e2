"""Prepared transfers: checked and copied once, posted many times from any thread, each post as good as a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .fan import Fan, fars_of
from .rig import SOON_S, Link, Rig, eventually, in_threads, on, pattern


def write_of(link: Link, target: int, source: int, length: int, **arguments: Any) -> te.Write:
    return te.Write(
        link.region[source : source + length], link.remote[target : target + length], link.notify, **arguments
    )


@on(nics=(1, 3))
def test_a_prepared_write_carries_the_bytes_of_each_post_and_counts_each_once(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    memory = np.zeros(20_000, np.uint8)
    region = rig.near.register(memory)
    link = rig.link(20_000)
    with rig.near.prepare(te.Write(region, link.remote, link.notify)) as prepared:
        assert prepared.operation == "write"
        for turn in range(1, 31):
            memory[:] = pattern(turn, 20_000)
            transfer = prepared.post(request_id=turn)
            transfer.wait(SOON_S)
            assert transfer.request_id == turn
            assert link.wait(turn) == turn
            assert rig.far.read(link.memory) == bytes(memory)


@on(nics=(1, 3))
@pytest.mark.parametrize("length", [0, 1, 64, 999, 1000, 50_000])
def test_a_prepared_write_lands_between_untouched_guards(rig: Rig, length: int) -> None:
    rig.set_up(shard_bytes=1000, chunk_bytes=3000)
    link = rig.link(60_000)
    prepared = rig.near.prepare(write_of(link, 77, 33, length))
    transfers = [prepared.post() for _ in range(100)]
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(100) == 100
    link.check([(77, 33, length)], 100)


@on(nics=(1, 3))
def test_prepared_pages_are_those_of_the_moment_of_preparing(rig: Rig) -> None:
    link = rig.link(64 * 256)
    sources, targets = np.arange(32), np.arange(63, 31, -1)
    expected = [(256 * t, 256 * s, 256) for s, t in zip(sources.tolist(), targets.tolist(), strict=True)]
    prepared = rig.near.prepare(
        te.PageWrite(te.Pages(link.region, sources, 256), te.Pages(link.remote, targets, 256), link.notify)
    )
    sources[:] = 0
    targets[:] = 1 << 40
    transfers = [prepared.post() for _ in range(20)]
    prepared.close()
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(20 * 32) == 20 * 32
    link.check(expected, 20 * 32)


@on(nics=(1, 3))
@pytest.mark.parametrize("shard", [None, "peers", "bytes"])
def test_a_prepared_scatter_is_that_of_the_moment_of_preparing(rig: Rig, shard: str | None) -> None:
    rig.set_up(shard_bytes=1000)
    fan = Fan(rig, fars_of(rig, 4, shard_bytes=1000), 30_000)
    arrays = [np.array([1, 2, 3, 4]), np.array([0, 7, 5000, 29_000]), np.array([5, 6, 7, 8])]
    expected = list(zip(*(array.tolist() for array in (arrays[2], arrays[0], arrays[1])), strict=True))
    prepared = rig.near.prepare(
        te.Scatter(fan.target, fan.region, src_offsets=arrays[0], lengths=arrays[1], dst_offsets=arrays[2], shard=shard)
    )
    for array in arrays:
        array[:] = -1
    for _ in range(10):
        transfers = [prepared.post() for _ in range(10)]
        for transfer in transfers:
            transfer.wait(SOON_S)
            assert not transfer.failed_members
        fan.arrived(10)
        fan.check(expected)


@on(nics=(1, 3))
def test_a_flushed_post_is_visible_when_it_is_done(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(30_000)
    fan = Fan(rig, fars_of(rig, 2, shard_bytes=1000), 30_000, counted=False)
    write = rig.near.prepare(te.Write(link.region, link.remote, flush=True))
    pages = rig.near.prepare(
        te.PageWrite(te.Pages(link.region, [3, 1], 1000), te.Pages(link.remote, [7, 8], 1000), flush=True)
    )
    scatter = rig.near.prepare(te.Scatter(fan.target, fan.region, lengths=[30_000, 500], flush=True))
    for _ in range(5):
        link.poison()
        fan.poison()
        write.post().wait(SOON_S)
        link.check([(0, 0, 30_000)], 0)
        link.poison()
        pages.post().wait(SOON_S)
        link.check([(7000, 3000, 1000), (8000, 1000, 1000)], 0)
        scatter.post().wait(SOON_S)
        fan.check([(0, 0, 30_000), (0, 0, 500)])


@on(nics=(1, 3))
def test_many_threads_post_the_same_and_counts_are_exact(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    threads, turns = 16, 25
    link = rig.link(20_000)
    fan = Fan(rig, fars_of(rig, 3, shard_bytes=1000), 20_000)
    write = rig.near.prepare(write_of(link, 10, 20, 9000))
    pages = rig.near.prepare(
        te.PageWrite(te.Pages(link.region, [1, 2, 3], 64), te.Pages(link.remote, [300, 301, 302], 64), link.notify)
    )
    scatter = rig.near.prepare(te.Scatter(fan.target, fan.region, lengths=[0, 100, 15_000]))

    def work(k: int) -> None:
        for _ in range(turns):
            transfers = [prepared.post() for prepared in (write, pages, scatter)]
            for transfer in transfers:
                transfer.wait(SOON_S)

    in_threads(threads, work)
    posts = threads * turns
    assert link.wait(4 * posts) == 4 * posts
    link.check([(10, 20, 9000), (300 * 64, 64, 192)], 4 * posts)
    fan.arrived(posts)
    fan.check([(0, 0, 0), (0, 0, 100), (0, 0, 15_000)])


@on(nics=(2,))
def test_more_posts_than_slots_find_their_place_one_after_the_other(rig: Rig) -> None:
    rig.set_up(operations=16, operations_per_peer=16, immediate_window=4)
    link = rig.link(2000)
    prepared = rig.near.prepare(write_of(link, 0, 0, 2000))
    transfers = [prepared.post() for _ in range(300)]
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(300) == 300
    link.check([(0, 0, 2000)], 300)


# --- what it names must be open ---------------------------------------------------------------------------------------


@on(nics=(2,))
def test_what_is_closed_refuses_further_posts_and_those_under_way_go_on(rig: Rig) -> None:
    link = rig.link(2000)
    fan = Fan(rig, fars_of(rig, 2), 2000)
    write = rig.near.prepare(write_of(link, 0, 0, 2000))
    scatter = rig.near.prepare(te.Scatter(fan.target, fan.region, lengths=[2000, 2000]))
    transfers = [write.post() for _ in range(20)] + [scatter.post() for _ in range(20)]
    write.close()
    write.close()
    assert write.closed
    fan.target.close()
    with pytest.raises(te.EngineClosed, match="prepared transfer is closed"):
        write.post()
    with pytest.raises(te.EngineClosed, match="target is closed"):
        scatter.post()
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(20) == 20
    fan.arrived(20)


@on(nics=(2,))
def test_the_closing_of_either_region_fails_posts_by_name(rig: Rig) -> None:
    link, other = rig.link(2000), rig.link(2000)
    mine, theirs = rig.near.prepare(write_of(link, 0, 0, 2000)), rig.near.prepare(write_of(other, 0, 0, 2000))
    for prepared in (mine, theirs):
        prepared.post().wait(SOON_S)
    link.region.close(SOON_S)
    with pytest.raises(te.RegionClosed, match="on this side"):
        mine.post()
    rig.far.close_memory(other.memory)
    for _ in range(3):
        with pytest.raises(te.RegionClosed) as caught:
            theirs.post().wait(SOON_S)
        assert caught.value.peer == str(other.remote.address)
    assert link.wait(1) == other.wait(1) == 1


@on(nics=(2,))
def test_a_prepared_write_works_after_a_parting(rig: Rig) -> None:
    link = rig.link(2000)
    prepared = rig.near.prepare(write_of(link, 0, 0, 2000))
    for turn in range(1, 6):
        link.poison()
        prepared.post().wait(SOON_S)
        assert link.wait(turn) == turn
        link.check([(0, 0, 2000)])
        rig.near.disconnect(rig.far.address()).wait(SOON_S)


@on(nics=(1,))
def test_what_is_prepared_keeps_its_place_when_remote_regions_are_many(rig: Rig) -> None:
    rig.set_up(max_regions=64, max_counters=64)
    link = rig.link(500)
    prepared = rig.near.prepare(write_of(link, 0, 0, 500))
    for turn in range(1, 151):
        passing = rig.link(100)
        passing.write(0, 0, 100).wait(SOON_S)
        rig.far.close_memory(passing.memory)
        rig.far.close_counter(passing.counter)
        passing.region.close(SOON_S)
        if turn % 30 == 0:
            rig.near.disconnect(rig.far.address()).wait(SOON_S)
            prepared.post().wait(SOON_S)
    assert link.wait(5) == 5
    link.check([(0, 0, 500)], 5)


@on(nics=(2,), apart=False)
def test_a_replaced_member_is_replaced_in_what_is_prepared_too(rig: Rig) -> None:
    fan = Fan(rig, fars_of(rig, 3), 1000)
    prepared = rig.near.prepare(te.Scatter(fan.target, fan.region, lengths=[1000] * 3))
    prepared.post().wait(SOON_S)
    fan.arrived()
    fan.group.replace(2, fan.fars[0].address())
    transfer = prepared.post()
    assert transfer.exception(SOON_S) is not None
    assert set(transfer.failed_members) == {2}
    fan.arrived(but=[2])
    fan.settle(2, fan.fars[0])
    fan.target.replace(2, fan.remotes[2], notify=fan.notify[2])
    prepared.post().wait(SOON_S)
    fan.arrived()
    fan.check([(0, 0, 1000)] * 3)


@on(nics=(1,), apart=False)
def test_prepared_transfers_come_and_go_without_end(rig: Rig) -> None:
    link = rig.link(1000)
    for turn in range(5000):
        prepared = rig.near.prepare(write_of(link, 0, 0, 100))
        if turn % 100 == 0:
            prepared.post().wait(SOON_S)
        if turn % 2:
            prepared.close()
    assert link.wait(50) == 50
    eventually(lambda: rig.near.stats()["engine"]["operations_in_use"] == 0)
