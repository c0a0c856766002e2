"""What the network gets wrong: transfers say so, counters stay right, and the engines go on."""

from __future__ import annotations

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Link, Rig, eventually, on, permutation

# See native/sim/host.h. In the last two the bytes land although the network reported a failure.
FATES = ["clean", "unknown", "partial", "late", "landed"]


def check_healthy(link: Link, writes: int = 10, length: int = 10_000) -> None:
    """Writes after the failures land whole and count exactly."""
    before = link.value
    for i in range(1, writes + 1):
        link.poison()
        link.write(0, i, length).wait(SOON_S)
        assert link.wait(before + i) == before + i
        link.check([(0, i, length)])


@on(nics=(2, 3), faults=True)
@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("order", ["reorder=1,delay=2", "reorder=0"])
def test_of_two_cut_writes_one_fails_and_the_counter_stays_right(rig: Rig, fate: str, order: str) -> None:
    rig.clean = False  # what arrives for a write of unknown outcome has no meaning any more
    rig.set_up(shard_bytes=1000, sim=f"{order},mtu=256")
    link = rig.link(60_000)
    link.write(0, 0, 1).wait(SOON_S)
    expected = most = link.wait(1)
    for skip in range(2 * rig.case.nics):
        rig.near._inject(f"fail_after {skip} {fate}")
        pair = [link.write(0, 0, 8000), link.write(20_000, 20_000, 8000)]
        failures = [transfer.exception(SOON_S) for transfer in pair]
        good = failures.count(None)
        assert good < 2
        assert all(failure is None or isinstance(failure, te.TransportError) for failure in failures)
        for transfer in pair:
            transfer.wait_quiesced(SOON_S)
        expected += good
        # What landed in spite of an error is wholly in memory, so that it may count, once.
        most += good if fate in ("clean", "unknown", "partial") else 2
        assert expected <= link.wait(expected) <= most
        check_healthy(rig.link(60_000), 3, 8000)
    assert expected <= link.value <= most


@on(nics=(1, 3), faults=True)
@pytest.mark.parametrize("fate", ["clean", "unknown", "partial"])
@pytest.mark.parametrize("immediates", ["each", "last"])
def test_a_page_list_that_fails_counts_no_page_that_is_not_in_memory(rig: Rig, fate: str, immediates: str) -> None:
    rig.set_up(page_immediates=immediates, sim="delay=2,mtu=64")
    count, page = 60, 200
    link = rig.link(count * page)
    targets = permutation(3, count)
    least = most = 0
    for skip in range(0, 70, 23):
        link.poison()
        rig.near._inject(f"fail_after {skip} {fate}")
        transfer = link.pages(targets, np.arange(count), page)
        failure = transfer.exception(SOON_S)
        rig.near._inject("error_next 0")
        transfer.wait_quiesced(SOON_S)
        found = np.frombuffer(rig.far.read(link.memory), np.uint8).reshape(count, page)
        whole = int((found[targets] == link.source.reshape(count, page)).all(axis=1).sum())
        most += whole
        if failure is None or immediates == "each":
            least += whole
        assert least <= link.wait(least) <= most
    check_healthy(rig.link(), length=5000)
    assert least <= link.value <= most


@on(nics=(1, 3), faults=True)
@pytest.mark.parametrize("fate", ["clean", "unknown"])
def test_hundreds_of_failures_use_nothing_up(rig: Rig, fate: str) -> None:
    rig.clean = fate == "clean"
    rig.set_up(shard_bytes=1000, assembly_slots=4, immediate_window=8)
    link = rig.link(60_000)
    for _ in range(200):
        rig.near._inject(f"error_next 1 {fate}")
        with pytest.raises(te.TransportError) as caught:
            link.write(0, 0, 8000).wait(SOON_S)
        assert caught.value.nic in rig.near.nics
        assert caught.value.peer == str(rig.far.address())
    assert link.value == 0
    check_healthy(link)
    eventually(lambda: rig.near.stats()["engine"]["operations_in_use"] == 0)


@on(nics=(2, 3), faults=True)
def test_work_goes_on_when_a_nic_returns(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(60_000)
    link.write(0, 0, 60_000).wait(SOON_S)
    rig.near._inject("nic_down 1")
    failures = [link.write(0, 0, 60_000).exception(SOON_S) for _ in range(5)]
    assert any(failures)
    rig.near._inject("nic_up 1")
    rig.near.connect(rig.far.address()).wait(SOON_S)
    check_healthy(link)


@on(nics=(1, 3), faults=True)
def test_a_noisy_network_ends_every_transfer_and_falsifies_no_count(rig: Rig) -> None:
    rig.clean = False
    rig.set_up(shard_bytes=1000, sim="error=0.03,busy=0.1,delay=3,mtu=200,seed=5", peer_timeout_s=SOON_S)
    link = rig.link(80_000)
    good = bad = 0
    for _ in range(60):
        link.poison()
        pieces = [(8000 * k, 8000 * k, 900 * (k + 1)) for k in range(8)]
        for piece, transfer in [(piece, link.write(*piece)) for piece in pieces]:
            failure = transfer.exception(SOON_S)
            transfer.wait_quiesced(SOON_S)
            if failure is None:
                good += 1
                start, source, length = piece
                found = rig.far.read(link.memory, start, start + length)
                assert found == bytes(link.source[source : source + length])
            else:
                bad += 1
                assert isinstance(failure, te.TransportError)
    assert bad
    assert good <= link.wait(good) <= good + bad


@on(nics=(1, 2), faults=True)
def test_a_wrong_bit_does_not_escape_these_tests(rig: Rig) -> None:
    link = rig.link(20_000)
    link.write(0, 0, 1).wait(SOON_S)
    rig.near._inject("flip_next 1")
    link.write(0, 0, 20_000).wait(SOON_S)
    link.wait(2)
    with pytest.raises(AssertionError, match="1 wrong bytes"):
        link.check([(0, 0, 20_000)])


@on(nics=(3,), faults=True)
def test_a_registration_that_fails_on_one_nic_leaves_nothing_behind(rig: Rig) -> None:
    for _ in range(3):
        rig.near._inject("register_fail 1")
        with pytest.raises(te.RegistrationError) as caught:
            rig.near.register(bytearray(100))
        assert caught.value.nic in rig.near.nics
    assert rig.near.stats()["engine"]["regions"] == 0
    rig.near.register(bytearray(100)).close(SOON_S)
