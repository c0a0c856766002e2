from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest

import transfer_engine as te

SOON_S = 20.0

OPEN_PAIR = """
import transfer_engine as te
settings = te.Settings(core="none")
a = te.Engine(transport="sim", nics=1, settings=settings)
b = te.Engine(transport="sim", nics=1, settings=settings)
region = a.register(bytearray(b"x" * 64))
memory = bytearray(64)
remote = b.register(memory).descriptor
a.write(region, remote, flush=True).wait(20)
assert memory == b"x" * 64
"""


def test_closing_is_idempotent_and_ends_use(engine: te.Engine) -> None:
    region, counter = engine.register(bytearray(8)), engine.counter()
    engine.close()
    engine.close()
    assert engine.closed
    for use in (
        engine.counter,
        engine.stats,
        engine.messages,
        lambda: engine.register(bytearray(8)),
        lambda: engine.allocate(8),
        lambda: engine.receive(0),
        lambda: engine.send(engine.address, b""),
        lambda: engine.connect(engine.address),
        lambda: counter.value,
        lambda: counter.wait(1, timeout_s=0),
        lambda: region.descriptor,
        lambda: engine.on_peer_lost(print),
    ):
        with pytest.raises(te.EngineClosed):
            use()
    region.close()
    counter.close()
    assert "closed" in repr(engine)
    assert str(engine.address).startswith("te1:")


def test_an_engine_closes_with_its_block() -> None:
    with te.Engine(transport="sim", nics=1) as engine:
        assert not engine.closed
    assert engine.closed


def test_what_is_under_way_fails_once_when_the_engine_closes(pair: Any) -> None:
    pair.a.write(pair.region[:8], pair.remote[:8]).wait(SOON_S)
    pair.a._inject("pause")
    calls: list[te.Transfer] = []
    transfers = [pair.a.write(pair.region[:8], pair.remote[:8]) for _ in range(20)]
    for transfer in transfers:
        transfer.add_done_callback(calls.append)
    with pytest.raises(te.TransferTimeout):  # truthfully: what is held back could still land
        pair.a.close(0.1)
    assert pair.a.closed
    for transfer in transfers:
        assert transfer.done()
        assert isinstance(transfer.exception(), te.EngineClosed)
    assert sorted(map(id, calls)) == sorted(map(id, transfers))
    late: list[te.Transfer] = []
    transfers[0].add_done_callback(late.append)
    assert late == [transfers[0]]


def test_closing_from_a_callback_does_not_deadlock(pair: Any) -> None:
    closed = threading.Event()

    def close(_: te.Transfer) -> None:
        pair.a.close()
        closed.set()

    pair.a.write(pair.region[:8], pair.remote[:8]).add_done_callback(close)
    assert closed.wait(SOON_S)
    pair.a.close()
    assert pair.a.closed


def test_closing_from_many_threads_under_load_ends(pair: Any) -> None:
    stopped = threading.Barrier(5)
    unexpected: list[BaseException] = []

    def load() -> None:
        try:
            while True:
                pair.a.write(pair.region[:64], pair.remote[:64], notify=pair.notify)
        except te.EngineClosed:
            pass
        except te.TransferEngineError as error:
            unexpected.append(error)
        stopped.wait(SOON_S)

    def close() -> None:
        pair.counter.wait(100, timeout_s=SOON_S)
        pair.a.close()
        stopped.wait(SOON_S)

    threads = [threading.Thread(target=target) for target in (load, load, close, close)]
    for thread in threads:
        thread.start()
    stopped.wait(SOON_S)
    for thread in threads:
        thread.join(SOON_S)
    assert not unexpected


def test_the_dispatcher_thread_ends_with_its_engine(pair: Any) -> None:
    done = threading.Event()
    pair.a.write(pair.region[:8], pair.remote[:8]).add_done_callback(lambda _: done.set())
    assert done.wait(SOON_S)
    dispatcher = pair.a._handle.dispatcher._thread
    assert dispatcher.is_alive()
    pair.a.close()
    assert not dispatcher.is_alive()


def test_no_thread_is_started_before_it_is_needed(pair: Any) -> None:
    before = threading.active_count()
    pair.a.write(pair.region[:8], pair.remote[:8], notify=pair.notify).wait(SOON_S)
    pair.counter.wait(1, timeout_s=SOON_S)
    assert threading.active_count() == before


