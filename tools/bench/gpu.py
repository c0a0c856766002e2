"""Figures of a GPU: bandwidth between the memories of two ranks, and round trips of a word between GPU and CPU.

`make bench-gpu` runs it; the record goes to docs/results/gpu-bench.json. Two GPUs where there are two, else two
processes on one GPU, whose figures say nothing about NVLink and are labelled so.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transfer_engine.tools import gpu_record

import transfer_engine as te
from transfer_engine import _cuda
from transfer_engine.kernels import launch

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BUFFER_BYTES = 1024 * MIB  # many times the L2 of any device
REPETITIONS, WARM_UP = 20, 5
ROUNDS, WARM_UP_ROUNDS = 20_000, 1_000
SETTLING = 100  # first rounds that do not count: while the load is put there nobody answers
LINE_WORDS = 16

RESPONDER = """
#include <stdint.h>
void respond(const uint64_t* seen, uint64_t* answer, const uint64_t* stop, uint64_t rounds) {
  for (uint64_t k = 1; k <= rounds; ++k) {
    while (__atomic_load_n(seen, __ATOMIC_ACQUIRE) < k)
      if (__atomic_load_n(stop, __ATOMIC_RELAXED)) return;
    __atomic_store_n(answer, k, __ATOMIC_RELEASE);
  }
}
"""


class Gpu:
    """The driver with a device's primary context current in this thread."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.driver = _cuda.driver("bench")
        self.device = _cuda.handle_of(self.driver, index, "bench")
        self.context = self("cuDevicePrimaryCtxRetain", self.device)
        self.use()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Calls the driver."""
        return _cuda.check(self.driver, name, *arguments)

    def use(self) -> None:
        """Makes the context current here."""
        self("cuCtxSetCurrent", self.context)

    def stream(self) -> Any:
        """One that does not wait for the default stream."""
        return self("cuStreamCreate", int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def count(self) -> int:
        """How many devices there are."""
        return int(self("cuDeviceGetCount"))

    def processors(self) -> int:
        """How many multiprocessors the device has."""
        return _cuda.attribute(self.driver, self.index, "MULTIPROCESSOR_COUNT", "bench")


# --- bandwidth --------------------------------------------------------------------------------------------------------


def bandwidth(gpu: Gpu, stream: Any, nbytes: int, work: Callable[[], None]) -> dict[str, Any]:
    """GB/s of the median, the slowest and the fastest repetition; one way, each byte counted once."""
    flags = int(gpu.driver.CUevent_flags.CU_EVENT_DEFAULT)
    begin, end = gpu("cuEventCreate", flags), gpu("cuEventCreate", flags)
    seconds = []
    for repetition in range(WARM_UP + REPETITIONS):
        gpu("cuEventRecord", begin, stream)
        work()
        gpu("cuEventRecord", end, stream)
        gpu("cuStreamSynchronize", stream)
        if repetition >= WARM_UP:
            seconds.append(float(gpu("cuEventElapsedTime", begin, end)) / 1e3)
    rates = sorted(nbytes / value / 1e9 for value in seconds)
    return {"GB_per_s": {"median": statistics.median(rates), "least": rates[0], "most": rates[-1]}, "bytes": nbytes}


def peers(figures: list[dict[str, Any]], *, nbytes: int) -> None:
    """Push and pull by our kernels, and the copy engine, between this process and another one."""
    gpu = Gpu(0)
    other = 1 if gpu.count() > 1 else 0
    path = "NVLink, two processes on two GPUs" if other else "two processes on one GPU: not NVLink"
    with te.Rendezvous.serve("127.0.0.1", token=b"") as server:
        child = subprocess.Popen([sys.executable, __file__, "--peer", server.address, str(other), str(nbytes)])
        try:
            with (
                te.Rendezvous(server.address, 0, 2, token=b"", timeout_s=120) as rendezvous,
                te.nvlink.allocate(nbytes, 0) as mine,
                te.nvlink.map_peers(mine, rendezvous) as mapped,
            ):
                theirs = mapped[1]
                stream, copy = gpu.stream(), te.kernels.load("copy", 0)
                wrong = gpu("cuMemAlloc", 8)
                gpu("cuMemsetD8", wrong, 0, 8)
                gpu("cuCtxSynchronize")
                pairs = {"te_push": (theirs.pointer, mine.pointer), "te_pull": (mine.pointer, theirs.pointer)}
                for round_, (name, (to, source)) in enumerate(pairs.items()):
                    best: dict[str, Any] = {}
                    launch(copy["te_fill"], stream, 1024, 256, source, nbytes, 1, round_)
                    for blocks in (1, 2, 4):
                        for threads in (256, 512, 1024):
                            grid = blocks * gpu.processors()
                            found = bandwidth(
                                gpu, stream, nbytes,
                                lambda k=copy[name], t=to, s=source, g=grid, b=threads: launch(
                                    k, stream, g, b, t, s, nbytes
                                ),
                            )  # fmt: skip
                            if not best or found["GB_per_s"]["median"] > best["GB_per_s"]["median"]:
                                best = {**found, "grid": grid, "block": threads}
                    launch(copy["te_verify"], stream, 1024, 256, to, nbytes, 1, round_, int(wrong))
                    figures.append({"name": name.removeprefix("te_"), "path": path, **best})
                for name, (to, source) in (("push", pairs["te_push"]), ("pull", pairs["te_pull"])):
                    found = bandwidth(
                        gpu, stream, nbytes,
                        lambda t=to, s=source: gpu("cuMemcpyDtoDAsync", t, s, nbytes, stream),
                    )  # fmt: skip
                    figures.append({"name": f"copy engine, mapped memory, {name}", "path": path, **found})
                gpu("cuStreamSynchronize", stream)
                count = ctypes.c_uint64()
                gpu("cuMemcpyDtoH", ctypes.addressof(count), wrong, 8)
                if count.value:
                    raise SystemExit(f"{count.value} words are wrong after the copies")
                rendezvous.barrier()
            child.wait(60)
        finally:
            child.kill()
            child.wait()
    if child.returncode:
        raise SystemExit(f"the other process failed with status {child.returncode}")


def peer(store: str, device: int, nbytes: int) -> None:
    """The other process: its memory is what matters."""
    with (
        te.Rendezvous(store, 1, 2, token=b"", timeout_s=120) as rendezvous,
        te.nvlink.allocate(nbytes, device) as mine,
        te.nvlink.map_peers(mine, rendezvous),
    ):
        rendezvous.barrier()


def plain_copy(figures: list[dict[str, Any]], *, nbytes: int) -> None:
    """The driver's copy between devices (cuMemcpyPeerAsync) within one process: what everybody has."""
    gpu = Gpu(0)
    second = Gpu(1) if gpu.count() > 1 else gpu
    second.use()
    far = second("cuMemAlloc", nbytes)
    gpu.use()
    near, stream = gpu("cuMemAlloc", nbytes), gpu.stream()
    path = "one process, two GPUs" if second is not gpu else "one process, one GPU: not NVLink"
    for name, (to, to_gpu, source, source_gpu) in {
        "cuMemcpyPeerAsync, push": (far, second, near, gpu),
        "cuMemcpyPeerAsync, pull": (near, gpu, far, second),
    }.items():
        found = bandwidth(
            gpu, stream, nbytes,
            lambda t=to, tg=to_gpu, s=source, sg=source_gpu: gpu(
                "cuMemcpyPeerAsync", t, tg.context, s, sg.context, nbytes, stream
            ),
        )  # fmt: skip
        figures.append({"name": name, "path": path, **found})
    gpu("cuMemFree", near)
    second.use()
    gpu("cuMemFree", far)
    gpu.use()


