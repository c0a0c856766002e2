"""Flags beside a GPU: kernels that wait see all that an epoch stands for, and no wait outlives its reason."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.kernels import launch, patterns

from ..nvlink.players import World, worlds
from .coordination import BLOCK, ROUND_TIMEOUT_NS, SEED, Loop, engines, exactly, memory
from .support import SOON_S, Gpu, until

pytestmark = pytest.mark.gpu
Worlds = Callable[[int], World]
BATCH = 50_000


@pytest.fixture
def device_name(gpu: Gpu) -> str:
    return f"cuda:{gpu.index}"


@pytest.fixture
def engine(gpu: Gpu) -> Iterator[te.Engine]:
    with engines("sim", 1) as (engine,):
        yield engine


@pytest.fixture
def sides(_usable: None) -> Iterator[Worlds]:
    with worlds(Path(__file__).with_name("engine_peer.py")) as start:
        yield start


def control_words(flag: te.Flag) -> Any:
    """The abort word and the number of waits that left, as the host has them."""
    return (ctypes.c_uint64 * 2).from_address(int(flag._info.control_host))


# --- what a kernel sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "kinds", "every", "rounds"),
    [
        ("sim", ("mapped", "mapped"), 1, 700_000),
        ("sim", ("mapped", "mapped"), 4, 100_000),
        ("sim", ("staged", "staged"), 1, 20_000),
        ("tcp", ("mapped", "mapped"), 1, 80_000),
        ("tcp", ("mapped", "staged"), 1, 20_000),
        ("tcp", ("staged", "staged"), 4, 10_000),
        ("shm", ("mapped", "mapped"), 1, 80_000),
        ("shm", ("staged", "mapped"), 4, 10_000),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_kernel_that_spins_sees_the_payload_of_each_of_a_million_epochs(
    gpu: Gpu, stream: int, transport: str, kinds: tuple[str, str], every: int, rounds: int, record_property: Any
) -> None:
    """All cases together. The kernel makes each round's pattern, has it sent, waits for the epoch and compares."""
    with engines(transport) as (writer, owner):
        loop = Loop(gpu, writer, owner, 128, kinds, every)
        begin = time.perf_counter()
        while loop.rounds < rounds:
            loop.run(stream, min(BATCH, rounds - loop.rounds))
            loop.flag.check()
        record_property("us_per_round", round(1e6 * (time.perf_counter() - begin) / rounds, 2))
        assert loop.results() == [0, rounds]
        exactly(loop.trigger, rounds)
        assert loop.counter.value == every * (rounds + 1)
        assert loop.flag.value == rounds + 1


@pytest.mark.parametrize("kind", ["mapped", "staged"])
@pytest.mark.parametrize("words", [1, 255, 4096, 200_000])
def test_writes_of_the_host_are_wholly_there_when_a_kernel_that_spins_sees_their_epoch(
    gpu: Gpu, stream: int, kind: str, words: int
) -> None:
    rounds = 100 if words < 100_000 else 20
    with engines("tcp") as (writer, owner):
        source = np.zeros(words, np.uint64)
        region = writer.register(source)
        target, pointer, keep = memory(gpu, owner, kind, 8 * words)
        counter, flag = owner.counter(), owner.flag(f"cuda:{gpu.index}")
        counter.bind(flag)
        remote, notify = target.descriptor, counter.descriptor
        writer.write(region, remote, notify=notify, timeout_s=30).wait()
        base = flag.wait_value(1, timeout_s=30)
        reply, found = gpu.host_words(1), gpu.device_bytes(16)
        launch(
            te.kernels.load("spin_check", gpu.index)["te_spin_check"], stream, 1, BLOCK,
            flag.device_pointer, flag.control_pointer, pointer, words, SEED, base, rounds, ROUND_TIMEOUT_NS,
            reply.pointer(), found.pointer,
        )  # fmt: skip
        for round_ in range(1, rounds + 1):
            source[:] = patterns.pattern(SEED, round_, words)
            writer.write(region, remote, notify=notify, timeout_s=30).wait()
            until(lambda round_=round_: reply[0] == round_)
        gpu.wait(stream)
        flag.check()
        assert [int(value) for value in found.read(np.uint64)] == [0, rounds]
        del keep


# --- waits in streams -------------------------------------------------------------------------------------------------


