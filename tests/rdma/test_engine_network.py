"""Engines over a network that loses, delays, doubles and reorders packets, and whose cables are pulled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

import transfer_engine as te

from ..conformance.rig import SOON_S, Link, Rig, eventually, laid_out
from .engines import CONTROL, GIVEN_UP_S, OTHER, pair

SHARD = 5000
LONG = 200_000
MOST_ROUNDS = 20  # until a fault has shown
BOUND_S = GIVEN_UP_S + 12.0  # an emulated machine is busy


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with pair(2, shard_bytes=SHARD) as opened:
        yield opened


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("loss 1%", None),
        ("loss 5%", None),
        ("delay 20ms", None),
        ("duplicate 30%", "duplicate_request"),
        ("delay 3ms reorder 10%", "out_of_seq_request"),
    ],
)
def test_every_byte_and_count_is_right_over_a_network_with(rig, netem, counters, fault, shows) -> None:
    pieces, size = laid_out([0, 1, 4097, 30_000, *[LONG] * 4])
    link = rig.link(size)
    texts = [bytes([i]) * n for i, n in enumerate((0, 1, 5000, 100_000))]
    devices = [CONTROL[1], OTHER[1]]
    before = {device: counters(device) for device in devices}
    with contextlib.ExitStack() as faults:
        queues = [faults.enter_context(netem(device, fault)) for device in (*devices, CONTROL[0])]

        def has_shown() -> bool:
            if "loss" in fault:
                return sum(queue.dropped for queue in queues) > 0
            return shows is None or all(counters(device)[shows] > before[device][shows] for device in devices)

        for count in range(1, MOST_ROUNDS + 1):
            link.poison()
            transfers = [link.write(*piece) for piece in pieces]
            transfers += [rig.near.send(rig.far.address(), text) for text in texts]
            for transfer in transfers:
                transfer.wait(SOON_S)
            assert link.wait(count * len(pieces)) == count * len(pieces)
            link.check(pieces, count * len(pieces))
            assert [rig.far.receive()[1] for _ in texts] == texts
            if has_shown():
                break
        assert has_shown()


def test_engines_meet_and_part_over_a_network_with_heavy_loss(rig, netem) -> None:
    link = rig.link(20_000)
    rig.near.disconnect(rig.far.address()).wait(SOON_S)
    with netem(CONTROL[0], "loss 20%"), netem(CONTROL[1], "loss 20%"):
        for i in range(1, 4):
            link.write(0, i, 19_000).wait(SOON_S)
            assert link.wait(i) == i
            link.check([(0, i, 19_000)], i)
            rig.near.disconnect(rig.far.address()).wait(SOON_S)


# --- pulled cables ---------------------------------------------------------------------------------------------------


def writes_over(rig: Rig, nic: str) -> int:
    return int(rig.near.stats()["nics"][nic]["writes"])


def check_healthy(link: Link, count: int = 5) -> None:
    """Writes land whole and count exactly."""
    before = link.value
    for i in range(1, count + 1):
        link.poison()
        link.write(0, i, LONG).wait(SOON_S)
        assert link.wait(before + i) == before + i
        link.check([(0, i, LONG)])


def is_used_again(rig: Rig) -> None:
    """Writes take the second NIC when it is up again, and are right."""
    eventually(lambda: rig.near.stats()["nics"][OTHER[0]]["up"])
    link, before = rig.link(LONG), writes_over(rig, OTHER[0])

    def some_went_over_it() -> bool:
        link.write(0, 0, LONG).wait(SOON_S)
        return writes_over(rig, OTHER[0]) > before

    eventually(some_went_over_it)
    check_healthy(rig.link(LONG + 10))


@pytest.mark.parametrize("pulled", OTHER)
def test_a_pulled_cable_takes_its_nic_out_until_it_is_plugged_in_again(rig, link_down, pulled) -> None:
    rig.clean = False  # what landed of a transfer that failed may be announced
    link = rig.link(LONG + 10)
    link.write(0, 0, LONG).wait(SOON_S)
    peer = rig.near.connect(rig.far.address())
    here = pulled in rig.near.nics
    with link_down(pulled):
        transfers = [link.write(0, 0, LONG) for _ in range(20)]
        failures = [transfer.exception(BOUND_S) for transfer in transfers]
        for transfer in transfers:
            transfer.wait_quiesced(BOUND_S)
        bad = [failure for failure in failures if failure is not None]
        for failure in bad:
            assert isinstance(failure, te.TransportError), failure
            assert failure.nic == OTHER[0]
            assert failure.peer == str(rig.far.address())
        good = 1 + len(failures) - len(bad)
        assert good <= link.wait(good) <= good + len(bad)

        stats = (rig.near if here else rig.far).stats()["nics"][pulled]
        assert (stats["up"], stats["state"]) == (False, "port down")
        assert peer.state == "connected"
        fresh = rig.link(LONG + 10)
        before = writes_over(rig, CONTROL[0])
        check_healthy(fresh)
        assert writes_over(rig, CONTROL[0]) > before
    eventually(lambda: (rig.near if here else rig.far).stats()["nics"][pulled]["up"])
    assert peer.state == "connected"
    is_used_again(rig)


def in_flight_over_a_dead_network(rig: Rig, link: Link) -> list[te.Transfer]:
    """Writes of which a part is on its way over the second NIC, while nothing of it arrives."""
    transfers = [link.write(0, 0, LONG) for _ in range(10)]
    eventually(lambda: rig.near.stats()["nics"][OTHER[0]]["in_flight"] > 0)
    return transfers


def test_a_network_that_is_out_for_a_moment_fails_nothing(rig, netem) -> None:
    link = rig.link(LONG)
    link.write(0, 0, LONG).wait(SOON_S)
    with netem(OTHER[1], "loss 100%"):
        transfers = in_flight_over_a_dead_network(rig, link)
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert link.wait(11) == 11
    link.check([(0, 0, LONG)], 11)


@pytest.mark.parametrize("pulled", [*OTHER, None])
def test_a_network_that_is_cut_under_transfers_fails_only_them_and_by_name(rig, netem, link_down, pulled) -> None:
    rig.clean = False  # what landed of a transfer that failed may be announced
    link = rig.link(LONG)
    link.write(0, 0, LONG).wait(SOON_S)
    peer = rig.near.connect(rig.far.address())
    with netem(OTHER[1], "loss 100%"):
        transfers = in_flight_over_a_dead_network(rig, link)
        with link_down(pulled) if pulled else contextlib.nullcontext():
            failures = [transfer.exception(BOUND_S) for transfer in transfers]
            for transfer in transfers:
                transfer.wait_quiesced(BOUND_S)
            assert peer.state == "connected"
            check_healthy(rig.link(LONG + 10))
    bad = [failure for failure in failures if failure is not None]
    assert bad
    assert {(type(failure), failure.nic) for failure in bad} == {(te.TransportError, OTHER[0])}
    assert {failure.peer for failure in bad} == {str(rig.far.address())}
    good = 1 + len(failures) - len(bad)
    assert good <= link.wait(good) <= 1 + len(failures)
    is_used_again(rig)


def loses_the_peer(rig: Rig, link: Link, begin: float) -> None:
    """What goes to a peer whose control messages, or only NIC, are cut off."""
    transfers = [link.write(0, 0, LONG) for _ in range(10)]
    failures = [transfer.exception(BOUND_S) for transfer in transfers]
    assert time.monotonic() - begin < BOUND_S
    lost = [failure for failure in failures if failure is not None]
    assert isinstance(lost[-1], te.PeerLost), failures
    assert {failure.peer for failure in lost} == {str(rig.far.address())}
    for transfer in transfers:
        transfer.wait_quiesced(BOUND_S)


@pytest.mark.parametrize(("nics", "pulled"), [(2, CONTROL[1]), (1, CONTROL[0])])
def test_a_peer_behind_a_pulled_first_or_only_cable_is_lost_in_time_and_met_again(link_down, nics, pulled) -> None:
    with pair(nics, shard_bytes=SHARD, peer_timeout_s=3.0, connect_timeout_s=1.0) as rig:
        rig.clean = False
        link = rig.link(LONG)
        link.write(0, 0, LONG).wait(SOON_S)
        with link_down(pulled):
            loses_the_peer(rig, link, time.monotonic())
            with pytest.raises(te.PeerError):
                link.write(0, 0, 10).wait(SOON_S)

        def is_met() -> bool:
            try:
                rig.near.connect(rig.far.address()).wait(SOON_S)
            except te.PeerError:
                return False
            return True

        eventually(is_met)
        check_healthy(rig.link(LONG + 10))