# --- round trips ------------------------------------------------------------------------------------------------------


def responder(folder: Path) -> tuple[str, Callable[[int, int, int, int], None]]:
    """The CPU's side: in C where there is a compiler, which gives the floor; else in Python."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler:
        (folder / "respond.c").write_text(RESPONDER)
        library = folder / "respond.so"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, folder / "respond.c"], check=True)
        function = ctypes.CDLL(str(library)).respond
        function.argtypes, function.restype = [*[ctypes.c_void_p] * 3, ctypes.c_uint64], None
        return "C", lambda *arguments: function(*arguments)

    def respond(seen: int, answer: int, stop: int, rounds: int) -> None:
        watched, answered, ended = (ctypes.c_uint64.from_address(at) for at in (seen, answer, stop))
        for k in range(1, rounds + 1):
            while watched.value < k:
                if ended.value:
                    return
            answered.value = k

    return "Python", respond


def busy_work(gpu: Gpu) -> tuple[str, Callable[[float], Callable[[], None]]]:
    """What keeps the whole GPU at work for so many seconds: its name, and how to put it into a stream of its own."""
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        with torch.cuda.device(gpu.index):
            side = torch.cuda.Stream()
            a, b, c = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))

            def once() -> None:
                with torch.cuda.device(gpu.index), torch.cuda.stream(side):
                    torch.mm(a, b, out=c)

        name, stream = "bfloat16 matrix products of 8192", side.cuda_stream
    else:
        stream, copy = gpu.stream(), te.kernels.load("copy", gpu.index)
        to, source = gpu("cuMemAlloc", 512 * MIB), gpu("cuMemAlloc", 512 * MIB)
        grid = 2 * gpu.processors()

        def once() -> None:
            launch(copy["te_push"], stream, grid, 512, int(to), int(source), 512 * MIB)

        name = "copies of 512 MiB"

    def measured() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            once()
        gpu("cuStreamSynchronize", int(stream))
        return (time.perf_counter() - begin) / 20

    gpu("cuCtxSynchronize")
    measured()
    each_s = measured()

    def keep_busy(seconds: float) -> Callable[[], None]:
        times = min(max(int(seconds / each_s), 1), 900)  # below what a stream's queue takes without blocking

        def put() -> None:
            for _ in range(times):
                once()

        return put

    return name, keep_busy


def round_trips(figures: list[dict[str, Any]], folder: Path, *, rounds: int) -> None:
    """GPU stores, CPU sees and answers, GPU sees: with the GPU idle, and with all its processors at work."""
    gpu = Gpu(0)
    language, respond = responder(folder)
    kernels, stream = te.kernels.load("pingpong", 0), gpu.stream()
    flags = gpu.driver.CU_MEMHOSTALLOC_PORTABLE | gpu.driver.CU_MEMHOSTALLOC_DEVICEMAP
    host = int(gpu("cuMemHostAlloc", 8 * 3 * LINE_WORDS, flags))
    at = int(gpu("cuMemHostGetDevicePointer", host, 0))
    there, back, control = (8 * LINE_WORDS * place for place in range(3))
    most = max(rounds + SETTLING, WARM_UP_ROUNDS)
    times, taken = gpu("cuMemAlloc", 16 * most), gpu("cuMemAlloc", 8)
    busy_name, keep_busy = busy_work(gpu)
    result = np.empty((most, 2), np.uint64)

    def run(kernel: str, count: int, load: Callable[[], None] | None) -> Any:
        ctypes.memset(host, 0, 8 * 3 * LINE_WORDS)
        gpu("cuMemsetD8", taken, 0, 8)
        gpu("cuCtxSynchronize")
        arguments = [at + there, at + back, at + control]
        if kernel == "te_raise_and_wait":
            arguments += [int(taken), int(times), count, 0]
        else:
            arguments += [int(times), count]
        launch(kernels[kernel], stream, 1, 1, *arguments)  # it is there before the load comes
        if load is not None:
            load()
        watchdog = threading.Timer(60, lambda: ctypes.memset(host + control, 1, 1))
        watchdog.start()
        respond(host + there, host + back, host + control, count)
        gpu("cuStreamSynchronize", stream)
        watchdog.cancel()
        gpu("cuCtxSynchronize")
        gpu("cuMemcpyDtoH", result.ctypes.data, times, 16 * count)
        if ctypes.c_uint64.from_address(host + control).value:
            raise SystemExit(f"{kernel} did not come to its end")
        return result[SETTLING:count].astype(np.float64)

    for kernel, name in (
        ("te_pingpong", "flag ping-pong, floor"),
        ("te_raise_and_wait", "raise, then wait for the epoch"),
    ):
        run(kernel, WARM_UP_ROUNDS, None)
        for state in ("idle", f"busy: {busy_name}"):
            load = None if state == "idle" else keep_busy(rounds * 5e-6 + 0.05)
            cycles, nanoseconds = run(kernel, rounds + SETTLING, load).T
            # The clock of cycles is fine, that of nanoseconds coarse: the sum of the second gives the first its unit.
            microseconds = cycles * (nanoseconds.sum() / cycles.sum()) / 1e3
            p50, p99, p999 = (float(value) for value in np.percentile(microseconds, (50, 99, 99.9)))
            figures.append({
                "name": name, "gpu": state, "cpu": language, "rounds": rounds,
                "us": {"p50": p50, "p99": p99, "p99.9": p999, "max": float(microseconds.max())},
            })  # fmt: skip
    for free, what in (("cuMemFreeHost", host), ("cuMemFree", times), ("cuMemFree", taken)):
        gpu(free, what)


def main() -> None:
    """Prints each figure, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: smaller buffers, fewer rounds, no record")
    parser.add_argument("--peer", nargs=3, metavar=("STORE", "DEVICE", "BYTES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer(arguments.peer[0], int(arguments.peer[1]), int(arguments.peer[2]))
        return
    figures: list[dict[str, Any]] = []
    nbytes, rounds = (256 * MIB, 2000) if arguments.quick else (BUFFER_BYTES, ROUNDS)
    try:
        record = gpu_record.header(ROOT)
        peers(figures, nbytes=nbytes)
        plain_copy(figures, nbytes=nbytes)
        with tempfile.TemporaryDirectory() as folder:
            round_trips(figures, Path(folder), rounds=rounds)
    except te.TransportUnavailable as error:
        raise SystemExit(f"no GPU here: {error}") from None
    for figure in figures:
        print(shown(figure))
    if not arguments.quick:
        print("recorded in", gpu_record.write(ROOT, gpu_record.BENCH, {**record, "figures": figures}))


def shown(figure: dict[str, Any]) -> str:
    """One line."""
    where = figure.get("path") or f"GPU {figure['gpu']}, CPU in {figure['cpu']}"
    values = figure.get("GB_per_s") or figure["us"]
    unit = "GB/s" if "GB_per_s" in figure else "us"
    numbers = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    return f"{figure['name']} ({where}): {numbers} {unit}"


if __name__ == "__main__":
    main()
