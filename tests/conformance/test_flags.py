"""Flags and bindings: an epoch for every n arrivals, the early ones included, and an end to waits for the lost."""

from __future__ import annotations

import threading
import time

import pytest

import transfer_engine as te

from .rig import LIFE_S, SLOWNESS, SOON_S, Link, Mortal, Rig, eventually, in_threads, on, on_mortals


@on(nics=(1, 3))
@pytest.mark.parametrize("every", [1, 3])
def test_a_bound_flag_rises_once_for_every_n_arrivals_and_the_bytes_are_there(rig: Rig, every: int) -> None:
    rig.set_up(shard_bytes=1000)
    link = rig.link(30_000)
    flag = rig.far.flag()
    rig.far.bind(link.counter, flag, every)
    for turn in range(1, 8):
        link.poison()
        for i in range(every):
            link.write(5000 * i, 5000 * i, 4000)
        assert rig.far.flag_wait(flag, turn) == turn
        link.check([(5000 * i, 5000 * i, 4000) for i in range(every)])
    assert rig.far.flag_value(flag) == 7


@on(nics=(2,))
def test_arrivals_before_the_binding_count(rig: Rig) -> None:
    link = rig.link(1000)
    for _ in range(8):
        link.write(0, 0, 100).wait(SOON_S)
    assert link.wait(8) == 8
    flag = rig.far.flag()
    binding = rig.far.bind(link.counter, flag, 3)
    assert rig.far.flag_value(flag) == 2
    link.write(0, 0, 100).wait(SOON_S)
    assert rig.far.flag_wait(flag, 3) == 3
    rig.far.unbind(binding)
    for _ in range(6):
        link.write(0, 0, 100).wait(SOON_S)
    assert link.wait(15) == 15
    assert rig.far.flag_value(flag) == 3


@on(nics=(2,))
def test_pages_and_several_counters_raise_one_flag(rig: Rig) -> None:
    links = [rig.link(64 * 64) for _ in range(3)]
    flag = rig.far.flag()
    for link in links:
        rig.far.bind(link.counter, flag, 2)
    for link in links:
        link.pages(range(40), range(20, 60), 64)
    assert rig.far.flag_wait(flag, 60) == 60
    for link in links:
        link.check([(0, 20 * 64, 40 * 64)], 40)


@on(nics=(2,), apart=False)
def test_each_wait_of_the_host_consumes_the_next_epochs(rig: Rig) -> None:
    flag = rig.near.flag()
    for epoch in range(1, 50):
        thread = threading.Thread(target=flag.raise_, args=(2,))
        thread.start()
        flag.wait(timeout_s=SOON_S)
        flag.wait(timeout_s=SOON_S)
        thread.join()
        assert flag.value == 2 * epoch
    with pytest.raises(te.TransferTimeout, match="98/100"):
        flag.wait(advance=2, timeout_s=0.02)
    flag.raise_()
    flag.wait(timeout_s=SOON_S)
    flag.raise_(32)
    in_threads(16, lambda k: flag.wait(advance=2, timeout_s=SOON_S))
    with pytest.raises(te.TransferTimeout):
        flag.wait(timeout_s=0)


@on_mortals
def test_the_loss_of_a_peer_ends_waits_and_check_names_it(rig: Rig) -> None:
    settings = {"peer_timeout_s": LIFE_S, "connect_timeout_s": LIFE_S + 0.1}
    rig.set_up(**settings)
    mortal = Mortal(rig, **settings)
    memory = rig.near.allocate(1000)
    counter, other = rig.near.counter(), rig.near.counter()
    flag, unconcerned = rig.near.flag(), rig.near.flag()
    address = mortal.far.address()
    counter.bind(flag, peers=[address])
    other.bind(unconcerned)
    source, _ = mortal.far.memory(1000)
    mortal.far.push(source, memory.region.descriptor, counter.descriptor, 3)
    assert flag.wait_value(3, timeout_s=SOON_S) == 3
    flag.check()
    begin = time.monotonic()
    mortal.kill()
    with pytest.raises(te.PeerLost) as caught:
        flag.wait_value(4, timeout_s=SOON_S)
    assert time.monotonic() - begin < LIFE_S + 5 * SLOWNESS
    assert caught.value.peer == str(address)
    with pytest.raises(te.PeerLost) as caught:
        flag.check()
    assert caught.value.peer == str(address)
    assert flag.wait_value(3) == 3
    unconcerned.check()
    flag.clear()
    flag.check()
    counter.bind(flag, peers=address)
    with pytest.raises(te.PeerLost):
        flag.wait(advance=10, timeout_s=SOON_S)


@on(nics=(1,), apart=False)
def test_closing_the_flag_or_the_engine_ends_waits(rig: Rig) -> None:
    for close_engine in (False, True):
        engine = rig.engine()
        flag = engine.flag()
        errors: list[BaseException] = []

        def wait(flag: te.Flag = flag, errors: list[BaseException] = errors) -> None:
            with pytest.raises(te.EngineClosed) as caught:
                flag.wait(timeout_s=SOON_S)
            errors.append(caught.value)

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        if close_engine:
            engine.close()
        else:
            flag.close()
        for thread in threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
        assert len(errors) == 4


@on(nics=(2,))
def test_a_counter_that_is_closed_takes_its_bindings_along(rig: Rig) -> None:
    link = rig.link(1000)
    flag = rig.far.flag()
    rig.far.bind(link.counter, flag)
    link.write(0, 0, 10).wait(SOON_S)
    assert rig.far.flag_wait(flag, 1) == 1
    rig.far.close_counter(link.counter)
    next_link: Link = rig.link(1000)
    next_link.write(0, 0, 10).wait(SOON_S)
    assert next_link.wait(1) == 1
    assert rig.far.flag_value(flag) == 1
    eventually(lambda: rig.near.stats()["engine"]["operations_in_use"] == 0)
