"""Peers that die, stop, restart and return: a bound, a name, and no harm to anybody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import BOUND_S, LIFE_S, POISON, SLOWNESS, SOON_S, Link, Mortal, Rig, eventually, on, on_mortals

IDENTITY = bytes(range(1, 17))


def load(link: Link) -> list[te.Transfer]:
    """Writes that are under way when the axe falls."""
    return [link.write(0, 0, link.length) for _ in range(40)]


# --- death -----------------------------------------------------------------------------------------------------------


@on_mortals
def test_all_work_towards_a_killed_peer_fails_within_the_bound_and_names_it(rig: Rig, life: dict[str, Any]) -> None:
    mortal = Mortal(rig, **life)
    link = rig.link(20_000, far=mortal.far)
    link.write(0, 0, 20_000).wait(SOON_S)
    address = str(link.remote.address)
    mortal.kill()
    begin = time.monotonic()
    transfers = load(link)
    failures = [transfer.exception(BOUND_S) for transfer in transfers]
    assert time.monotonic() - begin < BOUND_S
    lost = [failure for failure in failures if failure is not None]
    assert lost
    for failure in lost:
        assert isinstance(failure, te.PeerLost | te.TransportError)
        assert failure.peer == address
    assert isinstance(lost[-1], te.PeerLost)
    with pytest.raises(te.PeerError):
        link.write(0, 0, 10, timeout_s=SOON_S).wait(SOON_S)
    with pytest.raises(te.PeerError):
        rig.near.send(address, b"hello").wait(SOON_S)


@on_mortals
def test_a_silent_death_is_noticed_without_any_work(rig: Rig, life: dict[str, Any]) -> None:
    mortal = Mortal(rig, **life)
    lost: list[te.Peer] = []
    noticed = threading.Event()

    def on_lost(peer: te.Peer) -> None:
        lost.append(peer)
        noticed.set()

    rig.near.on_peer_lost(on_lost)
    address = mortal.far.address()
    peer = rig.near.connect(address)
    peer.wait(SOON_S)
    mortal.kill()
    begin = time.monotonic()
    assert noticed.wait(BOUND_S)
    assert time.monotonic() - begin < BOUND_S
    assert [seen.address for seen in lost] == [address]
    assert peer.state == "lost"


@on_mortals
def test_others_are_not_touched_by_a_death(rig: Rig, life: dict[str, Any]) -> None:
    mortal = Mortal(rig, **life)
    doomed, other = rig.link(20_000, far=mortal.far), rig.link(20_000)
    doomed.write(0, 0, 20_000).wait(SOON_S)
    other.write(0, 0, 20_000).wait(SOON_S)
    failing = load(doomed)
    mortal.kill()
    written = 1
    deadline = time.monotonic() + BOUND_S
    while not all(transfer.done() for transfer in failing):
        other.write(0, written % 7, 15_000).wait(SOON_S)
        written += 1
        assert time.monotonic() < deadline
    for _ in range(20):
        other.write(0, 0, 20_000).wait(SOON_S)
        written += 1
    assert other.wait(written) == written
    other.check([(0, 0, 20_000)])


@on_mortals
def test_counters_fail_only_for_those_who_named_the_dead(rig: Rig, life: dict[str, Any]) -> None:
    mortal = Mortal(rig, **life)
    rig.near.connect(mortal.far.address()).wait(SOON_S)
    rig.near.connect(rig.far.address()).wait(SOON_S)
    named, unnamed, others = (rig.near.counter() for _ in range(3))
    arrivals = [
        named.reached(1, peers=[mortal.far.address()]),
        named.reached(1, peers=[rig.far.address(), mortal.far.address()]),
    ]
    patient = [unnamed.reached(1), others.reached(1, peers=[rig.far.address()])]
    address = str(mortal.far.address())
    mortal.kill()
    for arrival in arrivals:
        failure = arrival.exception(BOUND_S)
        assert isinstance(failure, te.PeerLost)
        assert failure.peer == address
    with pytest.raises(te.PeerLost):
        named.wait(1, timeout_s=SOON_S, peers=[address])
    assert not any(arrival.done() for arrival in patient)
    memory, target = rig.far.memory(8)[0], rig.near.register(bytearray(8)).descriptor
    rig.far.push(memory, target, unnamed.descriptor, 1)
    rig.far.push(memory, target, others.descriptor, 1)
    assert [arrival.result(SOON_S) for arrival in patient] == [1, 1]


@on_mortals
def test_memory_that_a_dead_peer_could_write_is_free_again_within_the_bound(rig: Rig, life: dict[str, Any]) -> None:
    """The engine that lives is the owner; the dead one has been writing."""
    mortal = Mortal(rig, **life)
    target = np.full(100_000, POISON, np.uint8)
    region, counter = rig.near.register(target), rig.near.counter()
    number, _ = mortal.far.memory(100_000)
    mortal.far.push(number, region.descriptor, counter.descriptor, 3)
    assert counter.wait(3) == 3
    address = mortal.far.address()
    mortal.kill()
    begin = time.monotonic()
    rig.near.fence(address).wait(SOON_S)
    region.close(SOON_S)
    counter.close(SOON_S)
    assert time.monotonic() - begin < BOUND_S
    target[:] = 0
    rig.link(1000).write(0, 0, 1000).wait(SOON_S)
    assert not target.any()


@on(nics=(2,), apart=True)
def test_a_writer_killed_in_the_middle_leaves_counters_right_and_memory_to_its_owner(
    rig: Rig, life: dict[str, Any]
) -> None:
    rig.clean = False  # notifications of the dead have no meaning once it is fenced
    child = rig.spawn()
    far = rig.another_far(child, **life)
    target = np.full(1 << 20, POISON, np.uint8)
    region, counter = rig.near.register(target), rig.near.counter()
    number, _ = far.memory(1 << 20)
    thread = threading.Thread(target=push_until_killed, args=(far, number, region.descriptor, counter.descriptor))
    thread.start()
    counter.wait(5)
    address = next(iter(rig.near.stats()["peers"]))
    child.kill()
    thread.join(SOON_S)
    rig.near.fence(address).wait(SOON_S)
    value = counter.value
    assert 5 <= value <= 2000
    region.close(SOON_S)
    target[:] = 0
    link = rig.link(50_000)
    for _ in range(20):
        link.write(0, 0, 50_000).wait(SOON_S)
    assert link.wait(20) == 20
    assert not target.any()
    assert counter.value == value


def push_until_killed(far: Any, *arguments: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        far.push(*arguments, 2000)


# --- silence ---------------------------------------------------------------------------------------------------------


@on(nics=(2,), apart=True)
def test_a_peer_that_stops_is_lost_and_may_return(rig: Rig, life: dict[str, Any]) -> None:
    rig.clean = False  # what it had sent before it was lost arrives when it wakes up
    child = rig.spawn()
    far = rig.another_far(child, **life)
    link = rig.link(20_000, far=far)
    link.write(0, 0, 20_000).wait(SOON_S)
    assert link.wait(1) == 1
    peer = rig.near.connect(link.remote.address)
    child.stop()
    eventually(lambda: peer.state == "lost", BOUND_S)
    with pytest.raises(te.PeerError):
        link.write(0, 0, 10, timeout_s=SOON_S).wait(SOON_S)
    child.resume()

    def returned() -> bool:
        return rig.near.connect(far.address()).state == "connected"

    eventually(returned)
    again = rig.link(20_000, far=far)
    again.write(0, 0, 20_000).wait(SOON_S)
    assert again.wait(1) == 1
    again.check([(0, 0, 20_000)], 1)


@on(nics=(2,), apart=True)
def test_memory_that_a_peer_held_before_it_was_lost_is_free_once_it_has_returned(
    rig: Rig, life: dict[str, Any]
) -> None:
    rig.clean = False  # what it had sent before it was lost arrives when it wakes up
    child = rig.spawn()
    far = rig.another_far(child, **life)
    target = np.full(1000, POISON, np.uint8)
    region, counter = rig.near.register(target), rig.near.counter()
    number, _ = far.memory(1000)
    far.push(number, region.descriptor, counter.descriptor, 1)
    address = far.address()
    child.stop()
    eventually(lambda: rig.near.stats()["peers"][str(address)]["state"] == "lost", BOUND_S)
    child.resume()
    eventually(lambda: rig.near.connect(address).state == "connected")
    rig.near.fence(address, timeout_s=BOUND_S).wait(SOON_S)
    region.close(BOUND_S)
    counter.close(BOUND_S)


@on(nics=(2,), apart=True)
def test_the_owner_of_memory_hears_the_truth_about_a_writer_that_stopped(rig: Rig, life: dict[str, Any]) -> None:
    child = rig.spawn()
    far = rig.another_far(child, **life)
    target = np.full(1000, POISON, np.uint8)
    region = rig.near.register(target)
    number, _ = far.memory(1000)
    far.push(number, region.descriptor, None, 1)
    address = far.address()
    child.stop()
    if rig.near.describe()["keys_enforced"]:
        rig.near.fence(address).wait(SOON_S)
        region.close(SOON_S)
    else:  # only its end proves that it writes no more
        with pytest.raises(te.TransferTimeout):
            region.close(LIFE_S * 3)
        child.kill()
        region.close(SOON_S)
    child.resume()
    assert (target == POISON).all()


# --- return ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def reborn_settings(rig: Rig, life: dict[str, Any]) -> dict[str, Any]:
    """Settings with which an engine comes back where it was."""
    here: dict[str, Any] = {"identity": IDENTITY, "nic_count": 1}
    if rig.case.transport.name == "tcp":
        port = free_port()
        here["ports"] = (port, port)
    if rig.case.transport.faults:
        here["sim"] = f"{rig.case.transport.options},address=reborn"
    return {**life, **here}


@on_mortals
def test_handles_of_a_former_life_say_that_the_peer_restarted_and_new_ones_work(rig: Rig, life: dict[str, Any]) -> None:
    settings = reborn_settings(rig, life)
    mortal = Mortal(rig, **settings)
    old = rig.link(5000, far=mortal.far)
    old.write(0, 0, 5000).wait(SOON_S)
    old_address = old.remote.address
    mortal.kill()
    reborn = Mortal(rig, **settings)
    new = rig.link(5000, far=reborn.far)
    assert new.remote.address.identity == old_address.identity
    assert new.remote.address.generation > old_address.generation
    new.write(0, 0, 5000).wait(SOON_S)
    assert new.wait(1) == 1
    for _ in range(2):
        with pytest.raises(te.PeerRestarted):
            old.write(0, 0, 5000, timeout_s=SOON_S).wait(SOON_S)
        with pytest.raises(te.PeerRestarted):
            rig.near.send(old_address, b"hello").wait(SOON_S)
    new.write(0, 0, 5000).wait(SOON_S)
    assert new.wait(2) == 2
    new.check([(0, 0, 5000)], 2)


# Not on RDMA: what comes back there has other queue pairs, so nobody answers in the old place.
@on(nics=(1,), transports=("sim", "tcp"))
def test_a_restart_is_seen_by_those_who_only_hold_old_handles(rig: Rig, life: dict[str, Any]) -> None:
    """They reach the old place, and somebody else answers."""
    settings = reborn_settings(rig, life)
    first = rig.another_far(**settings)
    old = rig.link(5000, far=first)
    first.close()
    second = rig.another_far(**settings)
    number, _ = second.memory(5000)
    with pytest.raises(te.PeerRestarted):
        old.write(0, 0, 5000, timeout_s=SOON_S).wait(SOON_S)
    assert second.read(number) == bytes([POISON]) * 5000


# --- acquaintance ----------------------------------------------------------------------------------------------------


@on(nics=[2, (1, 3)])
def test_connecting_ahead_is_idempotent_and_works_from_both_sides_at_once(rig: Rig) -> None:
    address = rig.far.address()
    peers = [rig.near.connect(address) for _ in range(5)]
    rig.far.connect(rig.near.address)
    for peer in peers:
        peer.wait(SOON_S)
        assert peer.state == "connected"
    assert rig.far.peer_state(rig.near.address) == "connected"
    assert rig.near.stats()["engine"]["peers"] == 1


@on(nics=(2,), apart=False)
def test_nobody_at_an_address_is_unreachable_within_the_bound_and_named(rig: Rig) -> None:
    rig.set_up(connect_timeout_s=0.3)
    gone = rig.another_far()
    address = gone.address()
    gone.close()
    begin = time.monotonic()
    with pytest.raises(te.PeerUnreachable) as caught:
        rig.near.connect(address).wait(SOON_S)
    assert time.monotonic() - begin < 0.3 + 3 * SLOWNESS
    assert caught.value.peer == str(address)
    with pytest.raises(te.PeerUnreachable):
        rig.near.send(address, b"hello").wait(SOON_S)


@on(nics=(2,))
def test_a_peer_that_says_goodbye_is_gone_at_once(rig: Rig) -> None:
    leaving = rig.another_far()
    link, other = rig.link(5000, far=leaving), rig.link(5000)
    link.write(0, 0, 5000).wait(SOON_S)
    other.write(0, 0, 5000).wait(SOON_S)
    peer = rig.near.connect(link.remote.address)
    leaving.close()
    eventually(lambda: peer.state in ("lost", "closed"), 2.0)  # not the time-out of silence
    with pytest.raises(te.PeerError):
        link.write(0, 0, 10).wait(SOON_S)
    other.write(0, 0, 5000).wait(SOON_S)
    assert other.wait(2) == 2


@on(nics=(2,))
def test_parting_and_meeting_again_loses_and_repeats_nothing(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(20_000)
    expected = 0
    for _ in range(10):
        for _ in range(10):
            link.write(0, 0, 20_000).wait(SOON_S)
            expected += 1
        rig.near.disconnect(rig.far.address()).wait(SOON_S)
    assert link.wait(expected) == expected
    link.check([(0, 0, 20_000)], expected)


@on(nics=(2,))
def test_a_peer_that_parted_from_us_is_met_again(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(20_000)
    good = failed = 0

    def worked() -> bool:
        nonlocal good, failed
        try:
            link.write(0, 0, 20_000).wait(SOON_S)
        except te.PeerLost:
            failed += 1
            return False
        good += 1
        return True

    for _ in range(10):
        eventually(worked)
        rig.far.disconnect(rig.near.address)
    eventually(worked)
    assert good <= link.wait(good) <= good + failed
    link.check([(0, 0, 20_000)])


@on(nics=(2,))
def test_parting_under_load_ends_every_transfer(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(20_000)
    link.write(0, 0, 20_000).wait(SOON_S)
    good, unsure = 1, 0
    for _ in range(5):
        transfers = load(link)
        rig.near.disconnect(rig.far.address()).wait(SOON_S)
        for transfer in transfers:
            failure = transfer.exception(SOON_S)
            transfer.wait_quiesced(SOON_S)
            good += failure is None
            unsure += failure is not None
            assert isinstance(failure, te.PeerError | te.TransferCancelled | None), failure
    assert good <= link.wait(good) <= good + unsure
    fresh = rig.link(20_000)
    fresh.write(0, 0, 20_000).wait(SOON_S)
    assert fresh.wait(1) == 1


@on(nics=(1,), apart=False)
def test_many_peers_come_and_go_without_a_collective_step(rig: Rig) -> None:
    rig.set_up(max_peers=8)
    for _ in range(5):
        guests = [rig.engine() for _ in range(6)]
        link = rig.link(600)
        for i, guest in enumerate(guests):
            region = guest.register(bytes([i]) * 100)
            guest.write(region, link.remote[100 * i : 100 * i + 100], notify=link.notify).wait(SOON_S)
        assert link.wait(6) == 6
        assert rig.far.read(link.memory) == b"".join(bytes([i]) * 100 for i in range(6))
        for guest in guests:
            guest.close(SOON_S)


@on(nics=(2,))
def test_work_that_meets_the_goodbye_of_the_other_side_goes_into_a_new_session(rig: Rig) -> None:
    link = rig.link(1000)
    link.write(0, 0, 1000).wait(SOON_S)
    for i in range(20):
        rig.far.disconnect(rig.near.address)
        transfers = [link.write(0, 0, 1000) for _ in range(5)]
        for transfer in transfers:
            transfer.wait(SOON_S)
        assert link.wait(1 + 5 * (i + 1)) == 1 + 5 * (i + 1)
    assert rig.near.connect(rig.far.address()).state == "connected"
