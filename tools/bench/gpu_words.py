"""Round trips through the engine: from a kernel's raise to the first post, to a callback, to an arrival; and aborts.

Beside each stands the floor of the same run: the same kernel, the same words and the same core, answered by a loop of
the CPU. Half of the floor is the way back to the kernel, so what remains of a round trip is the way from the kernel's
store to what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gpu_support import LINE_WORDS, SETTLING, Gpu, Helper, busy_work, of_rounds, on_core, percentiles, worker_core

import transfer_engine as te
from transfer_engine.kernels import launch

DEVICE = "cuda:0"
TIMEOUT_NS = 20_000_000_000
ABORTS, LOSSES = 20, 5
ARMED = (1, 64, 1024)


@contextlib.contextmanager
def engine(transport: str, *, spins: bool = True, **settings: Any) -> Iterator[te.Engine]:
    """One whose worker spins on its core, or sleeps when there is nothing to do."""
    how: dict[str, Any] = {"polling": "busy", "core": worker_core()}
    if not spins:
        how = {"polling": "adaptive", "core": "none"}
    nics = "lo" if transport == "tcp" else None
    with te.Engine(transport, nics=nics, settings=te.Settings(**how, **settings)) as opened:
        yield opened


def works(transport: str) -> bool:
    """Whether it does here."""
    try:
        te.probe(transport)
    except te.TransportUnavailable:
        return False
    return True


class Rounds:
    """Kernels that raise a word and wait for an epoch, round by round, and the times they leave."""

    def __init__(self, rounds: int) -> None:
        self.gpu = gpu = Gpu(0)
        self.rounds = rounds
        self.kernels, self.stream = te.kernels.load("pingpong", 0), gpu.stream()
        self.most = rounds + SETTLING
        self.times, self.taken = int(gpu("cuMemAlloc", 16 * self.most)), int(gpu("cuMemAlloc", 8))
        self.control, self.control_at = gpu.pinned(LINE_WORDS)
        self.result = np.empty((self.most, 2), np.uint64)
        self.busy_name, self.keep_busy = busy_work(gpu)

    def free(self) -> None:
        """Gives the memory back."""
        for call, what in (("cuMemFree", self.times), ("cuMemFree", self.taken), ("cuMemFreeHost", self.control)):
            self.gpu(call, what)

    def states(self) -> dict[str, Callable[[], None] | None]:
        """The GPU idle and at work: what it has to do meanwhile."""
        return {"idle": None, f"busy: {self.busy_name}": self.keep_busy(self.rounds * 10e-6 + 0.05)}

    def through_engine(
        self, watched: int, flag: te.Flag, load: Callable[[], None] | None, rounds: int | None = None
    ) -> Any:
        """Microseconds of each round in which an engine raises the flag."""
        count = (self.rounds if rounds is None else rounds) + SETTLING
        self.gpu.put(self.taken, flag.value)
        self.gpu("cuCtxSynchronize")
        launch(
            self.kernels["te_raise_and_wait"], self.stream, 1, 1, watched, flag.device_pointer, flag.control_pointer,
            self.taken, self.times, count, TIMEOUT_NS,
        )  # fmt: skip
        if load is not None:
            load()
        self.gpu("cuStreamSynchronize", self.stream)
        flag.check()
        return self._times(count)

    def bare(self, kernel: str, words: tuple[int, int, int, int], helper: Helper, load: Any, core: int | str) -> Any:
        """The same with the helper's loop on the core: host and device address of the word and of the epoch."""
        word, word_at, epoch, epoch_at = words
        for place in (word, epoch, self.control):
            ctypes.memset(place, 0, 8)
        self.gpu.put(self.taken, 0)
        self.gpu("cuCtxSynchronize")
        arguments = [word_at, epoch_at, self.control_at]
        arguments += [self.times, self.most] if kernel == "te_pingpong" else [self.taken, self.times, self.most, 0]
        launch(self.kernels[kernel], self.stream, 1, 1, *arguments)
        if load is not None:
            load()
        watchdog = threading.Timer(60, lambda: ctypes.memset(self.control, 1, 1))
        watchdog.start()
        with on_core(core):
            helper.respond(word, epoch, self.control, self.most)
        self.gpu("cuStreamSynchronize", self.stream)
        watchdog.cancel()
        if ctypes.c_uint64.from_address(self.control).value:
            raise SystemExit(f"{kernel} did not come to its end")
        return self._times(self.most)

    def _times(self, count: int) -> Any:
        self.gpu("cuCtxSynchronize")  # the load, too
        self.gpu("cuMemcpyDtoH", self.result.ctypes.data, self.times, 16 * count)
        return of_rounds(self.result[SETTLING:count])


