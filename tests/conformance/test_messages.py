"""Messages: whole, once, in the order of their sender; and a receiver that does not look is not overrun."""

from __future__ import annotations

import threading

import pytest

import transfer_engine as te

from .rig import SOON_S, Rig, on, pattern


def message(number: int, length: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(pattern(number % 16, length))


@on(nics=(1, 3))
def test_messages_of_every_length_arrive_whole(rig: Rig) -> None:
    fragment = rig.near.describe()["max_message_fragment"]
    lengths = [*range(70), *(fragment + k for k in range(-70, 3)), 2 * fragment, 100_000, (1 << 20) - 4]
    for number, length in enumerate(lengths):
        transfer = rig.near.send(rig.far.address(), message(number, length))
        assert rig.far.receive() == (rig.near.address, message(number, length))
        transfer.wait(SOON_S)
    empty = rig.near.send(rig.far.address(), b"")
    assert rig.far.receive() == (rig.near.address, b"")
    empty.wait(SOON_S)


@on(nics=(1, 3))
def test_messages_of_one_sender_arrive_in_order(rig: Rig) -> None:
    lengths = [k * 977 % 9000 if k % 10 else 100_000 for k in range(200)]
    transfers = [rig.near.send(rig.far.address(), message(k, length)) for k, length in enumerate(lengths)]
    for k, length in enumerate(lengths):
        assert rig.far.receive()[1] == message(k, length)
    for transfer in transfers:
        transfer.wait(SOON_S)


@on(nics=(2,))
def test_messages_of_many_senders_are_each_in_order(rig: Rig) -> None:
    senders = [rig.near, *(rig.engine() for _ in range(4))]
    address = rig.far.address()
    for k in range(60):
        for engine in senders:
            engine.send(address, message(k, k * 53 % 3000))
    next_of = {engine.address: 0 for engine in senders}
    for _ in range(60 * len(senders)):
        sender, data = rig.far.receive()
        k = next_of[sender]
        assert data == message(k, k * 53 % 3000)
        next_of[sender] += 1
    assert set(next_of.values()) == {60}


@on(nics=(2,))
def test_both_sides_may_talk_at_once_and_answer(rig: Rig) -> None:
    for k in range(50):
        rig.near.send(rig.far.address(), message(k, 5000))
        rig.far.send(rig.near.address, message(k + 1, 4000))
    for k in range(50):
        assert rig.far.receive() == (rig.near.address, message(k, 5000))
        received = rig.near.receive(SOON_S)
        assert (received.sender, received.data) == (rig.far.address(), message(k + 1, 4000))


@on(nics=(2,))
def test_a_receiver_that_does_not_look_holds_messages_up_and_loses_none(rig: Rig) -> None:
    rig.set_up(message_queue_bytes=64 << 10, max_message_bytes=8 << 10)
    count, length = 60, 4000
    transfers = [rig.near.send(rig.far.address(), message(k, length)) for k in range(count)]
    with pytest.raises(te.TransferTimeout):  # more than the queue holds
        transfers[-1].wait(0.1)
    link = rig.link(50_000)  # and writes pass them
    link.write(0, 0, 50_000).wait(SOON_S)
    assert link.wait(1) == 1
    for k in range(count):
        assert rig.far.receive()[1] == message(k, length)
    for transfer in transfers:
        transfer.wait(SOON_S)


@on(nics=(1,), apart=False)
def test_the_longest_message_is_a_setting_and_what_is_longer_is_refused(rig: Rig) -> None:
    rig.set_up(max_message_bytes=1000)
    rig.near.send(rig.far.address(), bytes(1000)).wait(SOON_S)
    with pytest.raises(te.ArgumentError, match=r"1001.*1000"):
        rig.near.send(rig.far.address(), bytes(1001))
    assert len(rig.far.receive()[1]) == 1000


@on(nics=(2,), apart=False)
def test_threads_share_the_messages_and_each_comes_to_one(rig: Rig) -> None:
    count, far = 200, rig.far
    received: list[bytes] = []
    lock = threading.Lock()

    def receive() -> None:
        while True:
            data = far.engine.receive(SOON_S).data
            if data == b"end":
                return
            with lock:
                received.append(data)

    threads = [threading.Thread(target=receive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for k in range(count):
        rig.near.send(rig.far.address(), b"%d" % k)
    for _ in threads:
        rig.near.send(rig.far.address(), b"end")
    for thread in threads:
        thread.join(SOON_S)
    assert sorted(received, key=int) == [b"%d" % k for k in range(count)]
