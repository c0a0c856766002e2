"""How an end is told: waits, callbacks in the one dispatcher thread, and await."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

import transfer_engine as te

from .rig import SOON_S, Rig, eventually, on

pytestmark = on(nics=(2,), apart=False)


def test_each_callback_runs_once_in_the_dispatcher_thread(rig: Rig) -> None:
    link = rig.link(1000)
    calls: list[tuple[te.Transfer, str]] = []
    finished = threading.Event()
    transfers = [link.write(0, 0, 1000) for _ in range(300)]

    def called(transfer: te.Transfer) -> None:
        calls.append((transfer, threading.current_thread().name))
        if len(calls) == 600:
            finished.set()

    for transfer in transfers:
        transfer.add_done_callback(called)
        transfer.add_done_callback(called)
    assert finished.wait(SOON_S)
    assert all(calls.count((transfer, calls[0][1])) == 2 for transfer in transfers[::50])
    assert len({name for _, name in calls}) == 1
    assert calls[0][1].startswith("te-dispatch")
    assert all(transfer.done() for transfer, _ in calls)


def test_a_callback_that_raises_is_reported_and_harms_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    link = rig.link(1000)
    after = threading.Event()

    def raises(_: te.Transfer) -> None:
        raise ZeroDivisionError("of the application")

    with caplog.at_level(logging.ERROR, "transfer_engine"):
        transfer = link.write(0, 0, 1000)
        transfer.add_done_callback(raises)
        transfer.add_done_callback(lambda _: after.set())
        assert after.wait(SOON_S)
    assert "of the application" in caplog.text
    link.write(0, 0, 1000).wait(SOON_S)
    assert link.wait(2) == 2


def test_callbacks_may_submit_and_the_chain_goes_on(rig: Rig) -> None:
    link = rig.link(1000)
    finished = threading.Event()
    left = [100]

    def again(_: te.Transfer) -> None:
        left[0] -= 1
        if left[0]:
            link.write(0, 0, 1000).add_done_callback(again)
        else:
            finished.set()

    link.write(0, 0, 1000).add_done_callback(again)
    assert finished.wait(SOON_S)
    assert link.wait(100) == 100


def test_a_callback_may_wait_for_another_transfer_and_for_a_counter(rig: Rig) -> None:
    link = rig.link(100_000)
    finished = threading.Event()

    def waits(_: te.Transfer) -> None:
        link.write(0, 0, 100_000).wait(SOON_S)
        link.wait(2)
        finished.set()

    link.write(0, 0, 100_000).add_done_callback(waits)
    assert finished.wait(SOON_S)


def test_a_callback_may_close_the_engine(rig: Rig) -> None:
    link = rig.link(1000)
    closed = threading.Event()

    def close(_: te.Transfer) -> None:
        rig.near.close(SOON_S)
        closed.set()

    link.write(0, 0, 1000).add_done_callback(close)
    assert closed.wait(SOON_S)
    with pytest.raises(te.EngineClosed):
        link.write(0, 0, 1000)


def test_a_callback_may_close_the_peer(rig: Rig) -> None:
    link = rig.link(1000)
    closed = threading.Event()

    def close(_: te.Transfer) -> None:
        rig.far.engine.close(SOON_S)
        closed.set()

    link.write(0, 0, 1000).add_done_callback(close)
    assert closed.wait(SOON_S)
    with pytest.raises(te.PeerError):
        link.write(0, 0, 1000).wait(SOON_S)


def test_failures_come_to_callbacks_too(rig: Rig) -> None:
    link = rig.link(1000)
    link.write(0, 0, 1000).wait(SOON_S)
    rig.far.close_counter(link.counter)
    outcomes: list[Any] = []
    finished = threading.Event()

    def called(transfer: te.Transfer) -> None:
        outcomes.append(transfer.exception())
        finished.set()

    fresh, stale = rig.link(1000), link.remote
    transfer = rig.near.write(fresh.region, stale, notify=None)
    transfer.wait(SOON_S)
    rig.far.close_memory(fresh.memory)
    doomed = rig.near.write(link.region, fresh.remote)
    doomed.add_done_callback(called)
    assert finished.wait(SOON_S)
    assert isinstance(outcomes[0], te.RegionClosed)


# --- await -----------------------------------------------------------------------------------------------------------


async def test_everything_that_ends_can_be_awaited(rig: Rig) -> None:
    link = rig.link(50_000)
    await rig.near.connect(rig.far.address())
    await link.write(0, 0, 50_000)
    await link.pages([0, 1], [1, 0], 100)
    await rig.near.write_batch([te.Write(link.region[:10], link.remote[:10], link.notify)])
    assert await rig.far.counters[link.counter].reached(4) == 4
    await rig.near.send(rig.far.address(), b"hello")
    async for message in rig.far.engine.messages():
        assert message.data == b"hello"
        break
    await rig.far.engine.fence(rig.near.address)
    await rig.near.disconnect(rig.far.address())


async def test_hundreds_of_tasks_await_their_own_transfers(rig: Rig) -> None:
    link = rig.link(64 * 300)

    async def one(k: int) -> int:
        for _ in range(5):
            await link.write(64 * k, 64 * k, 64)
        return k

    assert await asyncio.gather(*(one(k) for k in range(300))) == list(range(300))
    assert link.wait(1500) == 1500
    link.check([(0, 0, 64 * 300)], 1500)


async def test_awaiting_a_failure_raises_it_to_everybody(rig: Rig) -> None:
    link = rig.link(1000)
    link.write(0, 0, 1000).wait(SOON_S)
    rig.far.close_memory(link.memory)
    fresh = rig.link(1000)
    rig.far.close_memory(fresh.memory)
    transfer = rig.near.write(link.region, fresh.remote)

    async def wait() -> None:
        await transfer

    results = await asyncio.gather(wait(), wait(), return_exceptions=True)
    assert [type(result) for result in results] == [te.RegionClosed] * 2


async def test_cancelling_a_task_does_not_cancel_its_transfer(rig: Rig) -> None:
    counter = rig.near.counter()
    arrival = counter.reached(1)

    async def wait() -> int:
        value: int = await arrival
        return value

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not arrival.done()
    memory, _ = rig.far.memory(8)
    target = rig.near.register(bytearray(8)).descriptor
    await asyncio.to_thread(rig.far.push, memory, target, counter.descriptor, 1)
    assert await asyncio.wait_for(wait(), SOON_S) == 1


async def test_other_tasks_run_while_one_awaits(rig: Rig) -> None:
    counter = rig.near.counter()
    memory, _ = rig.far.memory(8)
    target = rig.near.register(bytearray(8)).descriptor
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while ticks < 100:
            ticks += 1
            await asyncio.sleep(0)
        await asyncio.to_thread(rig.far.push, memory, target, counter.descriptor, 1)

    task = asyncio.create_task(tick())
    assert await counter.reached(1) == 1
    await task
    assert ticks == 100


def test_transfers_end_after_the_loop_that_awaited_them_is_gone(rig: Rig) -> None:
    counter = rig.near.counter()
    arrival = counter.reached(1)

    async def give_up() -> None:
        async def wait() -> None:
            await arrival

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(give_up())
    memory, _ = rig.far.memory(8)
    rig.far.push(memory, rig.near.register(bytearray(8)).descriptor, counter.descriptor, 1)
    assert arrival.result(SOON_S) == 1


def test_every_form_agrees_on_one_outcome(rig: Rig) -> None:
    link = rig.link(1000)
    seen: list[Any] = []
    threads: list[threading.Thread] = []
    forms: list[Callable[[te.Transfer], Any]] = [
        lambda t: t.wait(SOON_S),
        lambda t: t.result(SOON_S),
        lambda t: t.exception(SOON_S),
        lambda t: eventually(t.done) and None,
        lambda t: asyncio.run(_await(t)),
    ]
    for _ in range(30):
        transfer = link.write(0, 0, 1000)
        transfer.add_done_callback(lambda t: seen.append(t.exception()))
        for form in forms:
            threads.append(threading.Thread(target=lambda form=form, t=transfer: seen.append(form(t))))
            threads[-1].start()
    for thread in threads:
        thread.join(SOON_S)
    eventually(lambda: len(seen) == 30 * (len(forms) + 1))
    assert set(seen) == {None}


async def _await(transfer: te.Transfer) -> None:
    await transfer