def test_a_stream_that_waits_goes_on_with_its_epoch_and_not_before(
    gpu: Gpu, engine: te.Engine, stream: int, device_name: str
) -> None:
    flag, watcher = engine.flag(device_name), engine.watcher(device_name)
    for _ in range(3):
        flag.wait(stream, advance=2)
        watcher.add(stream)
    for epoch in range(1, 7):
        time.sleep(0.005)  # a chance to be wrong
        assert watcher.value == (epoch - 1) // 2
        flag.raise_()
        until(lambda epoch=epoch: watcher.value == epoch // 2)
    gpu.wait(stream)
    flag.raise_(5)
    flag.wait(stream, advance=5)
    gpu.wait(stream)
    flag.check()
    assert flag.value == 11


def test_each_of_1000_replays_waits_for_the_next_epoch(
    gpu: Gpu, engine: te.Engine, stream: int, device_name: str
) -> None:
    rounds = 1000
    flag, watcher = engine.flag(device_name), engine.watcher(device_name)

    def captured() -> None:
        flag.wait(stream, timeout_s=60)
        watcher.add(stream)

    graph = gpu.graph(stream, captured)
    early: list[int] = []

    def raise_all() -> None:
        for round_ in range(rounds):
            until(lambda round_=round_: watcher.value >= round_)
            if watcher.value != round_:
                early.append(round_)
            flag.raise_()

    thread = threading.Thread(target=raise_all)
    thread.start()
    for _ in range(rounds):
        gpu.call("cuGraphLaunch", graph, stream)
    gpu.wait(stream, 60)
    thread.join()
    flag.check()
    assert not early
    assert watcher.value == flag.value == rounds
    gpu.call("cuGraphExecDestroy", graph)


def test_waits_captured_by_torch_are_waits_for_the_next_epoch(
    gpu: Gpu, engine: te.Engine, torch: Any, device_name: str
) -> None:
    flag = engine.flag(device_name)
    with torch.cuda.device(gpu.index):
        tensor = torch.zeros(4, device="cuda")
        tensor += 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flag.wait(torch.cuda.current_stream(), timeout_s=60)
            tensor += 1
        for _ in range(100):
            graph.replay()
        flag.raise_(50)
        flag.raise_(50)
        torch.cuda.synchronize()
        assert tensor.tolist() == [101.0] * 4
    flag.check()


FIRST_OF_THE_PROCESS = """
import torch, transfer_engine as te
with te.Engine("sim") as engine:
    tensor = torch.zeros(4, device="cuda")
    tensor += 1
    torch.cuda.synchronize()
    flag, watcher = engine.flag("cuda:0"), engine.watcher("cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flag.wait(torch.cuda.current_stream(), timeout_s=30)
        watcher.add(torch.cuda.current_stream())
    graph.replay()
    flag.raise_()
    torch.cuda.synchronize()
    flag.check()
    assert watcher.value == 1
print("right")
"""


def test_the_first_wait_of_a_process_may_be_a_captured_one(torch: Any) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FIRST_OF_THE_PROCESS], env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == "right", result.stderr


# --- waits that end without their epoch -------------------------------------------------------------------------------


def test_a_deadline_on_the_device_is_told_by_check_until_it_is_cleared(
    gpu: Gpu, engine: te.Engine, stream: int, device_name: str
) -> None:
    flag, watcher = engine.flag(device_name), engine.watcher(device_name)
    flag.check()
    flag.wait(stream, timeout_s=0.3)
    watcher.add(stream)
    assert watcher.value == 0
    gpu.wait(stream)
    assert watcher.value == 1  # the stream goes on: who reads the result checks the flag
    for _ in range(2):
        with pytest.raises(te.TransferTimeout, match="1 waits left early"):
            flag.check()
    with pytest.raises(te.TransferTimeout):
        flag.wait_value(1, timeout_s=30)
    flag.clear()
    flag.check()
    flag.raise_(2)  # the epoch of the wait that left counts as taken
    flag.wait(stream, timeout_s=30)
    gpu.wait(stream)
    flag.check()
    flag.wait(stream, timeout_s=30)
    time.sleep(0.01)
    assert not gpu.finished(stream)
    flag.raise_()
    gpu.wait(stream)
    flag.check()


def abort_seen(words: Any, leaving: int) -> float:
    """Seconds from the abort word as the host sees it to the moment that so many waits have left."""
    until(lambda: words[0] != 0)
    begin = time.perf_counter()
    until(lambda: words[1] >= leaving)
    return time.perf_counter() - begin


