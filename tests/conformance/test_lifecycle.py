"""The end of engines: under load, in any order, in forked children; bounded, and without harm to others."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Case, Rig, on

CLOSE_BOUND_S = 8.0


def close_in_time(engine: te.Engine, bound_s: float = CLOSE_BOUND_S) -> None:
    begin = time.monotonic()
    engine.close()
    took = time.monotonic() - begin
    assert took < bound_s, f"closing took {took:.2f} s"


@on(nics=(1, 3))
def test_closing_under_load_ends_every_transfer_in_time(rig: Rig) -> None:
    rig.clean = False  # the far side sees the end of a stream
    rig.set_up(shard_bytes=1000)
    link = rig.link(50_000)
    transfers: list[te.Transfer] = []
    refused: list[te.TransferEngineError] = []

    def load() -> None:
        try:
            while True:
                transfers.append(link.write(0, 0, 50_000))
        except te.TransferEngineError as error:
            refused.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    link.wait(50)
    close_in_time(rig.near)
    for thread in threads:
        thread.join(SOON_S)
    assert [type(error) for error in refused] == [te.EngineClosed] * 4
    outcomes = [transfer.exception(0) for transfer in transfers]
    assert all(isinstance(outcome, te.EngineClosed | None) for outcome in outcomes)
    good = outcomes.count(None)
    assert good <= link.wait(good) <= len(transfers)


@on(nics=(1, 3))
def test_the_receiver_closes_under_load_and_the_sender_goes_on_with_others(rig: Rig) -> None:
    rig.set_up(shard_bytes=1000)
    rig.clean = False
    leaving = rig.another_far(shard_bytes=1000)
    doomed, other = rig.link(50_000, far=leaving), rig.link(50_000)
    failures: list[te.TransferEngineError] = []

    def load() -> None:
        under_way: list[te.Transfer] = []
        try:
            while True:
                under_way.append(doomed.write(0, 0, 50_000))
                if len(under_way) > 20:
                    under_way.pop(0).wait(SOON_S)
        except te.TransferEngineError as error:
            failures.append(error)
        for transfer in under_way:
            transfer.exception(SOON_S)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    doomed.wait(20)
    leaving.close()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert all(isinstance(error, te.PeerError | te.RemoteAccessError) for error in failures), failures
    for k in range(20):
        other.write(0, 0, 50_000).wait(SOON_S)
        assert other.wait(k + 1) == k + 1
    other.check([(0, 0, 50_000)], 20)


@on(nics=(2,), apart=False)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_engines_that_write_to_each_other_close_in_any_order(rig: Rig, order: tuple[int, ...]) -> None:
    rig.clean = False
    engines = [rig.engine() for _ in range(3)]
    targets = [np.zeros(10_000, np.uint8) for _ in engines]
    remotes = [engine.register(target).descriptor for engine, target in zip(engines, targets, strict=True)]
    counters = [engine.counter() for engine in engines]
    regions = [engine.register(np.ones(10_000, np.uint8)) for engine in engines]
    for engine, region in zip(engines, regions, strict=True):
        for remote, counter in zip(remotes, counters, strict=True):
            for _ in range(10):
                engine.write(region, remote, notify=counter.descriptor)
    for counter in counters:
        counter.wait(10)
    for k in order:
        close_in_time(engines[k])


@on(nics=(2,), apart=False)
def test_engines_close_at_the_same_moment(rig: Rig) -> None:
    rig.clean = False
    for _ in range(3):
        engines = [rig.engine() for _ in range(4)]
        for engine in engines:
            for other in engines:
                engine.connect(other.address).wait(SOON_S)
        with ThreadPoolExecutor(len(engines)) as pool:  # nobody may wait until silence counts as death
            list(pool.map(lambda engine: close_in_time(engine, 2.0), engines))
        assert all(engine.closed for engine in engines)


@on(nics=(2,))
def test_closing_twice_and_from_many_threads_is_closing_once(rig: Rig) -> None:
    rig.link(1000).write(0, 0, 1000).wait(SOON_S)
    threads = [threading.Thread(target=rig.near.close) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    rig.near.close()
    assert rig.near.closed


@on(nics=(2,), apart=False)
def test_waits_of_all_kinds_end_when_the_engine_closes(rig: Rig) -> None:
    counter = rig.near.counter()
    arrival = counter.reached(1, timeout_s=60)
    ends: list[type[BaseException]] = []

    def wait(call: Any) -> None:
        try:
            call()
        except te.TransferEngineError as error:
            ends.append(type(error))

    calls = [
        lambda: counter.wait(1, timeout_s=60),
        lambda: rig.near.receive(60),
        lambda: arrival.wait(60),
        lambda: arrival.result(60),
    ]
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    close_in_time(rig.near)
    for thread in threads:
        thread.join(SOON_S)
    assert ends == [te.EngineClosed] * len(calls)


@on(nics=(2,))
def test_regions_and_counters_may_close_after_their_engine(rig: Rig) -> None:
    link = rig.link(1000)
    link.write(0, 0, 1000).wait(SOON_S)
    link.wait(1)
    rig.far.close()
    rig.far.close_memory(link.memory)
    rig.far.close_counter(link.counter)
    rig.near.close()
    link.region.close()


# --- processes -------------------------------------------------------------------------------------------------------

PROGRAM = """
import gc, json, os, signal, sys, threading
import numpy as np
import transfer_engine as te

