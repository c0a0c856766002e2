"""Peer groups, targets and prepared transfers: types, bad input, names in errors, life cycle."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.transfers import of_members

SOON_S = 20.0
SIZE = 4096


@dataclass
class Crowd:
    """A sender, two receivers, and a group of them in which the first is twice."""

    near: te.Engine
    fars: list[te.Engine]
    region: te.Region
    group: te.PeerGroup
    remotes: list[te.RegionDescriptor]
    counters: list[te.Counter]
    notify: list[te.CounterDescriptor]
    target: te.Target


@pytest.fixture
def crowd(make_engine: Callable[..., te.Engine]) -> Crowd:
    near, *fars = (make_engine() for _ in range(3))
    owners = [fars[0], fars[1], fars[0]]
    remotes = [owner.register(bytearray(SIZE)).descriptor for owner in owners]
    counters = [owner.counter() for owner in owners]
    notify = [counter.descriptor for counter in counters]
    group = near.peer_group([owner.address for owner in owners])
    region = near.register(bytearray(range(256)) * (SIZE // 256))
    return Crowd(near, fars, region, group, remotes, counters, notify, group.target(remotes, notify=notify))


def counts(crowd: Crowd) -> list[int]:
    return [counter.value for counter in crowd.counters]


def still_works(crowd: Crowd) -> None:
    before = counts(crowd)
    crowd.target.scatter(crowd.region, lengths=[10, 0, 20]).wait(SOON_S)
    for counter, value in zip(crowd.counters, before, strict=True):
        assert counter.wait(value + 1, timeout_s=SOON_S) == value + 1


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_shows_its_members(crowd: Crowd) -> None:
    addresses = [crowd.fars[0].address, crowd.fars[1].address, crowd.fars[0].address]
    assert crowd.group.members == tuple(addresses)
    assert len(crowd.group) == 3
    assert crowd.group.place is None
    assert "3 members" in repr(crowd.group)
    assert "3 members" in repr(crowd.target)
    assert len(crowd.target) == 3
    crowd.group.wait(SOON_S)
    assert all(crowd.near.connect(address).state == "connected" for address in addresses)


def test_members_are_given_in_any_form(crowd: Crowd) -> None:
    address = crowd.fars[0].address
    group = crowd.near.peer_group(iter([address, bytes(address), str(address), crowd.near.connect(address)]))
    assert group.members == (address,) * 4
    group.wait(SOON_S)


@pytest.mark.parametrize("members", ["te1:abc", b"tea", 5, None])
def test_one_address_is_no_list_of_them(engine: te.Engine, members: Any) -> None:
    with pytest.raises(te.ArgumentTypeError, match="list of addresses"):
        engine.peer_group(members)
    with pytest.raises(te.ArgumentTypeError, match="list of addresses"):
        engine.peer_group(engine.address)  # type: ignore[arg-type]


def test_members_that_are_no_addresses_are_refused(engine: te.Engine) -> None:
    with pytest.raises(te.DescriptorError):
        engine.peer_group([engine.address, b"hello"])
    with pytest.raises(te.ArgumentTypeError):
        engine.peer_group([engine.address, 7])  # type: ignore[list-item]


def test_more_members_than_there_may_be_are_refused(engine: te.Engine) -> None:
    with pytest.raises(te.ArgumentError, match=r"65537 members; at most 65536"):
        engine.peer_group([engine.address] * 65537)
    assert len(engine.peer_group([engine.address] * 65536)) == 65536


def test_a_place_is_one_among_the_members(crowd: Crowd) -> None:
    addresses = crowd.group.members
    for place in (0, 2, np.int64(1)):
        group = crowd.near.peer_group(addresses, place=place)
        assert group.place == place
        group.target(crowd.remotes, notify=crowd.notify).scatter(crowd.region, lengths=[1, 2, 3]).wait(SOON_S)
    for wrong in (-1, 3):
        with pytest.raises(te.RangeError, match=str(wrong)):
            crowd.near.peer_group(addresses, place=wrong)
    with pytest.raises(te.ArgumentTypeError, match="str"):
        crowd.near.peer_group(addresses, place="first")  # type: ignore[arg-type]
    with pytest.raises(te.RangeError):
        crowd.near.peer_group([], place=0)


def test_waiting_names_the_members_that_do_not_answer(make_engine: Callable[..., te.Engine]) -> None:
    near, gone, there = make_engine(connect_timeout_s=1.0), make_engine(), make_engine()
    address = gone.address
    gone.close()
    near.connect(there.address).wait(SOON_S)
    group = near.peer_group([there.address, address, address])
    with pytest.raises(te.TransferTimeout, match=r"1 of 3 members are connected after 0.0\d* s; missing: 1 \(peer"):
        group.wait(0.02)
    with pytest.raises(te.PeerUnreachable, match=r"2 of 3 members failed: 1 \(peer te1:.*\), 2 \(peer te1:") as caught:
        group.wait(SOON_S)
    assert caught.value.peer == str(address)
    group.replace(1, there.address)
    group.replace(2, bytes(there.address))
    group.wait(SOON_S)


# --- targets ----------------------------------------------------------------------------------------------------------


def test_a_target_needs_an_entry_for_each_member(crowd: Crowd) -> None:
    for remotes, notify in (
        (crowd.remotes[:2], crowd.notify), (crowd.remotes, crowd.notify[:2]), ([*crowd.remotes, None], None),
        ([], None),
    ):  # fmt: skip
        with pytest.raises(te.ArgumentError, match="for 3 members"):
            crowd.group.target(remotes, notify=notify)
    for wrong in (crowd.remotes[0], bytes(crowd.remotes[0]), 5, iter(crowd.remotes)):
        with pytest.raises(te.ArgumentTypeError, match="list with an entry for each member"):
            crowd.group.target(wrong)  # type: ignore[arg-type]
    still_works(crowd)


def test_a_target_takes_descriptors_and_names_the_member_that_has_something_else(crowd: Crowd) -> None:
    for wrong in (crowd.region, crowd.remotes[1][:10], bytes(crowd.remotes[1]), crowd.notify[1]):
        with pytest.raises(te.ArgumentTypeError, match="member 1"):
            crowd.group.target([crowd.remotes[0], wrong, None])  # type: ignore[list-item]
    for wrong in (crowd.counters[1], crowd.remotes[1], bytes(crowd.notify[1])):
        with pytest.raises(te.ArgumentTypeError, match=r"member 1: notify"):
            crowd.group.target(crowd.remotes, notify=[None, wrong, None])  # type: ignore[list-item]
        with pytest.raises(te.ArgumentTypeError, match=r"member 1: notify"):
            crowd.group.barrier(notify=[None, wrong, None])  # type: ignore[list-item]
    still_works(crowd)


def test_descriptors_must_belong_to_their_member(crowd: Crowd) -> None:
    with pytest.raises(te.ArgumentError, match="member 1: the region belongs to another engine") as caught:
        crowd.group.target([crowd.remotes[0], crowd.remotes[2], None])
    assert caught.value.peer == str(crowd.fars[1].address)
    assert "order" in caught.value.hint
    with pytest.raises(te.ArgumentError, match="member 0: the counter belongs to another engine"):
        crowd.group.target(crowd.remotes, notify=[crowd.notify[1], None, None])
    with pytest.raises(te.ArgumentError, match="barrier: member 0: the counter belongs"):
        crowd.group.barrier(notify=[crowd.notify[1], None, None])
    still_works(crowd)


def test_a_barrier_needs_a_list_of_counters(crowd: Crowd) -> None:
    for wrong in (None, crowd.notify[0], 5, [1, 2, 3], ["a", "b", "c"]):
        with pytest.raises(te.ArgumentTypeError):
            crowd.group.barrier(notify=wrong)  # type: ignore[arg-type]
    with pytest.raises(te.ArgumentError, match="2 notify for 3 members"):
        crowd.group.barrier(notify=crowd.notify[:2])
    assert counts(crowd) == [0, 0, 0]


# --- scatters ---------------------------------------------------------------------------------------------------------

BAD_ARRAYS: dict[str, tuple[type[te.TransferEngineError], Any]] = {
    "too_few": (te.ArgumentError, [1, 2]),
    "too_many": (te.ArgumentError, np.arange(4)),
    "nothing": (te.ArgumentError, []),
    "scalar": (te.ArgumentTypeError, 5),
    "floats": (te.ArgumentTypeError, [1.0, 2.0, 3.0]),
    "float_array": (te.ArgumentTypeError, np.zeros(3)),
    "bools": (te.ArgumentTypeError, [True, False, True]),
    "uint64": (te.ArgumentTypeError, np.zeros(3, np.uint64)),
    "text": (te.ArgumentTypeError, ["a", "b", "c"]),
    "objects": (te.ArgumentTypeError, [object()] * 3),
    "beyond_64_bits": (te.ArgumentTypeError, [0, 1 << 70, 0]),
    "two_dimensions": (te.ArgumentError, np.zeros((3, 1), np.int64)),
    "negative": (te.RangeError, [0, -1, 0]),
    "outside": (te.RangeError, [0, SIZE + 1, 0]),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
@pytest.mark.parametrize("which", ["src_offsets", "lengths", "dst_offsets"])
@pytest.mark.parametrize("how", ["scatter", "prepare"])
def test_wrong_arrays_are_refused_before_anything_is_posted(crowd: Crowd, name: str, which: str, how: str) -> None:
    error, wrong = BAD_ARRAYS[name]
    arrays: dict[str, Any] = {"src_offsets": [0, 0, 0], "lengths": [0, 1, 0], "dst_offsets": [0, 0, 0], which: wrong}

    def call() -> None:
        if how == "scatter":
            crowd.target.scatter(crowd.region, **arrays)
        else:
            crowd.near.prepare(te.Scatter(crowd.target, crowd.region, **arrays))

    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert ("member 1" if error is te.RangeError else which) in text
    assert caught.value.hint
    assert counts(crowd) == [0, 0, 0]
    still_works(crowd)


def test_lengths_are_needed(crowd: Crowd) -> None:
    with pytest.raises(TypeError, match="lengths"):
        crowd.target.scatter(crowd.region)  # type: ignore[call-arg]
    with pytest.raises(te.ArgumentTypeError, match="lengths"):
        crowd.target.scatter(crowd.region, lengths=None)


def test_other_arguments_of_wrong_type_or_value_are_refused(crowd: Crowd, make_engine: Any) -> None:
    lengths = [1, 2, 3]
    foreign = make_engine().register(bytearray(SIZE))
    for region in (bytearray(SIZE), crowd.remotes[0], crowd.remotes[0][:10], None, crowd.near.allocate(SIZE)):
        with pytest.raises(te.ArgumentTypeError, match="source must be"):
            crowd.target.scatter(region, lengths=lengths)
    for region in (foreign, foreign[:10]):
        with pytest.raises(te.ArgumentError, match="another engine"):
            crowd.target.scatter(region, lengths=lengths)
    with pytest.raises(te.ArgumentTypeError, match="flush"):
        crowd.target.scatter(crowd.region, lengths=lengths, flush=1)  # type: ignore[arg-type]
    with pytest.raises(te.ArgumentTypeError, match="shard"):
        crowd.target.scatter(crowd.region, lengths=lengths, shard=2)  # type: ignore[arg-type]
    with pytest.raises(te.ArgumentError, match="'peers', 'bytes' or None"):
        crowd.target.scatter(crowd.region, lengths=lengths, shard="nics")
    with pytest.raises(te.ArgumentError, match="-1"):
        crowd.target.scatter(crowd.region, lengths=lengths, timeout_s=-1)
    with pytest.raises(te.ArgumentError, match="-1"):
        crowd.group.barrier(notify=crowd.notify, timeout_s=-1)
    with pytest.raises(te.ArgumentTypeError):
        crowd.target.scatter(crowd.region, lengths=lengths, timeout_s="soon")  # type: ignore[arg-type]
    with pytest.raises(te.ArgumentTypeError, match=r"expected te\.Write or te\.PageWrite"):
        crowd.near.write_batch([te.Scatter(crowd.target, crowd.region, lengths=lengths)])  # type: ignore[list-item]
    with pytest.raises(te.RangeError, match="member 3"):
        crowd.target.replace(3, crowd.remotes[0])
    with pytest.raises(te.RangeError, match="member -1"):
        crowd.group.replace(-1, crowd.fars[0].address)
    with pytest.raises(te.ArgumentTypeError, match="index"):
        crowd.group.replace("1", crowd.fars[0].address)  # type: ignore[arg-type]
    with pytest.raises(te.DescriptorError):
        crowd.group.replace(1, b"nobody")
    assert counts(crowd) == [0, 0, 0]
    still_works(crowd)


def test_a_region_closed_on_this_side_is_no_source(crowd: Crowd) -> None:
    region = crowd.near.register(bytearray(SIZE))
    prepared = crowd.near.prepare(te.Scatter(crowd.target, region, lengths=[1, 2, 3]))
    region.close()
    with pytest.raises(te.RegionClosed, match="on this side"):
        crowd.target.scatter(region, lengths=[1, 2, 3])
    with pytest.raises(te.RegionClosed, match="on this side"):
        prepared.post()
    still_works(crowd)


def test_the_source_lives_as_long_as_the_transfer(crowd: Crowd) -> None:
    for turn in range(50):
        data = np.full(SIZE, turn, np.uint8)
        transfer = crowd.target.scatter(crowd.near.register(data), lengths=[SIZE] * 3)
        del data
        gc.collect(0)
        transfer.wait(SOON_S)
    assert crowd.counters[0].wait(50, timeout_s=SOON_S) == 50


def test_transfers_that_are_no_scatters_have_no_members(crowd: Crowd) -> None:
    transfer = crowd.near.write(crowd.region[:10], crowd.remotes[0][:10])
    transfer.wait(SOON_S)
    assert transfer.failed_members == {}
    good = crowd.target.scatter(crowd.region, lengths=[1, 2, 3])
    good.wait(SOON_S)
    assert good.failed_members == {}
    assert "scatter" in repr(good)
    assert "barrier: done" in repr(_waited(crowd.group.barrier(notify=crowd.notify)))


def _waited(transfer: te.Transfer) -> te.Transfer:
    transfer.wait(SOON_S)
    return transfer


def test_errors_of_members_are_like_other_errors(crowd: Crowd) -> None:
    crowd.group.wait(SOON_S)
    crowd.group.replace(1, crowd.near.address)
    transfer = crowd.target.scatter(crowd.region, lengths=[1, 2, 3], request_id="layer 7")
    failure = transfer.exception(SOON_S)
    assert failure is not None
    assert "layer 7" in str(failure)
    [(member, error)] = transfer.failed_members.items()
    assert member == 1
    assert type(error) is type(failure)
    assert error.operation == failure.operation == "scatter"
    assert error.elapsed_s is not None
    assert "target.replace" in error.hint
    assert "target.replace" in failure.hint
    with pytest.raises(TypeError):
        transfer.failed_members[0] = error  # type: ignore[index]
    assert str(pickle.loads(pickle.dumps(failure))) == str(failure)


def test_an_error_about_many_members_names_the_first_and_counts_the_rest() -> None:
    failed: dict[int, te.TransferEngineError] = {
        i: te.PeerLost("silent", peer=f"te1:{i:03d}" + "x" * 100 + f"{i:03d}", nic="eth0", elapsed_s=1.5)
        for i in range(7, 64)
    }
    error = of_members(failed, 64, "scatter", " (request 5)")
    assert type(error) is te.PeerLost
    assert error.message.startswith("57 of 64 members failed: 7 (peer te1:007xxx")
    assert " and 49 more; member 7: silent (request 5)" in error.message
    assert "xxx014)" in error.message
    assert len(error.message) < 600
    assert (error.nic, error.elapsed_s, error.operation) == ("eth0", 1.5, "scatter")


# --- life cycle -------------------------------------------------------------------------------------------------------


def test_what_is_closed_refuses_and_closes_again(crowd: Crowd) -> None:
    spare = crowd.group.target(crowd.remotes)
    prepared = crowd.near.prepare(te.Write(crowd.region, crowd.remotes[0]))
    scatter = crowd.near.prepare(te.Scatter(crowd.target, crowd.region, lengths=[1, 2, 3]))
    with spare:
        assert not spare.closed
    assert spare.closed
    with pytest.raises(te.EngineClosed, match="target is closed") as caught:
        spare.scatter(crowd.region, lengths=[1, 2, 3])
    assert "group.target" in caught.value.hint
    with pytest.raises(te.EngineClosed, match="target is closed"):
        spare.replace(1, None)
    with prepared:
        prepared.post().wait(SOON_S)
    with pytest.raises(te.EngineClosed, match="prepared transfer is closed"):
        prepared.post()
    with crowd.group as group:
        group.barrier(notify=crowd.notify).wait(SOON_S)
    assert group.closed
    assert crowd.target.closed
    for call in (
        lambda: group.target(crowd.remotes),
        lambda: group.barrier(notify=crowd.notify),
        lambda: group.replace(0, crowd.near.address),
        lambda: group.wait(0),
    ):
        with pytest.raises(te.EngineClosed, match="group is closed"):
            call()
    with pytest.raises(te.EngineClosed, match="target is closed"):
        scatter.post()
    for thing in (spare, prepared, scatter, crowd.group, crowd.target):
        thing.close()  # type: ignore[attr-defined]
        assert "closed" in repr(thing)


def test_a_closed_engine_refuses_groups_and_what_was_made_of_them(crowd: Crowd) -> None:
    prepared = crowd.near.prepare(te.Write(crowd.region, crowd.remotes[0]))
    transfer = crowd.target.scatter(crowd.region, lengths=[1, 2, 3])
    transfer.wait(SOON_S)
    crowd.near.close()
    for call in (
        lambda: crowd.near.peer_group([]),
        lambda: crowd.near.prepare(te.Write(crowd.region, crowd.remotes[0])),
        lambda: crowd.group.target(crowd.remotes),
        lambda: crowd.group.barrier(notify=crowd.notify),
        lambda: crowd.group.replace(0, crowd.fars[0].address),
        lambda: crowd.group.wait(0),
        lambda: crowd.target.scatter(crowd.region, lengths=[1, 2, 3]),
        lambda: crowd.target.replace(0, None),
        prepared.post,
    ):
        with pytest.raises(te.EngineClosed, match="engine is closed"):
            call()
    assert crowd.group.closed
    assert crowd.target.closed
    assert prepared.closed
    for thing in (crowd.group, crowd.target, prepared):
        thing.close()  # type: ignore[attr-defined]
    assert transfer.failed_members == {}
    assert transfer.times.finished_s is not None


def test_a_dropped_target_makes_room_for_others(crowd: Crowd) -> None:
    for _ in range(300):
        crowd.group.target(crowd.remotes, notify=crowd.notify)
        crowd.near.peer_group(crowd.group.members).barrier(notify=crowd.notify)
    gc.collect()
    still_works(crowd)


def test_groups_stay_in_their_process(crowd: Crowd) -> None:
    prepared = crowd.near.prepare(te.Write(crowd.region, crowd.remotes[0]))
    for thing in (crowd.group, crowd.target, prepared):
        for copied in (pickle.dumps, copy.copy):
            with pytest.raises(te.ArgumentTypeError, match="cannot be pickled"):
                copied(thing)


# --- prepared ---------------------------------------------------------------------------------------------------------


def test_only_descriptions_can_be_prepared(crowd: Crowd, make_engine: Any) -> None:
    for wrong in (crowd.region, None, "write", te.Pages(crowd.region, [0], 64)):
        with pytest.raises(te.ArgumentTypeError, match="can be prepared"):
            crowd.near.prepare(wrong)
    for write in (
        te.Write(crowd.region[:5], crowd.remotes[0][:6]),
        te.PageWrite(te.Pages(crowd.region, [0, 1], 64), te.Pages(crowd.remotes[0], [0], 64)),
    ):
        with pytest.raises(te.ArgumentError):
            crowd.near.prepare(write)
    with pytest.raises(te.RangeError):
        crowd.near.prepare(te.PageWrite(te.Pages(crowd.region, [0], 64), te.Pages(crowd.remotes[0], [SIZE // 64], 64)))
    for source in (bytearray(5), crowd.remotes[0][:5], None):
        with pytest.raises(te.ArgumentTypeError):
            crowd.near.prepare(te.Write(source, crowd.remotes[0][:5]))  # type: ignore[arg-type]
    with pytest.raises(te.ArgumentTypeError, match=r"te\.Target"):
        crowd.near.prepare(te.Scatter(crowd.group, crowd.region, lengths=[1, 2, 3]))  # type: ignore[arg-type]
    other = make_engine()
    with pytest.raises(te.ArgumentError, match="another engine"):
        other.prepare(te.Scatter(crowd.target, crowd.region, lengths=[1, 2, 3]))
    with pytest.raises(te.ArgumentError, match="another engine"):
        other.prepare(te.Write(crowd.region, crowd.remotes[0]))
    assert counts(crowd) == [0, 0, 0]


def test_a_prepared_transfer_says_what_it_is(crowd: Crowd) -> None:
    write = crowd.near.prepare(te.Write(crowd.region, crowd.remotes[0]))
    pages = crowd.near.prepare(te.PageWrite(te.Pages(crowd.region, [0], 64), te.Pages(crowd.remotes[0], [0], 64)))
    scatter = crowd.near.prepare(te.Scatter(crowd.target, crowd.region, lengths=[1, 2, 3]))
    assert [prepared.operation for prepared in (write, pages, scatter)] == ["write", "write_pages", "scatter"]
    assert repr(pages) == "<te.Prepared write_pages>"
    transfer = scatter.post(request_id=3)
    transfer.wait(SOON_S)
    assert (transfer.operation, transfer.request_id) == ("scatter", 3)
