from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import transfer_engine as te

SOON_S = 20.0


@pytest.fixture
def held(pair: Any) -> Iterator[Any]:
    """A pair whose sender's bytes do not land until `pair.a._inject("resume")`."""
    pair.a.connect(pair.b.address).wait(SOON_S)
    pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify).wait(SOON_S)
    pair.target[:] = 0xA5
    pair.a._inject("pause")
    yield pair
    pair.a._inject("resume")


def write(pair: Any, **arguments: Any) -> te.Transfer:
    transfer: te.Transfer = pair.a.write(pair.region[:64], pair.remote[:64], **arguments)
    return transfer


def test_a_transfer_under_way_is_not_done(held: Any) -> None:
    transfer = write(held)
    assert not transfer.done()
    assert not transfer.quiesced
    held.a._inject("resume")
    transfer.wait(SOON_S)
    assert transfer.done()
    assert transfer.exception() is None
    transfer.wait_quiesced(SOON_S)
    assert transfer.quiesced
    held.assert_only(0, held.source[:64])


def test_a_wait_that_runs_out_says_that_the_transfer_goes_on(held: Any) -> None:
    transfer = write(held)
    for call in (transfer.wait, transfer.exception, transfer.result):
        with pytest.raises(te.TransferTimeout, match="goes on"):
            call(0.01)
        with pytest.raises(te.TransferTimeout):
            call(0)
    assert not transfer.done()
    held.a._inject("resume")
    transfer.wait(SOON_S)


def test_a_deadline_ends_the_transfer(held: Any) -> None:
    transfer = write(held, timeout_s=0.05)
    with pytest.raises(te.TransferTimeout):
        transfer.wait(SOON_S)
    assert transfer.done()
    assert isinstance(transfer.exception(), te.TransferTimeout)
    with pytest.raises(TimeoutError):
        transfer.wait()


def test_a_cancelled_transfer_ends_with_that_error(held: Any) -> None:
    transfer = write(held)
    transfer.cancel()
    with pytest.raises(te.TransferCancelled):
        transfer.wait(SOON_S)
    transfer.cancel()
    held.a._inject("resume")
    transfer.wait_quiesced(SOON_S)
    assert transfer.quiesced


def test_cancelling_after_the_end_changes_nothing(pair: Any) -> None:
    transfer = write(pair)
    transfer.wait(SOON_S)
    transfer.cancel()
    transfer.wait()


def test_quiescence_is_not_claimed_early(held: Any) -> None:
    transfer = write(held)
    with pytest.raises(te.TransferTimeout, match="may still land"):
        transfer.wait_quiesced(0.01)
    held.a._inject("resume")
    transfer.wait_quiesced(SOON_S)


def test_a_write_that_finds_no_place_before_its_deadline_names_the_setting(make_engine: Any) -> None:
    a, b = make_engine(operations_per_peer=4), make_engine()
    source, target = a.register(bytearray(8)), b.register(bytearray(8)).descriptor
    a.write(source, target).wait(SOON_S)
    a._inject("pause")
    held = [a.write(source, target) for _ in range(4)]
    with pytest.raises(te.TransferTimeout, match="operations_per_peer"):
        a.write(source, target, timeout_s=0.02)
    a._inject("resume")
    for transfer in held:
        transfer.wait(SOON_S)
    a.write(source, target).wait(SOON_S)


def test_request_ids_are_kept_and_named_in_errors(held: Any) -> None:
    transfer = write(held, timeout_s=0.01, request_id="prefill-7")
    assert transfer.request_id == "prefill-7"
    assert "prefill-7" in repr(transfer)
    with pytest.raises(te.TransferTimeout, match="prefill-7"):
        transfer.wait(SOON_S)


def test_memory_stays_alive_while_a_dropped_transfer_is_under_way(held: Any) -> None:
    memory = bytearray(b"x" * 64)
    region = held.a.register(memory)
    transfer = held.a.write(region, held.remote[:64], notify=held.notify)
    del transfer, region, memory
    gc.collect()
    held.a._inject("resume")
    held.counter.wait(2, timeout_s=SOON_S)
    held.assert_only(0, list(b"x" * 64))


def test_an_ended_transfer_is_freed(pair: Any) -> None:
    transfer = write(pair)
    transfer.wait(SOON_S)
    before = pair.a.stats()["engine"]["transfers_alive"]
    del transfer
    deadline = time.monotonic() + SOON_S
    while pair.a.stats()["engine"]["transfers_alive"] != before - 1:  # the worker lets go a moment after it has told
        assert time.monotonic() < deadline