settings = te.Settings(**{**json.loads(sys.argv[1])})
a, b = te.Engine(settings=settings), te.Engine(settings=settings)
source, target = np.arange(50_000, dtype=np.uint8), np.zeros(50_000, np.uint8)
region, remote, counter = a.register(source), b.register(target).descriptor, b.counter()

def write():
    return a.write(region, remote, notify=counter.descriptor)

write().wait(30)
counter.wait(1, timeout_s=30)
"""


def run(case: Case, program: str) -> subprocess.CompletedProcess[str]:
    settings = json.dumps(case.settings(shard_bytes=10_000))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program, settings], capture_output=True, text=True, timeout=60, check=False
    )


@on(nics=(2,), apart=False)
def test_a_fork_while_writes_are_in_flight_harms_neither_parent_nor_child(case: Case) -> None:
    result = run(
        case,
        """
children = []
for _ in range(5):
    under_way = [write() for _ in range(30)]
    child = os.fork()
    if child == 0:
        bad = []
        for use in (write, a.stats, lambda: under_way[0].wait(1), lambda: counter.value, a.counter, region.close,
                    lambda: b.receive(0), lambda: a.register(bytearray(8)), lambda: under_way[0].quiesced):
            try:
                use()
            except te.ForkedEngine:
                continue
            except BaseException as error:
                bad.append(repr(error))
            else:
                bad.append(repr(use))
        a.close(); b.close()
        del under_way, region, counter, remote
        gc.collect()
        if bad:
            print(bad, flush=True)
        sys.exit(7 if bad else 3)
    for transfer in under_way:
        transfer.wait(30)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
write().wait(30)
print(counter.wait(152, timeout_s=30), (target == source).all())
a.close(); b.close()
""",
    )
    assert result.stdout == "[3, 3, 3, 3, 3]\n152 True\n", result.stdout + result.stderr
    assert result.returncode == 0


@on(nics=(2,), apart=False)
def test_a_process_ends_cleanly_whatever_is_still_open(case: Case) -> None:
    ends_cleanly(case, "", 0)


@on(nics=(2,), apart=False, transports=("shm",))
@pytest.mark.parametrize(("end", "status"), [("sys.exit(5)", 5), ("raise RuntimeError('of the application')", 1)])
def test_a_process_ends_with_its_own_status(case: Case, end: str, status: int) -> None:
    ends_cleanly(case, end, status)


def ends_cleanly(case: Case, end: str, status: int) -> None:
    result = run(
        case,
        f"""
held = [write() for _ in range(50)]
held[-1].add_done_callback(lambda t: None)
cycle = [a, b, held]
cycle.append(cycle)
{end}
""",
    )
    assert result.returncode == status, result.stderr
    assert ("of the application" in result.stderr) == (status == 1)
    assert "transfer_engine" not in result.stderr.replace("of the application", "")


@on(nics=(2,), apart=False)
def test_a_signal_handler_may_close_the_engine_under_load(case: Case) -> None:
    result = run(
        case,
        """
signal.signal(signal.SIGUSR1, lambda *_: (a.close(), b.close()))
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
try:
    while True:
        write().wait(30)
except te.TransferEngineError as error:
    print(type(error).__name__)
""",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ("EngineClosed", "PeerLost")


@on(nics=(2,), apart=False, transports=("tcp", "shm"))
def test_sigterm_still_ends_a_process(case: Case) -> None:
    result = run(case, "os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(30)")
    assert result.returncode == -15


@on(nics=(2,), apart=True, transports=("shm",))
def test_what_a_killed_process_left_behind_is_swept(rig: Rig) -> None:
    def left_of(pid: int) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"te-*-{pid}-*")]

    child = rig.spawn()
    rig.another_far(child)
    pid = child.process.pid
    assert left_of(pid)
    child.kill()
    rig.engine()
    assert not left_of(pid)
