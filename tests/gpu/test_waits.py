"""Raising and waiting on the device: order, graphs, abort, time-outs, and what a kernel that runs already may see."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.kernels import launch, patterns

from .support import LINE_WORDS, SOON_S, DeviceBytes, Gpu, HostWords, sync, until

pytestmark = pytest.mark.gpu
PEER_LOST, DEADLINE = 1, 2


@dataclass
class Flag:
    """Epoch, control cell and a reply word in mapped memory, each in a line of its own; `taken` on the device."""

    gpu: Gpu
    host: HostWords
    device: DeviceBytes

    EPOCH, CONTROL, REPLY = 0, LINE_WORDS, 2 * LINE_WORDS

    @property
    def epoch(self) -> int:
        return self.host.pointer(self.EPOCH)

    @property
    def control(self) -> int:
        return self.host.pointer(self.CONTROL)

    @property
    def reply(self) -> int:
        return self.host.pointer(self.REPLY)

    def set(self, epoch: int) -> None:
        self.host[self.EPOCH] = epoch

    def abort(self, reason: int) -> None:
        self.host[self.CONTROL] = reason

    def replies(self) -> int:
        return self.host[self.REPLY]

    def missed(self) -> int:
        return self.host[self.CONTROL + 1]

    def reason(self) -> int:
        return self.host[self.CONTROL]

    def taken(self) -> int:
        return int(self.device.read(np.uint64)[0])

    def wait_in(self, stream: int, advance: int = 1, timeout_ns: int = 0) -> None:
        kernel = te.kernels.load("waits", self.gpu.index)["te_wait"]
        launch(kernel, stream, 1, 1, self.epoch, self.control, self.device.pointer, advance, timeout_ns)

    def reply_in(self, stream: int, by: int = 1) -> None:
        launch(te.kernels.load("waits", self.gpu.index)["te_raise"], stream, 1, 1, self.reply, by)


@pytest.fixture
def flag(gpu: Gpu) -> Iterator[Flag]:
    te.kernels.load("waits", gpu.index)
    flag = Flag(gpu, gpu.host_words(3 * LINE_WORDS), gpu.device_bytes(8))
    yield flag
    flag.abort(PEER_LOST)  # whatever failed: nothing may spin on
    sync(gpu)


def test_raising_adds_and_only_one_thread_does(flag: Flag, gpu: Gpu, stream: int) -> None:
    kernel = te.kernels.load("waits", gpu.index)["te_raise"]
    launch(kernel, stream, (2, 2), (8, 4, 2), flag.reply, 5)
    launch(kernel, stream, 1, 1, flag.reply, 2**64 - 2)
    gpu.wait(stream)
    assert flag.replies() == 3


def test_a_captured_raise_counts_every_one_of_10000_replays(flag: Flag, gpu: Gpu, stream: int) -> None:
    graph = gpu.graph(stream, lambda: flag.reply_in(stream))
    for _ in range(10_000):
        gpu.call("cuGraphLaunch", graph, stream)
    gpu.wait(stream)
    assert flag.replies() == 10_000
    gpu.call("cuGraphExecDestroy", graph)


def test_a_raise_captured_by_torch_counts_every_replay(flag: Flag, gpu: Gpu, torch: Any) -> None:
    with torch.cuda.device(gpu.index):
        tensor = torch.zeros(4, device="cuda")
        tensor += 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor += 1
            launch(te.kernels.load("waits", gpu.index)["te_raise"], torch.cuda.current_stream(), 1, 1, flag.reply, 1)
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        assert tensor.tolist() == [101.0] * 4
    assert flag.replies() == 100


def test_an_epoch_that_has_come_is_not_waited_for(flag: Flag, gpu: Gpu, stream: int) -> None:
    flag.set(3)
    for advance in (1, 2):
        flag.wait_in(stream, advance)
    gpu.wait(stream)
    assert (flag.taken(), flag.missed(), flag.reason()) == (3, 0, 0)


def test_a_wait_holds_the_stream_until_the_host_raises_the_epoch(flag: Flag, gpu: Gpu, stream: int) -> None:
    flag.wait_in(stream, 2)
    flag.reply_in(stream)
    flag.set(1)
    time.sleep(0.02)  # a chance to be wrong
    assert flag.replies() == 0
    flag.set(2)
    gpu.wait(stream)
    assert (flag.replies(), flag.taken(), flag.missed()) == (1, 2, 0)


def test_a_captured_wait_takes_the_next_epoch_at_each_replay(flag: Flag, gpu: Gpu, stream: int) -> None:
    def round_() -> None:
        flag.wait_in(stream)
        flag.reply_in(stream)

    one_by_one, rounds = 100, 1100  # few enough for the stream's queue to hold what waits
    graph = gpu.graph(stream, round_)
    for _ in range(one_by_one):
        gpu.call("cuGraphLaunch", graph, stream)
    for epoch in range(1, one_by_one + 1):
        assert flag.replies() == epoch - 1
        flag.set(epoch)
        until(lambda epoch=epoch: flag.replies() >= epoch)
    flag.set(rounds)
    for _ in range(rounds - one_by_one):
        gpu.call("cuGraphLaunch", graph, stream)
    gpu.wait(stream)
    assert (flag.replies(), flag.taken(), flag.missed()) == (rounds, rounds, 0)
    gpu.call("cuGraphExecDestroy", graph)


def test_the_abort_word_ends_a_wait_that_spins(flag: Flag, gpu: Gpu, stream: int, record_property: Any) -> None:
    times = []
    for round_ in range(1, 21):
        flag.abort(0)
        flag.wait_in(stream)
        flag.reply_in(stream)
        time.sleep(0.002)  # it spins by now
        assert flag.replies() == round_ - 1
        begin = time.perf_counter()
        flag.abort(PEER_LOST)
        until(lambda round_=round_: flag.missed() == round_)
        times.append(time.perf_counter() - begin)
        gpu.wait(stream)
        assert (flag.replies(), flag.reason(), flag.missed()) == (round_, PEER_LOST, round_)
    record_property("abort_us", [round(1e6 * value, 1) for value in times])
    print(f"left after {1e6 * sorted(times)[10]:.1f} us (median), {1e6 * max(times):.1f} us (longest)")


def test_with_the_abort_word_set_what_has_come_counts_and_what_has_not_is_missed(
    flag: Flag, gpu: Gpu, stream: int
) -> None:
    flag.abort(PEER_LOST)
    flag.set(1)
    flag.wait_in(stream)
    gpu.wait(stream)
    assert (flag.taken(), flag.missed()) == (1, 0)
    flag.wait_in(stream)
    gpu.wait(stream)
    assert (flag.taken(), flag.missed()) == (2, 1)


def test_a_time_out_sets_the_abort_word_and_leaves(flag: Flag, gpu: Gpu, stream: int) -> None:
    flag.wait_in(stream, timeout_ns=300_000_000)
    flag.reply_in(stream)
    begin = time.monotonic()
    time.sleep(0.01)
    assert flag.replies() == 0
    gpu.wait(stream)
    assert 0.1 < time.monotonic() - begin < SOON_S
    assert (flag.reason(), flag.missed(), flag.replies()) == (DEADLINE, 1, 1)


def test_a_time_out_that_is_not_reached_changes_nothing(flag: Flag, gpu: Gpu, stream: int) -> None:
    flag.wait_in(stream, timeout_ns=20_000_000_000)
    time.sleep(0.005)
    flag.set(1)
    gpu.wait(stream)
    assert (flag.reason(), flag.missed(), flag.taken()) == (0, 0, 1)


def test_many_waits_are_all_ended_and_all_counted(flag: Flag, gpu: Gpu, stream: int) -> None:
    kernel = te.kernels.load("waits", gpu.index)["te_wait"]
    streams, cells = [gpu.stream() for _ in range(8)], gpu.device_bytes(8 * 8)
    for place, where in enumerate(streams):
        launch(kernel, where, 1, 1, flag.epoch, flag.control, cells.pointer + 8 * place, 1, 0)
    time.sleep(0.005)
    flag.abort(PEER_LOST)
    for where in streams:
        gpu.wait(where)
        gpu.call("cuStreamDestroy", where)
    assert flag.missed() == len(streams)


# --- a kernel that runs already ---------------------------------------------------------------------------------------


class Spinning:
    """te_spin_check under way."""

    def __init__(self, flag: Flag, stream: int, words: int, rounds: int, *, base: int = 0) -> None:
        gpu = flag.gpu
        self.payload = gpu.host_words(words)
        self.found = gpu.device_bytes(16)
        sync(gpu)
        launch(
            te.kernels.load("spin_check", gpu.index)["te_spin_check"], stream, 1, 256,
            flag.epoch, flag.control, self.payload.pointer(), words, 77, base, rounds, 0, flag.reply,
            self.found.pointer,
        )  # fmt: skip

    def results(self) -> list[int]:
        return [int(value) for value in self.found.read(np.uint64)]


@pytest.mark.parametrize("words", [1, 255, 4096])
def test_a_kernel_that_spins_sees_the_payload_of_each_epoch(flag: Flag, gpu: Gpu, stream: int, words: int) -> None:
    rounds, base = 300, 1000
    flag.set(base)
    spinning = Spinning(flag, stream, words, rounds, base=base)
    payload = spinning.payload.array()
    for round_ in range(1, rounds + 1):
        payload[:] = patterns.pattern(77, round_, words)
        flag.set(base + round_)
        until(lambda round_=round_: flag.replies() == round_)
    gpu.wait(stream)
    assert spinning.results() == [0, rounds]


def test_the_check_counts_what_is_wrong(flag: Flag, gpu: Gpu, stream: int) -> None:
    spinning = Spinning(flag, stream, 100, 2)
    payload = spinning.payload.array()
    payload[:] = patterns.pattern(77, 1, 100)
    payload[[3, 99]] ^= np.uint64(1)
    flag.set(1)
    until(lambda: flag.replies() == 1)
    flag.set(2)  # the payload is still that of round 1
    gpu.wait(stream)
    assert spinning.results() == [102, 2]


def test_a_kernel_that_spins_leaves_with_the_abort_word(flag: Flag, gpu: Gpu, stream: int) -> None:
    spinning = Spinning(flag, stream, 10, 5)
    time.sleep(0.002)
    flag.abort(PEER_LOST)
    gpu.wait(stream)
    assert spinning.results() == [0, 0]
    assert flag.missed() == 1


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["te_pingpong", "te_raise_and_wait"])
def test_round_trips_are_timed(flag: Flag, gpu: Gpu, stream: int, kernel: str) -> None:
    rounds = 200
    module = te.kernels.load("pingpong", gpu.index)
    times = gpu.device_bytes(16 * rounds)

    def answer() -> None:
        for round_ in range(1, rounds + 1):
            until(lambda round_=round_: flag.replies() >= round_)
            flag.set(round_)

    thread = threading.Thread(target=answer)
    thread.start()
    if kernel == "te_pingpong":
        launch(module[kernel], stream, 1, 1, flag.reply, flag.epoch, flag.control, times.pointer, rounds)
    else:
        launch(
            module[kernel], stream, 1, 1,
            flag.reply, flag.epoch, flag.control, flag.device.pointer, times.pointer, rounds, 0,
        )  # fmt: skip
    gpu.wait(stream)
    thread.join()
    cycles, nanoseconds = times.read(np.uint64).reshape(rounds, 2).T
    assert (cycles > 0).all()
    assert 0 < nanoseconds.sum() < 10_000_000_000
