from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

SOON_S = 20.0


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 100_000, 1 << 20])
def test_a_message_arrives_whole_with_its_sender(pair: Any, length: int) -> None:
    data = (bytes(range(256)) * (length // 256 + 1))[:length]
    transfer = pair.a.send(pair.b.address, data)
    message = pair.b.receive(SOON_S)
    assert message.sender == pair.a.address
    assert message.data == data
    transfer.wait(SOON_S)


def test_messages_of_one_sender_arrive_in_order(pair: Any) -> None:
    count = 300
    transfers = [pair.a.send(pair.b.address, b"%d" % i + b"." * (i * 37 % 9000)) for i in range(count)]
    for i in range(count):
        assert pair.b.receive(SOON_S).data.rstrip(b".") == b"%d" % i
    for transfer in transfers:
        transfer.wait(SOON_S)


def test_an_answer_goes_to_the_senders_address(pair: Any) -> None:
    pair.a.send(bytes(pair.b.address), b"ping")
    request = pair.b.receive(SOON_S)
    pair.b.send(request.sender, request.data[::-1])
    assert pair.a.receive(SOON_S).data == b"gnip"


@pytest.mark.parametrize("data", [bytearray(b"data"), memoryview(b"data")])
def test_anything_with_bytes_can_be_sent(pair: Any, data: Any) -> None:
    pair.a.send(str(pair.b.address), data).wait(SOON_S)
    assert pair.b.receive(SOON_S).data == b"data"


def test_a_message_is_taken_as_it_is_at_the_call(pair: Any) -> None:
    data = bytearray(b"x" * 50_000)
    transfer = pair.a.send(pair.b.address, data)
    data[:] = b"y" * 10
    assert pair.b.receive(SOON_S).data == b"x" * 50_000
    transfer.wait(SOON_S)


@pytest.mark.parametrize("wrong", ["text", 5, None])
def test_other_data_raises_a_type_error(pair: Any, wrong: Any) -> None:
    with pytest.raises(TypeError):
        pair.a.send(pair.b.address, wrong)


@pytest.mark.parametrize("data", [memoryview(bytearray(10))[::2], np.zeros(10, np.uint8)[::2]])
def test_scattered_data_are_refused_with_a_remedy(pair: Any, data: Any) -> None:
    with pytest.raises(te.ArgumentTypeError, match="not contiguous") as caught:
        pair.a.send(pair.b.address, data)
    assert "bytes(data)" in caught.value.hint


def test_a_message_that_is_too_long_is_refused(pair: Any) -> None:
    with pytest.raises(te.ArgumentError):
        pair.a.send(pair.b.address, bytes((1 << 20) + 1)).wait(SOON_S)


def test_receiving_nothing_times_out(engine: te.Engine) -> None:
    for timeout_s in (0, 0.01):
        with pytest.raises(te.TransferTimeout, match="no message"):
            engine.receive(timeout_s)


async def test_messages_can_be_iterated_as_they_come(pair: Any) -> None:
    count = 50
    received: list[bytes] = []

    async def serve() -> None:
        async for message in pair.b.messages():
            received.append(message.data)
            if len(received) == count:
                return

    task = asyncio.create_task(serve())
    for i in range(count):
        await pair.a.send(pair.b.address, b"%d" % i)
    await asyncio.wait_for(task, SOON_S)
    assert received == [b"%d" % i for i in range(count)]


async def test_several_loops_share_the_messages(pair: Any) -> None:
    received: list[bytes] = []
    finished = asyncio.Event()

    async def serve() -> None:
        async for message in pair.b.messages():
            received.append(message.data)
            if len(received) == 40:
                finished.set()

    tasks = [asyncio.create_task(serve()) for _ in range(3)]
    for i in range(40):
        await pair.a.send(pair.b.address, b"%d" % i)
    await asyncio.wait_for(finished.wait(), SOON_S)
    pair.b.close()
    await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
    assert sorted(received, key=int) == [b"%d" % i for i in range(40)]


async def test_the_iteration_ends_with_the_engine(engine: te.Engine) -> None:
    async def serve() -> int:
        return len([message async for message in engine.messages()])

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    engine.close()
    assert await asyncio.wait_for(task, SOON_S) == 0


def test_messages_can_be_iterated_on_trio(pair: Any) -> None:
    trio = pytest.importorskip("trio")

    async def main() -> bytes:
        pair.a.send(pair.b.address, b"hello")
        with trio.fail_after(SOON_S):
            async for message in pair.b.messages():
                return bytes(message.data)
        raise AssertionError

    assert trio.run(main) == b"hello"


def test_closing_the_engine_ends_a_receive(engine: te.Engine) -> None:
    started = threading.Event()
    errors: list[Exception] = []

    def receive() -> None:
        started.set()
        try:
            engine.receive(60)
        except te.TransferEngineError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    assert started.wait(SOON_S)
    engine.close()
    thread.join(SOON_S)
    assert [type(error) for error in errors] == [te.EngineClosed]


async def test_cancelled_waits_for_messages_and_transfers_leave_nothing_behind(make_engine: Any) -> None:
    engine = make_engine(sim="delay=1")
    nobody = make_engine()
    address = nobody.address
    nobody.close()
    transfer = engine.connect(address, timeout_s=SOON_S)
    messages = engine.messages()
    for _ in range(20):
        for wait in (anext(messages), _wait_for(engine.counter().reached(1, timeout_s=SOON_S))):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait, 0.001)
    assert not engine._handle.dispatcher._message_waiters
    del transfer


async def _wait_for(arrival: Any) -> None:
    try:
        await arrival
    finally:
        assert not arrival._callbacks


def test_a_callback_that_exits_harms_no_other(pair: Any) -> None:
    def leaves(_: Any) -> None:
        sys.exit(3)

    pair.a.write(pair.region[:8], pair.remote[:8]).add_done_callback(leaves)
    called = threading.Event()
    pair.a.write(pair.region[:8], pair.remote[:8]).add_done_callback(lambda _: called.set())
    assert called.wait(SOON_S)
