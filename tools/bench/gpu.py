"""Figures of a GPU: bandwidth, round trips of a word between GPU and CPU and through the engine, staged transfers.

`make bench-gpu` runs it; the record goes to docs/results/gpu-bench.json. Two GPUs where there are two, else two
processes on one GPU, whose figures say nothing about NVLink and are labelled so. `--only raise-to-post,aborts`
measures some of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_staging
import gpu_words
import numpy as np
from gpu_support import LINE_WORDS, MIB, SETTLING, Gpu, Helper, busy_work, of_rounds, percentiles
from transfer_engine.tools import gpu_record

import transfer_engine as te
from transfer_engine.kernels import launch

ROOT = Path(__file__).resolve().parents[2]
BUFFER_BYTES = 1024 * MIB  # many times the L2 of any device
REPETITIONS, WARM_UP = 20, 5
ROUNDS, WARM_UP_ROUNDS = 20_000, 1_000
POST_ROUNDS, CALLBACK_ROUNDS = 100_000, 5_000


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


def round_trips(figures: list[dict[str, Any]], helper: Helper, *, rounds: int) -> None:
    """GPU stores, CPU sees and answers, GPU sees: with the GPU idle, and with all its processors at work."""
    gpu = Gpu(0)
    kernels, stream = te.kernels.load("pingpong", 0), gpu.stream()
    host, at = gpu.pinned(3 * LINE_WORDS)
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
        helper.respond(host + there, host + back, host + control, count)
        gpu("cuStreamSynchronize", stream)
        watchdog.cancel()
        gpu("cuCtxSynchronize")
        gpu("cuMemcpyDtoH", result.ctypes.data, times, 16 * count)
        if ctypes.c_uint64.from_address(host + control).value:
            raise SystemExit(f"{kernel} did not come to its end")
        return of_rounds(result[SETTLING:count])

    for kernel, name in (
        ("te_pingpong", "flag ping-pong, floor"),
        ("te_raise_and_wait", "raise, then wait for the epoch"),
    ):
        run(kernel, WARM_UP_ROUNDS, None)
        for state in ("idle", f"busy: {busy_name}"):
            load = None if state == "idle" else keep_busy(rounds * 5e-6 + 0.05)
            microseconds = run(kernel, rounds + SETTLING, load)
            figures.append({
                "name": name, "gpu": state, "cpu": helper.language, "rounds": rounds,
                "us": percentiles(microseconds),
            })  # fmt: skip
    for free, what in (("cuMemFreeHost", host), ("cuMemFree", times), ("cuMemFree", taken)):
        gpu(free, what)


def sections(helper: Helper, quick: bool) -> dict[str, Callable[[list[dict[str, Any]]], None]]:
    """What can be measured, by name, in the order in which it is: later ones may use the floors of earlier ones."""
    nbytes, rounds = (256 * MIB, 2000) if quick else (BUFFER_BYTES, ROUNDS)
    many, some = (5000, 1000) if quick else (POST_ROUNDS, CALLBACK_ROUNDS)
    staged = 64 * MIB if quick else 256 * MIB
    return {
        "peers": lambda figures: peers(figures, nbytes=nbytes),
        "plain-copy": lambda figures: plain_copy(figures, nbytes=nbytes),
        "round-trips": lambda figures: round_trips(figures, helper, rounds=rounds),
        "raise-to-post": lambda figures: gpu_words.raise_to_post(figures, helper, rounds=many),
        "raise-to-callback": lambda figures: gpu_words.raise_to_callback(figures, helper, rounds=some),
        "raise-to-arrival": lambda figures: gpu_words.raise_to_arrival(figures, helper, rounds=rounds),
        "aborts": lambda figures: gpu_words.aborts(figures, helper),
        "staged": lambda figures: gpu_staging.bandwidth(figures, helper, nbytes=staged),
        "calls": lambda figures: gpu_staging.calls(figures, helper),
        "driver": lambda figures: gpu_staging.driver_facts(figures, helper),
    }


def main() -> None:
    """Prints each figure, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look: smaller buffers, fewer rounds, no record")
    parser.add_argument("--only", metavar="NAME,NAME", help="only these, and no record; 'help' lists them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, also where there is no record")
    parser.add_argument("--peer", nargs=3, metavar=("STORE", "DEVICE", "BYTES"), help=argparse.SUPPRESS)
    parser.add_argument("--far", nargs=3, metavar=("TRANSPORT", "BYTES", "ADDRESS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer(arguments.peer[0], int(arguments.peer[1]), int(arguments.peer[2]))
        return
    if arguments.far:
        gpu_staging.far(arguments.far[0], int(arguments.far[1]), arguments.far[2])
        return
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        all_of_them = sections(Helper(Path(folder)), arguments.quick)
        wanted = arguments.only.split(",") if arguments.only else list(all_of_them)
        if not set(wanted) <= set(all_of_them):
            parser.error(f"--only takes some of {','.join(all_of_them)}")
        try:
            record = gpu_record.header(ROOT)
            for name in wanted:
                shown_before = len(figures)
                begin = time.perf_counter()
                all_of_them[name](figures)
                for figure in figures[shown_before:]:
                    print(shown(figure), flush=True)
                print(f"({name}: {time.perf_counter() - begin:.1f} s)", flush=True)
        except te.TransportUnavailable as error:
            raise SystemExit(f"no GPU here: {error}") from None
    if arguments.json:
        arguments.json.write_text(json.dumps({**record, "figures": figures}, indent=2) + "\n")
    if not arguments.quick and not arguments.only:
        print("recorded in", gpu_record.write(ROOT, gpu_record.BENCH, {**record, "figures": figures}))


def shown(figure: dict[str, Any]) -> str:
    """One line; of facts, one for each."""
    if "facts" in figure:
        return "\n".join(f"{figure['name']}: {name}: {value}" for name, value in figure["facts"].items())
    labels = ("path", "transport", "armed", "gpu", "cpu", "core", "kind")
    where = ", ".join(f"{label} {figure[label]}" for label in labels if label in figure)
    parts = []
    for key, values in figure.items():
        if isinstance(values, dict):
            numbers = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
            parts.append(f"{key.replace('_per_', '/')}: {numbers}")
    return f"{figure['name']} ({where}): {'; '.join(parts)}"


if __name__ == "__main__":
    main()