class Path:
    """A watcher whose trigger posts 64 bytes to a second engine."""

    def __init__(self, writer: te.Engine, owner: te.Engine, *, armed: int = 1, posts: bool = True) -> None:
        source, target = writer.allocate(64, device=DEVICE), owner.allocate(64, device=DEVICE)
        self.keep: list[Any] = [source, target]
        self.counter, self.arrived = owner.counter(), owner.flag(DEVICE)
        self.counter.bind(self.arrived)
        prepared = writer.prepare(te.Write(source.region, target.region.descriptor, self.counter.descriptor))
        prepared.post(timeout_s=30).wait()
        self.arrived.wait_value(1, timeout_s=30)
        self.posted = writer.flag(DEVICE)
        self.watchers = [writer.watcher(DEVICE) for _ in range(armed)]
        self.watcher = self.watchers[-1]  # the worker has gone over all others when it finds it
        if posts:
            self.keep += [watcher.trigger(prepared, posted=self.posted) for watcher in self.watchers]

    def words(self) -> tuple[int, int, int, int]:
        """Host and device address of the watched word and of the epoch."""
        watched, posted = self.watcher._info, self.posted._info
        return (
            int(watched.host), int(watched.device_pointer), int(posted.epoch_host), int(posted.epoch_device),
        )  # fmt: skip


def minus_half(round_trip: dict[str, float], floor: dict[str, float], less: float = 0.0) -> dict[str, float]:
    """What a round trip leaves for the first half when the second is half of the floor's median."""
    return {name: round_trip[name] - floor["p50"] / 2 - less for name in ("p50", "p99", "p99.9", "max")}


def raise_to_post(figures: list[dict[str, Any]], helper: Helper, *, rounds: int) -> None:
    """Raise, trigger, first work request with the provider, `posted` flag, and the kernel again."""
    run = Rounds(rounds)
    core = worker_core()
    found: list[dict[str, Any]] = []
    floors: dict[tuple[str, str], dict[str, float]] = {}
    for transport in ("sim", "shm"):
        if not works(transport):
            continue
        for armed in ARMED if transport == "sim" else ARMED[:1]:
            with engine(transport) as writer, engine(transport, spins=False) as owner:
                path = Path(writer, owner, armed=armed)
                run.through_engine(path.watcher.device_pointer, path.posted, None, 1000)
                for state, load in run.states().items():
                    times = run.through_engine(path.watcher.device_pointer, path.posted, load)
                    found.append({
                        "name": "raise to first post, and back", "transport": transport, "armed": armed, "gpu": state,
                        "cpu": "worker", "core": str(core), "rounds": rounds, "kind": path.posted.kind,
                        "us": percentiles(times),
                    })  # fmt: skip
            # The engines are closed, so the core is free; the words stay until the objects go.
            if not floors and path.posted.kind == path.watcher.kind == "mapped":
                for kernel in ("te_pingpong", "te_raise_and_wait"):
                    run.bare(kernel, path.words(), helper, None, core)
                    for state, load in run.states().items():
                        times = run.bare(kernel, path.words(), helper, load, core)
                        floors[kernel, state] = percentiles(times)
                        figures.append({
                            "name": f"floor of the same words and core, {kernel}", "gpu": state, "cpu": helper.language,
                            "core": str(core), "rounds": rounds, "us": floors[kernel, state],
                        })  # fmt: skip
            del path
    for figure in found:
        floor = floors.get(("te_pingpong", figure["gpu"]))
        if floor is not None:
            mine = figure["us"]
            figure["over_floor_us"] = {name: mine[name] - floor[name] for name in mine}
            figure["store_to_post_us"] = minus_half(mine, floor)
    figures += found
    run.free()


def floor_of(figures: list[dict[str, Any]], state: str) -> dict[str, float] | None:
    """The bare ping-pong of this run, if it was measured."""
    for figure in figures:
        if figure["name"].startswith("floor") and "te_pingpong" in figure["name"] and figure["gpu"] == state:
            return dict(figure["us"])
    return None