@pytest.mark.parametrize("replayed", [False, True], ids=["a kernel", "a graph that is replayed"])
def test_a_peer_that_is_killed_ends_what_waits_for_it_and_check_names_it(
    gpu: Gpu, stream: int, device_name: str, sides: Worlds, replayed: bool, record_property: Any
) -> None:
    world = sides(1)
    world[0].open_on("tcp", 0, "lo", 1.0)
    address = te.Address.from_bytes(bytes.fromhex(world[0].address()))
    with engines("tcp", 1, peer_timeout_s=1.0) as (engine,):
        target = engine.allocate(4096, device=device_name)
        counter, flag, unconcerned = engine.counter(), engine.flag(device_name), engine.flag(device_name)
        counter.bind(flag, peers=[address])
        world[0].allocate("memory", 4096)
        world[0].fill("memory", 1)
        remote, notify = bytes(target.region.descriptor).hex(), bytes(counter.descriptor).hex()
        world[0].write("memory", remote, notify, 0, 4096, 0)
        flag.wait(stream, timeout_s=30)
        gpu.wait(stream)
        flag.check()

        waits = 100 if replayed else 1
        graph = gpu.graph(stream, lambda: flag.wait(stream, timeout_s=60)) if replayed else None
        for _ in range(waits):
            if graph is None:
                flag.wait(stream, timeout_s=60)
            else:
                gpu.call("cuGraphLaunch", graph, stream)
        if replayed:  # some of them have their epoch, and then no more come
            for _ in range(10):
                world[0].write("memory", remote, notify, 0, 4096, 0)
            flag.wait_value(11, timeout_s=30)
        time.sleep(0.01)
        assert not gpu.finished(stream)
        world[0].kill()
        record_property("abort_to_first_leaving_us", round(1e6 * abort_seen(control_words(flag), 1), 1))
        gpu.wait(stream)
        with pytest.raises(te.PeerLost) as caught:
            flag.check()
        assert caught.value.peer == str(address)
        assert f"{waits - 10 if replayed else 1} waits left early" in str(caught.value)
        unconcerned.check()

        flag.clear()
        flag.check()
        epochs = flag.value
        flag.raise_(waits + 1)
        flag.wait(stream, timeout_s=30)  # the waits that left have taken their epochs
        assert flag.value == epochs + waits + 1
        gpu.wait(stream)
        flag.check()
        if graph is not None:
            gpu.call("cuGraphExecDestroy", graph)


@pytest.mark.parametrize("what", ["engine", "flag"])
def test_closing_ends_kernels_that_wait(gpu: Gpu, stream: int, device_name: str, what: str) -> None:
    other = gpu.stream()
    with engines("sim", 1) as (engine,):
        flags = [engine.flag(device_name), engine.flag(device_name)]
        control = control_words(flags[0])
        flags[0].wait(stream, timeout_s=60)
        if what == "engine":
            flags[1].wait(other, timeout_s=60)
        time.sleep(0.01)
        assert not gpu.finished(stream)
        (engine if what == "engine" else flags[0]).close()
        gpu.wait(stream)
        gpu.wait(other)
        assert control[1] == 1
        with pytest.raises(te.EngineClosed):
            flags[0].check()
        if what == "flag":
            flags[1].wait(other, timeout_s=60)
            flags[1].raise_()
            gpu.wait(other)
            flags[1].check()
    gpu.call("cuStreamDestroy", other)


def test_kernels_that_drive_transfers_leave_when_their_engine_closes(gpu: Gpu, stream: int) -> None:
    with engines("sim") as (writer, owner):
        loop = Loop(gpu, writer, owner, 128, ("mapped", "mapped"))
        thread = threading.Timer(0.2, owner.close)
        thread.start()
        loop.run(stream, 1 << 40, SOON_S)
        thread.join()
        wrong, came = loop.results()
        assert wrong == 0
        assert came > 0
        with pytest.raises(te.EngineClosed):
            loop.flag.check()


# --- where the words lie ----------------------------------------------------------------------------------------------


def test_words_of_a_device_say_where_they_lie_and_gdr_can_be_required(
    gpu: Gpu, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with te.Engine("sim", settings=te.Settings(gdr="auto")) as engine:
        flag, watcher = engine.flag(device_name), engine.watcher(device_name)
        assert flag.kind in ("mapped", "gdr")
        assert watcher.kind in ("mapped", "gdr")
        assert flag.device_pointer
        assert flag.control_pointer
        assert watcher.device_pointer
        works = flag.kind == "gdr"
    with te.Engine("sim", settings=te.Settings(gdr="off")) as engine:
        assert engine.flag(device_name).kind == engine.watcher(device_name).kind == "mapped"
    monkeypatch.setenv("TE_GDR", "require")
    with te.Engine("sim") as engine:
        if works:
            assert engine.flag(device_name).kind == "gdr"
            return
        for make in (engine.flag, engine.watcher):
            with pytest.raises(te.TransportUnavailable, match=r"require.*(libgdrapi|gdrdrv|gdr_)"):
                make(device_name)
        assert engine.flag().kind == "host"  # of the host nothing was required


def test_a_device_that_is_not_there_is_refused(gpu: Gpu, engine: te.Engine) -> None:
    for make in (engine.flag, engine.watcher):
        with pytest.raises(te.TransferEngineError, match="99"):
            make("cuda:99")