def test_a_dropped_engine_closes_itself(make_engine: Any) -> None:
    engine = te.Engine(transport="sim", nics=1)
    handle = engine._handle
    del engine
    gc.collect()
    assert handle.state != 0


def test_objects_outlive_their_engine(pair: Any) -> None:
    transfer = pair.a.write(pair.region[:8], pair.remote[:8])
    transfer.wait(SOON_S)
    pair.a.close()
    assert transfer.done()
    transfer.wait()
    assert "done" in repr(transfer)
    repr(pair.region)


def test_engines_close_at_exit(run_python: Any) -> None:
    result = run_python(OPEN_PAIR + "a.write(region, remote).add_done_callback(print)")
    assert result.returncode == 0, result.stderr
    assert not result.stderr


def test_an_exception_at_exit_shows_as_itself(run_python: Any) -> None:
    result = run_python(OPEN_PAIR + "raise SystemExit(7)")
    assert result.returncode == 7
    assert not result.stderr


def test_an_engine_can_be_closed_in_a_signal_handler(run_python: Any) -> None:
    result = run_python(
        OPEN_PAIR
        + """
import os, signal, threading
counter = b.counter()
signal.signal(signal.SIGUSR1, lambda *_: b.close())
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
try:
    counter.wait(1, timeout_s=30)
except te.EngineClosed:
    print("closed")
"""
    )
    assert result.stdout == "closed\n", result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    "wait", ["counter.wait(1, timeout_s=30)", "b.receive(30)", "counter.reached(1, timeout_s=30).wait()"]
)
def test_waits_can_be_interrupted(run_python: Any, wait: str) -> None:
    result = run_python(
        OPEN_PAIR
        + f"""
import os, signal, threading
counter = b.counter()
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    {wait}
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    assert result.stdout == "interrupted\n", result.stderr
    assert result.returncode == 0


def test_a_forked_child_gets_typed_errors_and_the_parent_is_unharmed(run_python: Any) -> None:
    result = run_python(
        OPEN_PAIR
        + """
import gc, os, sys
counter = b.counter()
transfer = a.write(region, remote)
transfer.wait(20)
buffer = a.allocate(4096)
child = os.fork()
if child == 0:
    bad = []
    for name, use in {
        "write": lambda: a.write(region, remote),
        "register": lambda: a.register(bytearray(8)),
        "counter": lambda: counter.value,
        "descriptor": lambda: b.register(bytearray(8)),
        "done": lambda: transfer.quiesced,
        "close region": lambda: region.close(),
        "send": lambda: a.send(b.address, b""),
        "receive": lambda: a.receive(0),
        "stats": lambda: a.stats(),
    }.items():
        try:
            use()
        except te.ForkedEngine:
            continue
        except BaseException as error:
            bad.append((name, error))
        else:
            bad.append((name, None))
    a.close()
    own = te.Engine(transport="sim", nics=1, settings=settings)
    own.close()
    del a, b, region, counter, transfer, remote, buffer
    gc.collect()
    print(bad, flush=True)
    sys.exit(3)  # through atexit and finalization
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
memory[:] = bytes(64)
a.write(region, remote, flush=True).wait(20)
assert memory == b"x" * 64
print(status)
"""
    )
    assert result.stdout == "[]\n3\n", result.stderr


def test_a_forked_child_that_closes_nothing_exits_cleanly(run_python: Any) -> None:
    result = run_python(
        OPEN_PAIR
        + """
import multiprocessing
process = multiprocessing.get_context("fork").Process(target=print, args=("child",))
process.start(); process.join(20)
print(process.exitcode)
"""
    )
    assert result.stdout == "child\n0\n", result.stderr


def test_a_requested_transport_is_used_or_refused() -> None:
    with pytest.raises(te.ConfigError):
        te.Engine(transport="telegraph")
    with pytest.raises(te.TransferEngineError):
        te.Engine(transport="sim", nics=["no-such-nic"], settings=te.Settings(sim="no_such_option=1"))


def test_an_engine_beside_a_gpu_is_refused_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(te.TransportUnavailable, match="TE_LIBCUDA is set to /nowhere"):
        te.Engine(transport="sim", device="cuda:0")


def test_the_choice_of_a_transport_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from transfer_engine import probing

    monkeypatch.setattr(probing, "PREFERENCE", ("efa", "sim"))
    monkeypatch.setattr(
        probing, "probe", lambda name: {} if name == "sim" else (_ for _ in ()).throw(te.TransportUnavailable("none"))
    )
    monkeypatch.delenv("TE_TRANSPORT", raising=False)
    caplog.set_level("INFO", "transfer_engine")
    with te.Engine(nics=1) as engine:
        assert engine.transport == "sim"
        assert "sim" in caplog.text
        assert engine.describe()["provider"]


def test_when_no_transport_works_each_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_engine import probing

    def probe(name: str) -> dict[str, str]:
        raise te.TransportUnavailable(f"no {name} here")

    monkeypatch.setattr(probing, "probe", probe)
    monkeypatch.delenv("TE_TRANSPORT", raising=False)
    with pytest.raises(te.TransportUnavailable, match=r"no efa here.*no shm here"):
        te.Engine()


def test_settings_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError):
        te.Engine(transport="sim", settings={"core": "none"})  # type: ignore[arg-type]


def test_nics_are_given_by_count() -> None:
    with te.Engine(transport="sim", nics=3) as engine:
        assert len(engine.nics) == len(engine.address.nics) == 3
    for wrong in (0, 17, [], [1], True, 1.5):
        with pytest.raises((te.ConfigError, TypeError)):
            te.Engine(transport="sim", nics=wrong)  # type: ignore[arg-type]


def test_processes_of_one_node_take_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import transfer_engine as te\n"
        "with te.Engine('tcp', nics='lo') as first, te.Engine('tcp', nics='lo') as second:\n"
        "    print(first.describe()['core'], first.describe()['polling'], second.describe()['core'])\n"
    )
    cores = sorted(os.sched_getaffinity(0))
    chosen = []
    for rank in range(2):
        environment = {**os.environ, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        core, polling, second = done.stdout.split()
        assert second == "None"  # two workers on one core would only be in each other's way
        if core != "None":
            assert int(core) in cores
            assert polling == "busy"
            chosen.append(core)
    assert len(set(chosen)) == len(chosen)
    with te.Engine("tcp", nics="lo") as alone:
        assert alone.describe()["core"] is None
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(te.ConfigError, match="LOCAL_RANK"):
        te.Engine("tcp", nics="lo")


def test_what_is_bound_to_its_process_says_what_to_send_instead(pair: Any) -> None:
    buffer = pair.a.allocate(8)
    transfer = pair.a.write(pair.region[:8], pair.remote[:8])
    for value, instead in (
        (pair.a, "engine.address"),
        (pair.region, "region.descriptor"),
        (pair.region[:8], "region.descriptor"),
        (buffer, "buffer.region.descriptor"),
        (pair.counter, "counter.descriptor"),
        (pair.a.connect(pair.b.address), "peer.address"),
        (transfer, "wait for it"),
        (pair.counter.reached(0), "wait for it"),
    ):
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match=instead):
                pickle.dumps(value, protocol)


def test_a_nic_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(te.ConfigError, match="nope") as caught:
        te.Engine("tcp", nics=["nope"])
    assert "lo" in caught.value.hint
    assert "TE_NICS" in caught.value.hint


def test_children_of_a_busy_process_open_engines_of_their_own(run_python: Any) -> None:
    """The fork catches threads of the parent in the middle of everything: nothing of it may be locked in the child."""
    code = """
import os, threading
import transfer_engine as te
settings = te.Settings(core="none")
a, b = (te.Engine("sim", settings=settings) for _ in range(2))
source, target = a.register(bytearray(64)), b.register(bytearray(64)).descriptor
stop = False
def busy():
    while not stop:
        a.write(source, target).wait(10)
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        with te.Engine("sim", settings=settings) as c, te.Engine("sim", settings=settings) as d:
            c.write(c.register(bytearray(8)), d.register(bytearray(8)).descriptor).wait(10)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
for thread in threads:
    thread.join()
print("done")
"""
    done = run_python(code)
    assert done.stdout.strip() == "done", done.stderr
