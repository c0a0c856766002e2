"""Watchers beside a GPU: every raise of a kernel or graph is one transfer, exactly, however many come at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.kernels import launch

from .coordination import engines, exactly
from .support import Gpu, until

pytestmark = pytest.mark.gpu

SOURCE = """
#include "transfer_engine.cuh"

// Every thread raises the word `times` times, with a pause of some nanoseconds between.
extern "C" __global__ void raise_often(unsigned long long* word, unsigned long long times,
                                       unsigned long long pause_ns) {
  for (unsigned long long i = 0; i < times; ++i) {
    te::raise(word, 1);
    const unsigned long long begin = te::nanoseconds();
    while (te::nanoseconds() - begin < pause_ns) {
    }
  }
}

// One thread for each word.
extern "C" __global__ void raise_each(const unsigned long long* words, unsigned long long count) {
  const unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
  if (i < count) te::raise(reinterpret_cast<unsigned long long*>(words[i]), 1);
}
"""


class Path:
    """What a trigger posts: a small write, whose counter raises a flag of the GPU at the peer."""

    def __init__(self, gpu: Gpu, writer: te.Engine, owner: te.Engine) -> None:
        self.device = f"cuda:{gpu.index}"
        source, target = writer.allocate(64, device=self.device), owner.allocate(64, device=self.device)
        self.keep = source, target
        self.counter, self.flag = owner.counter(), owner.flag(self.device)
        self.counter.bind(self.flag)
        self.prepared = writer.prepare(te.Write(source.region, target.region.descriptor, self.counter.descriptor))
        self.watcher = writer.watcher(self.device)

    def arrived(self, count: int) -> None:
        """So many and no more have come, and the flag has risen with each."""
        assert self.counter.wait(count, timeout_s=60) == count
        assert self.flag.wait_value(count, timeout_s=60) == count


@pytest.fixture
def kernels(gpu: Gpu) -> te.kernels.Module:
    return te.kernels.compile(SOURCE, gpu.index, name="raises")


@pytest.fixture
def engine(gpu: Gpu) -> Iterator[te.Engine]:
    with engines("sim", 1) as (engine,):
        yield engine


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["sim", "tcp", "shm"])
def test_10000_replays_of_a_captured_raise_are_10000_transfers(gpu: Gpu, stream: int, transport: str) -> None:
    with engines(transport) as (writer, owner):
        path = Path(gpu, writer, owner)
        trigger = path.watcher.trigger(path.prepared)
        graph = gpu.graph(stream, lambda: path.watcher.add(stream))
        assert path.watcher.value == 0  # to capture is not to run
        for _ in range(10_000):
            gpu.call("cuGraphLaunch", graph, stream)
        gpu.wait(stream)
        assert path.watcher.value == 10_000
        exactly(trigger, 10_000)
        path.arrived(10_000)
        gpu.call("cuGraphExecDestroy", graph)


@pytest.mark.parametrize("transport", ["sim", "tcp"])
def test_10000_replays_of_torchs_graph_are_10000_transfers(gpu: Gpu, torch: Any, transport: str) -> None:
    with engines(transport) as (writer, owner), torch.cuda.device(gpu.index):
        path = Path(gpu, writer, owner)
        posted, completed = writer.flag(path.device), writer.flag()
        trigger = path.watcher.trigger(path.prepared, posted=posted, completed=completed)
        tensor = torch.zeros(1000, device="cuda")
        tensor += 1
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor += 1
            path.watcher.add(torch.cuda.current_stream())
        for _ in range(10_000):
            graph.replay()
        torch.cuda.synchronize()
        assert path.watcher.value == 10_000
        assert bool((tensor == 10_001).all())
        exactly(trigger, 10_000)
        path.arrived(10_000)
        assert posted.wait_value(10_000, timeout_s=30) == 10_000
        assert completed.wait_value(10_000, timeout_s=30) == 10_000


def test_a_graph_may_raise_more_than_once_and_by_more_than_one(gpu: Gpu, stream: int) -> None:
    with engines("sim") as (writer, owner):
        path = Path(gpu, writer, owner)
        trigger = path.watcher.trigger(path.prepared, every=6, first=4)

        def captured() -> None:
            path.watcher.add(stream)
            path.watcher.add(stream, 3)
            path.watcher.add(stream, 2)

        graph = gpu.graph(stream, captured)
        for _ in range(1000):
            gpu.call("cuGraphLaunch", graph, stream)
        gpu.wait(stream)
        assert path.watcher.value == 6000
        exactly(trigger, 1000)
        path.arrived(1000)
        gpu.call("cuGraphExecDestroy", graph)


# --- many at once -----------------------------------------------------------------------------------------------------


def test_streams_that_raise_one_watcher_together_lose_nothing(gpu: Gpu) -> None:
    with engines("sim") as (writer, owner):
        path = Path(gpu, writer, owner)
        trigger = path.watcher.trigger(path.prepared)
        streams = [gpu.stream() for _ in range(4)]

        def work(stream: int) -> None:
            for i in range(2500):
                path.watcher.add(stream, 1 + i % 2)

        threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stream in streams:
            gpu.wait(stream)
            gpu.call("cuStreamDestroy", stream)
        total = 4 * (1250 + 2500)
        assert path.watcher.value == total
        exactly(trigger, total)
        path.arrived(total)


@pytest.mark.parametrize("transport", ["sim", "tcp"])
def test_thousands_of_threads_that_raise_faster_than_the_worker_posts_lose_nothing(
    gpu: Gpu, stream: int, kernels: te.kernels.Module, transport: str
) -> None:
    blocks, threads, times = 64, 32, 20
    total = blocks * threads * times
    with engines(transport) as (writer, owner):
        path = Path(gpu, writer, owner)
        trigger = path.watcher.trigger(path.prepared)
        launch(kernels["raise_often"], stream, blocks, threads, path.watcher.device_pointer, times, 0)
        gpu.wait(stream)
        assert path.watcher.value == total
        exactly(trigger, total)
        path.arrived(total)


def test_4096_watchers_raised_by_one_launch_fire_once_each(gpu: Gpu, stream: int, kernels: te.kernels.Module) -> None:
    count, rounds = 4096, 5
    with engines("sim") as (writer, owner):
        path = Path(gpu, writer, owner)
        watchers = [writer.watcher(path.device) for _ in range(count)]
        triggers = [watcher.trigger(path.prepared) for watcher in watchers]
        pointers = np.array([watcher.device_pointer for watcher in watchers], np.uint64)
        assert len(set(pointers.tolist())) == count
        words = gpu.device_bytes(8 * count)
        words.write(pointers)
        for _ in range(rounds):
            launch(kernels["raise_each"], stream, count // 256, 256, words.pointer, count)
        gpu.wait(stream)
        path.arrived(rounds * count)
        for watcher, trigger in zip(watchers, triggers, strict=True):
            assert watcher.value == rounds
            exactly(trigger, rounds)
        # And those that were not raised are left alone.
        launch(kernels["raise_each"], stream, 1, 1, words.pointer, 1)
        gpu.wait(stream)
        exactly(triggers[0], rounds + 1)
        path.arrived(rounds * count + 1)
        assert [trigger.transfers.fired for trigger in triggers[1:]] == [rounds] * (count - 1)


# --- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause_ns", [0, 2000])
def test_callbacks_hear_of_all_changes_in_one_chain(
    gpu: Gpu, engine: te.Engine, stream: int, kernels: te.kernels.Module, pause_ns: int
) -> None:
    watcher, total = engine.watcher(f"cuda:{gpu.index}"), 4 * 5000
    seen: list[tuple[int, int]] = []
    remove = watcher.on_change(lambda old, new: seen.append((old, new)))
    launch(kernels["raise_often"], stream, 4, 1, watcher.device_pointer, 5000, pause_ns)
    gpu.wait(stream)
    until(lambda: seen and seen[-1][1] == total)
    assert seen[0][0] == 0
    assert all(old < new for old, new in seen)
    assert [new for _, new in seen[:-1]] == [old for old, _ in seen[1:]]
    remove()
    watcher.add(stream)
    gpu.wait(stream)
    assert seen[-1][1] == total


def test_a_callback_may_end_itself_and_the_others_go_on(gpu: Gpu, engine: te.Engine, stream: int) -> None:
    watcher = engine.watcher(f"cuda:{gpu.index}")
    once: list[tuple[int, int]] = []
    always: list[tuple[int, int]] = []

    def first(old: int, new: int) -> None:
        once.append((old, new))
        remove()

    remove = watcher.on_change(first)
    watcher.on_change(lambda old, new: always.append((old, new)))
    for number in range(1, 101):
        watcher.add(stream)
        until(lambda number=number: always and always[-1][1] == number)
    gpu.wait(stream)
    assert once == [(0, 1)]
    assert always == [(number, number + 1) for number in range(100)]


def test_a_callback_may_close_its_watcher(gpu: Gpu, stream: int) -> None:
    with engines("sim") as (writer, owner):
        path = Path(gpu, writer, owner)
        trigger = path.watcher.trigger(path.prepared)
        seen: list[tuple[int, int]] = []

        def close(old: int, new: int) -> None:
            seen.append((old, new))
            path.watcher.close()

        path.watcher.add(stream, 7)
        gpu.wait(stream)
        exactly(trigger, 7)
        path.watcher.on_change(close)
        path.watcher.add(stream, 3)
        gpu.wait(stream)
        until(lambda: path.watcher.closed and not trigger.active)
        assert seen == [(7, 10)]
        fired = trigger.transfers.fired
        assert fired in (7, 8, 9, 10)
        until(lambda: trigger.transfers.completed == fired)
        path.arrived(fired)
        with pytest.raises(te.EngineClosed):
            path.watcher.add(stream)
        # Its word serves the next one, from zero.
        again = writer.watcher(path.device)
        again.add(stream)
        gpu.wait(stream)
        assert again.value == 1
