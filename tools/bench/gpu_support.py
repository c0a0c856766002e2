"""What the benchmarks of a GPU share: the device, a helper in C for the CPU's side, and work to keep the GPU busy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import transfer_engine as te
from transfer_engine import _cuda
from transfer_engine.kernels import launch

MIB = 1 << 20
LINE_WORDS = 16
SETTLING = 100  # first rounds that do not count: while the load is put there nobody answers

HELPER = """
#include <stdint.h>
#include <time.h>
static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}
void respond(const uint64_t* seen, uint64_t* answer, const uint64_t* stop, uint64_t rounds) {
  for (uint64_t k = 1; k <= rounds; ++k) {
    while (__atomic_load_n(seen, __ATOMIC_ACQUIRE) < k)
      if (__atomic_load_n(stop, __ATOMIC_RELAXED)) return;
    __atomic_store_n(answer, k, __ATOMIC_RELEASE);
  }
}
int64_t leaving_ns(const uint64_t* control, int64_t limit_ns) {
  int64_t begin = now_ns();
  while (!__atomic_load_n(control, __ATOMIC_ACQUIRE))
    if (now_ns() - begin > limit_ns) return -1;
  begin = now_ns();
  while (!__atomic_load_n(control + 1, __ATOMIC_ACQUIRE))
    if (now_ns() - begin > limit_ns) return -1;
  return now_ns() - begin;
}
int64_t attributes_ns(int (*call)(unsigned, int*, void**, unsigned long long), unsigned count, int* names,
                      void** values, unsigned long long pointer, uint64_t rounds) {
  const int64_t begin = now_ns();
  for (uint64_t i = 0; i < rounds; ++i)
    if (call(count, names, values, pointer)) return -1;
  return now_ns() - begin;
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

    def pinned(self, words: int) -> tuple[int, int]:
        """Zeroed words of the host that the device reaches: the address here, and for kernels."""
        flags = self.driver.CU_MEMHOSTALLOC_PORTABLE | self.driver.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(self("cuMemHostAlloc", 8 * words, flags))
        ctypes.memset(host, 0, 8 * words)
        return host, int(self("cuMemHostGetDevicePointer", host, 0))

    def put(self, pointer: int, value: int) -> None:
        """Stores a word in memory of the device."""
        word = ctypes.c_uint64(value)
        self("cuMemcpyHtoD", pointer, ctypes.addressof(word), 8)


class Helper:
    """The CPU's side: in C where there is a compiler, which gives the floor; else in Python."""

    def __init__(self, folder: Path) -> None:
        self.compiled: ctypes.CDLL | None = None
        self.language = "Python"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler:
            (folder / "helper.c").write_text(HELPER)
            library = folder / "helper.so"
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, folder / "helper.c"], check=True)
            self.compiled = ctypes.CDLL(str(library))
            self.compiled.respond.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_uint64]
            self.compiled.respond.restype = None
            self.compiled.leaving_ns.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            self.compiled.leaving_ns.restype = ctypes.c_int64
            self.compiled.attributes_ns.restype = ctypes.c_int64
            self.language = "C"

    def respond(self, seen: int, answer: int, stop: int, rounds: int) -> None:
        """Stores k into `answer` as soon as `seen` is k, for k from 1; leaves when `stop` is not zero."""
        if self.compiled is not None:
            self.compiled.respond(seen, answer, stop, rounds)
            return
        watched, answered, ended = (ctypes.c_uint64.from_address(at) for at in (seen, answer, stop))
        for k in range(1, rounds + 1):
            while watched.value < k:
                if ended.value:
                    return
            answered.value = k

    def leaving_us(self, control: int, limit_s: float = 20.0) -> float:
        """From the abort word, as this thread sees it, to the first wait that has left. Negative: it did not happen."""
        if self.compiled is not None:
            return int(self.compiled.leaving_ns(control, int(1e9 * limit_s))) / 1e3
        words = (ctypes.c_uint64 * 2).from_address(control)
        end = time.monotonic() + limit_s
        begin = 0.0
        for word in (0, 1):
            while not words[word]:
                if time.monotonic() > end:
                    return -1.0
            begin, since = time.perf_counter(), begin
        return 1e6 * (begin - since)

    def attributes_us(self, pointer: int, names: list[int], rounds: int = 20_000) -> float | None:
        """What a call of cuPointerGetAttributes takes. None: there is no compiler, or it fails."""
        if self.compiled is None:
            return None
        call = ctypes.CDLL("libcuda.so.1").cuPointerGetAttributes
        attributes = (ctypes.c_int * len(names))(*names)
        room = (ctypes.c_uint64 * (4 * len(names)))()
        values = (ctypes.c_void_p * len(names))(*(ctypes.addressof(room) + 32 * i for i in range(len(names))))
        nanoseconds = self.compiled.attributes_ns(
            ctypes.cast(call, ctypes.c_void_p), ctypes.c_uint(len(names)), attributes, values,
            ctypes.c_ulonglong(pointer), ctypes.c_uint64(rounds),
        )  # fmt: skip
        return None if nanoseconds < 0 else float(nanoseconds) / rounds / 1e3


def percentiles(microseconds: Any) -> dict[str, float]:
    """p50, p99, p99.9 and the most."""
    p50, p99, p999 = (float(value) for value in np.percentile(microseconds, (50, 99, 99.9)))
    return {"p50": p50, "p99": p99, "p99.9": p999, "max": float(np.max(microseconds))}


def of_rounds(times: Any) -> Any:
    """Microseconds of each round, of what the kernels in pingpong.cu leave: cycles and nanoseconds of each.

    The clock of cycles is fine, that of nanoseconds coarse: the sum of the second gives the first its unit.
    """
    cycles, nanoseconds = times.astype(np.float64).T
    return cycles * (nanoseconds.sum() / cycles.sum()) / 1e3


def worker_core() -> int | str:
    """The CPU for a worker that spins: the last that this process may use; not pinned where there are hardly any."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-1] if len(usable) > 3 else "none"


@contextlib.contextmanager
def on_core(core: int | str) -> Iterator[None]:
    """Inside, this thread runs there and nowhere else."""
    before = os.sched_getaffinity(0)
    if isinstance(core, int):
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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