def raise_to_callback(figures: list[dict[str, Any]], helper: Helper, *, rounds: int) -> None:
    """Raise, worker, dispatcher, a Python callback that raises a flag, and the kernel again."""
    run = Rounds(rounds)
    with engine("sim") as writer, engine("sim", spins=False) as owner:
        path = Path(writer, owner, posts=False)
        raising: list[float] = []

        def answer(old: int, new: int) -> None:
            begin = time.perf_counter_ns()
            path.posted.raise_(new - old)
            raising.append((time.perf_counter_ns() - begin) / 1e3)

        remove = path.watcher.on_change(answer)
        run.through_engine(path.watcher.device_pointer, path.posted, None, 500)
        for state, load in run.states().items():
            raising.clear()
            times = percentiles(run.through_engine(path.watcher.device_pointer, path.posted, load))
            figure = {
                "name": "raise to Python callback, and back by flag.raise_()", "gpu": state, "cpu": "callback",
                "rounds": rounds, "us": times, "raise_us": percentiles(raising),
            }  # fmt: skip
            floor = floor_of(figures, state)
            if floor is not None:
                figure["store_to_callback_us"] = minus_half(times, floor, statistics.median(raising))
            figures.append(figure)
        remove()
    run.free()


def raise_to_arrival(figures: list[dict[str, Any]], helper: Helper, *, rounds: int) -> None:
    """Raise, trigger, write, counter of a second engine, bound flag, and the kernel again: all of a transfer.

    Minus the round trip to the first post, it is what the transport and the receiving worker take.
    """
    run = Rounds(rounds)
    for transport in ("sim", "shm", "tcp"):
        if not works(transport):
            continue
        with engine(transport) as writer, spinning_elsewhere(transport) as owner:
            path = Path(writer, owner)
            run.through_engine(path.watcher.device_pointer, path.arrived, None, 500)
            for state, load in run.states().items():
                times = run.through_engine(path.watcher.device_pointer, path.arrived, load)
                figures.append({
                    "name": "raise to the peer's bound flag", "transport": transport, "gpu": state, "cpu": "2 workers",
                    "rounds": rounds, "bytes": 64, "us": percentiles(times),
                })  # fmt: skip
        del path
    run.free()


@contextlib.contextmanager
def spinning_elsewhere(transport: str) -> Iterator[te.Engine]:
    """A second worker that spins, on no core in particular."""
    nics = "lo" if transport == "tcp" else None
    with te.Engine(transport, nics=nics, settings=te.Settings(polling="busy", core="none")) as opened:
        yield opened


def aborts(figures: list[dict[str, Any]], helper: Helper) -> None:
    """From the abort word to the kernel's leaving: the engine closes, and a peer is lost."""
    gpu = Gpu(0)
    stream = gpu.stream()

    def timed(flag: te.Flag, act: Callable[[], None]) -> float:
        control = int(flag._info.control_host)
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(helper.leaving_us(control)))
        flag.wait(stream, timeout_s=60)
        time.sleep(0.002)  # it spins by now
        thread.start()
        act()
        thread.join()
        gpu("cuStreamSynchronize", stream)
        if found[0] < 0:
            raise SystemExit("a kernel did not leave")
        return found[0]

    def closing() -> float:
        with engine("sim") as opened:
            return timed(opened.flag(DEVICE), opened.close)

    def losing() -> float:
        with engine("sim", peer_timeout_s=0.2) as mine:
            other = te.Engine("sim", settings=te.Settings(close_timeout_s=0.05, peer_timeout_s=0.2))
            try:
                target, counter, flag = mine.allocate(64), mine.counter(), mine.flag(DEVICE)
                counter.bind(flag, peers=[other.address])
                source = other.allocate(64)
                other.write(source.region, target.region.descriptor, notify=counter.descriptor).wait(30)
                flag.wait(stream, timeout_s=30)
                return timed(flag, lambda: other._inject("kill"))
            finally:
                with contextlib.suppress(te.TransferEngineError):
                    other.close()

    for name, one, count in (("the engine closes", closing, ABORTS), ("a peer is lost", losing, LOSSES)):
        one()
        figures.append({
            "name": "abort word to the kernel's end", "path": name, "repetitions": count, "budget_us": 1000,
            "us": percentiles([one() for _ in range(count)]),
        })  # fmt: skip
