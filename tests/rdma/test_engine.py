"""Engines over real queue pairs: bytes, counters, messages; peers that meet, part, die and return."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from ..conformance.rig import SOON_S, Link, Rig, laid_out, permutation
from .engines import pair

CHUNK = 70_001  # bytes of the longest work request: longer writes take several, as on a device that takes 8 MiB at most
SHARD = 5000
LENGTHS = [
    0, 1, 2, 7, 63, 64, 65, 127, 128, 129, 1023, 4095, 4096, 4097, 2 * SHARD - 1, 2 * SHARD, 2 * SHARD + 1, 65_536,
    CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 1,
]  # fmt: skip

Number = int | tuple[int, int] | str
ALL: list[Number] = [2, "2 apart", (1, 2), (2, 1), 1]


@pytest.fixture(scope="module", params=ALL, ids=str)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """One pair of engines for all tests with these numbers of NICs."""
    number = request.param
    apart = number == "2 apart"
    near, far = number if isinstance(number, tuple) else (2, 2) if apart else (number, number)
    with pair(near, far, apart=apart, chunk_bytes=CHUNK, shard_bytes=SHARD) as opened:
        yield opened


def between(*numbers: Number) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", numbers, indirect=True, ids=str)


def test_an_engine_over_rdma_is_what_was_asked_for(rig: Rig) -> None:
    described = rig.near.describe()
    assert described["transport"] == "cx7"
    assert described["ordered_writes"]
    assert described["keys_enforced"]
    assert rig.near.nics == ("rxe0", "rxe1")[: rig.case.nics]
    for name, nic in rig.near.stats()["nics"].items():
        assert (nic["up"], nic["state"]) == (True, ""), name


def test_writes_of_every_kind_of_length_land_whole_between_untouched_guards_and_count_once(rig: Rig) -> None:
    pieces, size = laid_out(LENGTHS)
    link = rig.link(size)
    for transfer in [link.write(*piece) for piece in pieces]:
        transfer.wait(SOON_S)
    assert link.wait(len(pieces)) == len(pieces)
    link.check(pieces, len(pieces))
    assert all(nic["writes"] for nic in rig.near.stats()["nics"].values())


def test_both_sides_write_at_once(rig: Rig) -> None:
    link = rig.link(150_000)
    target = np.zeros(150_000, np.uint8)
    region, counter = rig.near.register(target), rig.near.counter()
    number, _ = rig.far.memory(150_000)
    rig.far.load(number, 77)
    transfers = [link.write(0, 0, 150_000) for _ in range(5)]
    rig.far.push(number, region.descriptor, counter.descriptor, 5)
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(5) == counter.wait(5, timeout_s=SOON_S) == 5
    link.check([(0, 0, 150_000)], 5)
    assert target.tobytes() == rig.far.read(number)


@between("2 apart")
@pytest.mark.parametrize("page", [1, 576, 4096, CHUNK + 1])
def test_permuted_pages_land_whole_and_count_each(rig: Rig, page: int) -> None:
    count, slots = (60, 80) if page < CHUNK else (3, 5)
    link = rig.link(slots * page)
    targets, sources = permutation(1, count, slots), permutation(2, count, slots)
    link.pages(targets, sources, page).wait(SOON_S)
    assert link.wait(count) == count
    link.check([(int(t) * page, int(s) * page, page) for t, s in zip(targets, sources, strict=True)], count)


@between("2 apart")
def test_a_batch_of_writes_and_pages_lands_whole_and_counts_each(rig: Rig) -> None:
    pieces, size = laid_out([0, 1, 4097, 20_000, CHUNK + 1])
    link = rig.link(size + 40_960)
    writes = [te.Write(link.region[s : s + n], link.remote[t : t + n], notify=link.notify) for t, s, n in pieces]
    sources, targets = [2, 0, 9], [0, 4, 3]
    ends = te.Pages(link.region, sources, 4096, None, size), te.Pages(link.remote, targets, 4096, None, size)
    rig.near.write_batch([*writes, te.PageWrite(*ends, notify=link.notify)]).wait(SOON_S)
    pages = [(size + 4096 * t, size + 4096 * s, 4096) for s, t in zip(sources, targets, strict=True)]
    assert link.wait(8) == 8
    link.check([*pieces, *pages], 8)


@between("2 apart")
def test_a_flushed_write_is_in_memory_when_it_is_done(rig: Rig) -> None:
    link = rig.link(60_000)
    for length in (1, 4097, 60_000):
        link.poison()
        link.write(0, 0, length, notify=False, flush=True).wait(SOON_S)
        link.check([(0, 0, length)], 0)


@between("2 apart")
def test_messages_of_all_lengths_arrive_whole_and_in_order(rig: Rig) -> None:
    texts = [bytes([1 + i % 250]) * n for i, n in enumerate((0, 1, 4095, 4096, 4097, 65_536, 200_001, 0, 3))]
    for transfer in [rig.near.send(rig.far.address(), text) for text in texts]:
        transfer.wait(SOON_S)
    assert [rig.far.receive() for _ in texts] == [(rig.near.address, text) for text in texts]
    for text in texts:
        rig.far.send(rig.near.address, text)
    assert [rig.near.receive(SOON_S).data for _ in texts] == texts


@between((1, 2))
def test_a_write_longer_than_the_device_takes_lands_whole(rig: Rig) -> None:
    near = rig.engine(chunk_bytes=0)
    longest = near.describe()["max_write_bytes"]
    assert longest == 8 << 20
    link = rig.link(longest + 4097, near=near)
    link.write(0, 0, longest + 4097).wait(SOON_S)
    assert link.wait(1) == 1
    link.check([(0, 0, longest + 4097)], 1)


# --- meeting and parting ---------------------------------------------------------------------------------------------


@between(2)
def test_engines_that_turn_to_each_other_at_once_meet_in_one_connection(rig: Rig) -> None:
    link, back = rig.link(30_000), np.zeros(30_000, np.uint8)
    region, counter = rig.near.register(back), rig.near.counter()
    number, _ = rig.far.memory(30_000)
    rig.far.load(number, 5)
    for i in range(1, 6):
        peers = [rig.near.connect(rig.far.address()), rig.far.engine.connect(rig.near.address)]
        for peer in peers:
            peer.wait(SOON_S)
        transfer = link.write(0, i, 20_000)
        rig.far.push(number, region.descriptor, counter.descriptor, 1)
        transfer.wait(SOON_S)
        assert link.wait(i) == counter.wait(i, timeout_s=SOON_S) == i
        link.check([(0, i, 20_000)], i)
        assert back.tobytes() == rig.far.read(number)
        assert [peer.state for peer in peers] == ["connected", "connected"]
        parting = [rig.near.disconnect(rig.far.address()), rig.far.engine.disconnect(rig.near.address)]
        for end in parting:
            end.wait(SOON_S)


@between(2)  # apart: in the conformance suite
def test_parting_and_meeting_again_loses_and_repeats_nothing(rig: Rig) -> None:
    link = rig.link(20_000)
    for i in range(1, 6):
        for transfer in [link.write(0, i, 19_000) for _ in range(4)]:
            transfer.wait(SOON_S)
        assert link.wait(4 * i) == 4 * i
        link.check([(0, i, 19_000)], 4 * i)
        if i % 2:
            rig.near.disconnect(rig.far.address()).wait(SOON_S)
        else:
            rig.far.disconnect(rig.near.address)


def load(link: Link, count: int = 40) -> list[te.Transfer]:
    """More than is sent in a second."""
    return [link.write(0, 0, link.length) for _ in range(count)]


@between(2)
def test_closing_under_load_ends_every_transfer_and_harms_no_other(rig: Rig) -> None:
    leaving = rig.engine()
    doomed, other = rig.link(300_000, near=leaving), rig.link(300_000)
    transfers = load(doomed)
    doomed.wait(1)
    leaving.close(SOON_S)
    failures = [transfer.exception(0) for transfer in transfers]
    good = failures.count(None)
    assert all(isinstance(failure, te.EngineClosed) for failure in failures if failure is not None), failures
    assert good < len(failures)
    assert good <= doomed.value <= len(failures)
    other.write(0, 0, 300_000).wait(SOON_S)
    assert other.wait(1) == 1
    other.check([(0, 0, 300_000)], 1)


# --- death and return ------------------------------------------------------------------------------------------------


LIFE_S = 2.0  # peer_timeout_s
BOUND_S = LIFE_S + 8.0  # an emulated machine is busy


def test_a_killed_peer_is_lost_by_name_within_the_bound_and_returns_as_another() -> None:
    with pair(2, apart=True, peer_timeout_s=LIFE_S, shard_bytes=SHARD) as rig:
        identity: dict[str, Any] = {"identity": bytes(range(1, 17))}
        child = rig.spawn()
        old = rig.link(300_000, far=rig.another_far(child, **identity))
        address = old.remote.address
        transfers = load(old)
        old.wait(3)
        child.kill()
        begin = time.monotonic()
        failures = [transfer.exception(BOUND_S) for transfer in transfers]
        assert time.monotonic() - begin < BOUND_S
        lost = [failure for failure in failures if failure is not None]
        assert lost
        assert {type(failure) for failure in lost} <= {te.PeerLost, te.TransportError}
        assert {failure.peer for failure in lost} == {str(address)}
        assert isinstance(lost[-1], te.PeerLost)
        for transfer in transfers:
            transfer.wait_quiesced(BOUND_S)

        far = rig.another_far(rig.spawn(), **identity)
        new = rig.link(300_000, far=far)
        assert new.remote.address.identity == address.identity
        assert new.remote.address.generation > address.generation
        new.write(0, 0, 300_000).wait(SOON_S)
        with pytest.raises(te.PeerRestarted):
            old.write(0, 0, 10).wait(SOON_S)
        new.write(0, 1, 299_999).wait(SOON_S)
        assert new.wait(2) == 2
        new.check([(0, 1, 299_999), (299_999, 299_999, 1)], 2)