# --- callbacks ------------------------------------------------------------------------------------------------------


def test_callbacks_run_once_each_in_the_dispatcher_thread(held: Any) -> None:
    transfer = write(held)
    calls: list[tuple[int, str, bool]] = []
    done = threading.Event()
    for i in range(3):
        transfer.add_done_callback(lambda t, i=i: calls.append((i, threading.current_thread().name, t.done())))
    transfer.add_done_callback(lambda _: done.set())
    held.a._inject("resume")
    assert done.wait(SOON_S)
    assert [call[0] for call in calls] == [0, 1, 2]
    assert all(name.startswith("te-dispatch-") and ended for _, name, ended in calls)


def test_a_callback_added_after_the_end_still_runs(pair: Any) -> None:
    transfer = write(pair)
    transfer.wait(SOON_S)
    for _ in range(2):
        done = threading.Event()
        transfer.add_done_callback(lambda _, done=done: done.set())
        assert done.wait(SOON_S)


def test_a_callback_keeps_its_transfer_alive(held: Any) -> None:
    done = threading.Event()
    write(held).add_done_callback(lambda _: done.set())
    gc.collect()
    held.a._inject("resume")
    assert done.wait(SOON_S)


def test_no_callback_is_lost_when_transfers_end_while_they_are_added(pair: Any) -> None:
    count = 300
    done = threading.Semaphore(0)
    for _ in range(count):
        write(pair).add_done_callback(lambda _: done.release())
    for _ in range(count):
        assert done.acquire(timeout=SOON_S)


def test_a_raising_callback_is_reported_and_the_engine_lives(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    transfer = write(pair)
    transfer.add_done_callback(lambda _: 1 // 0)
    transfer.add_done_callback(lambda _: done.set())
    assert done.wait(SOON_S)
    assert "ZeroDivisionError" in caplog.text
    write(pair).wait(SOON_S)


def test_a_callback_may_submit_and_wait(pair: Any) -> None:
    done = threading.Event()

    def again(_: te.Transfer) -> None:
        write(pair, notify=pair.notify).wait(SOON_S)
        done.set()

    write(pair, notify=pair.notify).add_done_callback(again)
    assert done.wait(SOON_S)
    pair.counter.wait(2, timeout_s=SOON_S)


# --- awaiting -------------------------------------------------------------------------------------------------------


async def test_a_transfer_can_be_awaited_by_many_tasks_and_again(pair: Any) -> None:
    transfer = write(pair)

    async def once() -> None:
        await transfer

    await asyncio.gather(once(), once(), once())
    assert await transfer is None


async def test_awaiting_raises_the_failure(held: Any) -> None:
    transfer = write(held, timeout_s=0.02)
    with pytest.raises(te.TransferTimeout):
        await transfer


async def test_cancelling_the_awaiting_task_does_not_cancel_the_transfer(held: Any) -> None:
    transfer = write(held, notify=held.notify)

    async def wait() -> None:
        await transfer

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not transfer.done()
    held.a._inject("resume")
    await asyncio.wait_for(wait(), SOON_S)


def test_a_transfer_may_end_after_the_loop_that_awaited_it(held: Any, caplog: pytest.LogCaptureFixture) -> None:
    transfer = write(held)

    async def give_up() -> None:
        async def wait() -> None:
            await transfer

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(give_up())
    done = threading.Event()
    transfer.add_done_callback(lambda _: done.set())
    held.a._inject("resume")
    assert done.wait(SOON_S)
    assert not caplog.records


def test_a_transfer_can_be_awaited_on_trio(held: Any) -> None:
    trio = pytest.importorskip("trio")
    transfer = write(held)

    async def main() -> None:
        with trio.move_on_after(0.01) as scope:
            await transfer
        assert scope.cancelled_caught
        held.a._inject("resume")
        with trio.fail_after(SOON_S):
            await transfer

    trio.run(main)
    assert transfer.done()


def test_awaiting_outside_of_a_loop_is_refused(held: Any) -> None:
    transfer = write(held)
    with pytest.raises(RuntimeError):
        transfer.__await__().send(None)
    held.a._inject("resume")
    transfer.wait(SOON_S)


def test_the_native_engine_is_freed_with_the_last_object_made_from_it() -> None:
    engine = te.Engine(transport="sim", nics=1)
    handle = weakref.ref(engine._handle)
    transfer = engine.counter().reached(0)
    done = threading.Event()
    transfer.add_done_callback(lambda _: done.set())
    assert done.wait(SOON_S)
    engine.close()
    del engine
    assert handle() is not None
    del transfer
    assert handle() is None
