"""Staged transfers between two processes, the price of a check at each write, and what the driver says of memory."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_support import MIB, Gpu, Helper, percentiles

import transfer_engine as te
from transfer_engine import _cuda

DEVICE = "cuda:0"
KINDS = {"staged": "staged, device to device", "mapped": "engine.allocate(device), both sides"}
REPETITIONS = 5
CALLS = 3000


def opened(transport: str) -> te.Engine:
    """An engine with all defaults."""
    return te.Engine(transport, nics="lo" if transport == "tcp" else None)


def regions(gpu: Gpu, engine: te.Engine, nbytes: int) -> dict[str, te.Region]:
    """One of each kind."""
    pointer = int(gpu("cuMemAlloc", nbytes))
    gpu("cuMemsetD8", pointer, 0x5A, nbytes)
    gpu("cuCtxSynchronize")
    return {
        "staged": engine.register((pointer, nbytes, DEVICE), staging=True),
        "mapped": engine.allocate(nbytes, device=DEVICE).region,
    }


def far(transport: str, nbytes: int, address: str) -> None:
    """The other process: memory to write into, and a message for each write that has arrived."""
    gpu = Gpu(0)
    with opened(transport) as engine:
        memory, counter = regions(gpu, engine, nbytes), engine.counter()
        names = {kind: bytes(region.descriptor).hex() for kind, region in memory.items()}

        def tell() -> None:
            count = 0
            with contextlib.suppress(te.TransferEngineError):
                while True:
                    count = counter.wait(count + 1, timeout_s=60)
                    engine.send(bytes.fromhex(address), b"arrived").wait()

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        print(json.dumps({"counter": bytes(counter.descriptor).hex(), **names}), flush=True)
        sys.stdin.read()  # until the other one has done
    thread.join(10)


def bandwidth(figures: list[dict[str, Any]], helper: Helper, *, nbytes: int) -> None:
    """GB/s from the call to the peer's word that it arrived."""
    gpu = Gpu(0)
    for transport in ("tcp", "shm"):
        try:
            te.probe(transport)
        except te.TransportUnavailable:
            continue
        with opened(transport) as engine:
            memory = regions(gpu, engine, nbytes)
            command = [sys.executable, str(Path(__file__).with_name("gpu.py")), "--far", transport, str(nbytes)]
            child = subprocess.Popen(
                [*command, bytes(engine.address).hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            try:
                assert child.stdin is not None
                assert child.stdout is not None
                remote = {name: bytes.fromhex(value) for name, value in json.loads(child.stdout.readline()).items()}
                counter = te.CounterDescriptor.from_bytes(remote["counter"])
                for kind, name in KINDS.items():
                    target = te.RegionDescriptor.from_bytes(remote[kind])
                    seconds = []
                    for _ in range(1 + REPETITIONS):
                        begin = time.perf_counter()
                        transfer = engine.write(memory[kind], target, notify=counter, timeout_s=60)
                        engine.receive(60)
                        seconds.append(time.perf_counter() - begin)
                        transfer.wait(60)
                    rates = sorted(nbytes / value / 1e9 for value in seconds[1:])
                    figures.append({
                        "name": f"write of {nbytes // MIB} MiB, {name}", "path": f"{transport}, two processes",
                        "bytes": nbytes,
                        "GB_per_s": {"median": statistics.median(rates), "least": rates[0], "most": rates[-1]},
                    })  # fmt: skip
                child.stdin.close()
                child.wait(60)
            finally:
                child.kill()
                child.wait()


def calls(figures: list[dict[str, Any]], helper: Helper) -> None:
    """The time that engine.write takes to return, by the kind of source: of device memory it asks the driver first."""
    gpu = Gpu(0)
    with te.Engine("sim", settings=te.Settings(polling="busy", core="none")) as engine:
        target = engine.allocate(4096).region.descriptor[0:64]
        sources = {"host": engine.register(np.zeros(4096, np.uint8)), **regions(gpu, engine, 1 << 20)}
        for kind, region in sources.items():
            source, times = region[0:64], []
            for _ in range(CALLS):
                begin = time.perf_counter_ns()
                transfer = engine.write(source, target)
                times.append((time.perf_counter_ns() - begin) / 1e3)
                transfer.wait()
            figures.append({
                "name": "engine.write() to its return, 64 bytes", "path": f"source: {kind}", "calls": CALLS,
                "us": percentiles(times[100:]),
            })  # fmt: skip


# --- the driver -------------------------------------------------------------------------------------------------------


def driver_facts(figures: list[dict[str, Any]], helper: Helper) -> None:
    """Answers of this driver about plain memory and about physical pieces that are mapped side by side."""
    gpu = Gpu(0)
    facts: dict[str, Any] = {}
    plain = int(gpu("cuMemAlloc", 4 * MIB))
    with contextlib.ExitStack() as undo:
        undo.callback(gpu, "cuMemFree", plain)
        pointer, piece = side_by_side(gpu, undo)
        ranges = {
            "plain memory": (plain, 4 * MIB),
            "one mapped piece": (pointer, piece),
            "two mapped pieces": (pointer, 2 * piece),
            "across the border of two": (pointer + piece // 2, piece),
        }
        for name, (start, length) in ranges.items():
            facts[f"dma-buf of {name}"] = dma_buf(gpu, start, length)
            facts[f"buffer id of {name}"] = attribute(gpu, "BUFFER_ID", start)
        facts["buffer id of the second piece"] = attribute(gpu, "BUFFER_ID", pointer + piece)
        facts["range of two mapped pieces, bytes"] = answer(gpu, lambda: int(gpu("cuMemGetAddressRange", pointer)[1]))
        facts["piece, bytes"] = piece
        for name in ("MEMORY_TYPE", "IS_MANAGED", "RANGE_SIZE", "MAPPED", "IS_GPU_DIRECT_RDMA_CAPABLE"):
            facts[f"{name} of a mapped piece"] = attribute(gpu, name, pointer)
        which = gpu.driver.CUpointer_attribute
        names = [int(getattr(which, f"CU_POINTER_ATTRIBUTE_{name}")) for name in ("MEMORY_TYPE", "BUFFER_ID")]
        costs = {"plain memory": plain, "a mapped piece": pointer}
        for name, start in costs.items():
            facts[f"cuPointerGetAttributes of 2, {name}, us"] = helper.attributes_us(start, names)
    figures.append({"name": "driver", "facts": facts})


def side_by_side(gpu: Gpu, undo: contextlib.ExitStack) -> tuple[int, int]:
    """Two physical pieces under adjacent addresses, as allocators with growing segments map them: start, length."""
    driver = gpu.driver
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = gpu.index
    properties.allocFlags.gpuDirectRDMACapable = _cuda.attribute(
        driver, gpu.index, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", "bench"
    )
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    piece = int(gpu("cuMemGetAllocationGranularity", properties, least))
    start = int(gpu("cuMemAddressReserve", 2 * piece, 0, 0, 0))
    undo.callback(gpu, "cuMemAddressFree", start, 2 * piece)
    for place in range(2):
        handle = gpu("cuMemCreate", piece, properties, 0)
        undo.callback(gpu, "cuMemRelease", handle)
        gpu("cuMemMap", start + place * piece, piece, 0, handle, 0)
        undo.callback(gpu, "cuMemUnmap", start + place * piece, piece)
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = gpu.index
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    gpu("cuMemSetAccess", start, 2 * piece, [access], 1)
    return start, piece


def answer(gpu: Gpu, ask: Callable[[], Any]) -> Any:
    """What it gives, or why not."""
    try:
        return ask()
    except (_cuda.CudaError, TypeError, ValueError, AttributeError) as why:
        return f"refused: {getattr(why, 'message', why)}"


def attribute(gpu: Gpu, name: str, pointer: int) -> Any:
    """An attribute of a pointer, as an integer where it is one."""

    def ask() -> Any:
        which = getattr(gpu.driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        value = gpu("cuPointerGetAttribute", which, pointer)
        return int(value) if hasattr(value, "__int__") else str(value)

    return answer(gpu, ask)


def dma_buf(gpu: Gpu, pointer: int, nbytes: int) -> Any:
    """Whether the range can be exported."""

    def ask() -> str:
        kind = gpu.driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        descriptor = int(gpu("cuMemGetHandleForAddressRange", pointer, nbytes, kind, 0))
        size = os.lseek(descriptor, 0, os.SEEK_END)
        os.close(descriptor)
        return f"works, {size} bytes for {nbytes}"

    return answer(gpu, ask)
