"""What tests of flags and watchers share: engines whose workers spin, memory for both sides, and the closed loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.kernels import launch

from .support import Gpu

SEED = 77
BLOCK = 256
ROUND_TIMEOUT_NS = 20_000_000_000  # whatever fails, a kernel does not spin for ever


def cores(count: int) -> list[int | str]:
    """CPUs for workers that spin, where that leaves some for others."""
    usable = sorted(os.sched_getaffinity(0))
    return [*usable[-count:]] if len(usable) > 2 * count else ["none"] * count


@contextlib.contextmanager
def engines(transport: str, count: int = 2, **settings: Any) -> Iterator[list[te.Engine]]:
    """Engines of this process, one core for each."""
    try:
        te.probe(transport)
    except te.TransportUnavailable as why:
        pytest.skip(f"{transport}: {why.message}")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                te.Engine(
                    transport,
                    nics="lo" if transport == "tcp" else None,
                    settings=te.Settings(polling="busy", core=core, **settings),
                )
            )
            for core in cores(count)
        ]


def memory(gpu: Gpu, engine: te.Engine, kind: str, nbytes: int) -> tuple[te.Region, int, object]:
    """A region, its address for kernels, and what to keep: "mapped" (engine.allocate) or "staged" device memory."""
    if kind == "mapped":
        buffer = engine.allocate(nbytes, device=f"cuda:{gpu.index}")
        return buffer.region, buffer.device_pointer, buffer
    held = gpu.device_bytes(nbytes)
    region = engine.register((held.pointer, nbytes, f"cuda:{gpu.index}"), staging=True)
    assert region.reach == "staged"
    return region, held.pointer, held


class Loop:
    """Kernel, watcher, trigger, write, counter, flag, and the kernel again: no CPU thread of ours in any round."""

    def __init__(
        self, gpu: Gpu, writer: te.Engine, owner: te.Engine, words: int, kinds: tuple[str, str], every: int = 1
    ) -> None:
        device, nbytes = f"cuda:{gpu.index}", 8 * words
        assert nbytes % every == 0
        self.gpu, self.words = gpu, words
        self.kernel = te.kernels.load("spin_check", gpu.index)["te_drive_and_check"]
        source, self.source, mine = memory(gpu, writer, kinds[0], nbytes)
        target, self.target, theirs = memory(gpu, owner, kinds[1], nbytes)
        self.keep = mine, theirs  # as long as kernels may look at it
        self.counter = owner.counter()
        self.flag = owner.flag(device)
        self.binding = self.counter.bind(self.flag, every=every)
        self.watcher = writer.watcher(device)
        remote, notify = target.descriptor, self.counter.descriptor
        described: te.Write | te.PageWrite = te.Write(source, remote, notify)
        if every > 1:  # so many arrivals for one epoch
            page = nbytes // every
            described = te.PageWrite(te.Pages(source, range(every), page), te.Pages(remote, range(every), page), notify)
        self.prepared = writer.prepare(described)
        self.every = every
        self.rounds = 0
        self.found = gpu.device_bytes(16)
        # Once without a kernel in the way: whatever CUDA sets up at first use is set up.
        self.prepared.post(timeout_s=30).wait()
        self.counter.wait(every, timeout_s=30)
        self.flag.wait_value(1, timeout_s=30)
        self.epochs_before = 1
        self.trigger = self.watcher.trigger(self.prepared)

    def run(self, stream: int, rounds: int, within_s: float = 60.0) -> None:
        """So many rounds more; returns when the kernel has ended."""
        base = self.epochs_before + self.rounds
        launch(
            self.kernel, stream, 1, BLOCK,
            self.watcher.device_pointer, self.flag.device_pointer, self.flag.control_pointer,
            self.source, self.target, self.words, SEED, base, rounds, ROUND_TIMEOUT_NS, self.found.pointer,
        )  # fmt: skip
        self.rounds += rounds
        self.gpu.wait(stream, within_s)

    def results(self) -> list[int]:
        """Words that were wrong, and rounds that came."""
        return [int(value) for value in self.found.read(np.uint64)]


def exactly(trigger: te.Trigger, count: int) -> te.TriggeredTransfers:
    """Waits until so many have ended well, and asserts that there were no others."""
    trigger.wait(count, 60)
    expected = te.TriggeredTransfers(fired=count, posted=count, completed=count, failed=0, owed=0)
    assert trigger.transfers == expected
    return expected
