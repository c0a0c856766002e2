"""Device memory in transfers: registered, staged, allocated for both sides; between processes and in one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from ..nvlink.players import World, worlds
from .support import Gpu, until

pytestmark = pytest.mark.gpu
Worlds = Callable[[int], World]
SIZE = (5 << 20) + 3
UNALIGNED = 4097


@pytest.fixture
def sides(_usable: None) -> Iterator[Worlds]:
    with worlds(Path(__file__).with_name("engine_peer.py")) as start:
        yield start


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    try:
        te.probe(request.param)
    except te.TransportUnavailable as why:
        pytest.skip(f"{request.param}: {why.message}")
    return str(request.param)


@pytest.fixture
def engine(gpu: Gpu) -> Iterator[te.Engine]:
    with te.Engine("tcp", nics="lo", device=f"cuda:{gpu.index}") as engine:
        yield engine


def second_device(gpu: Gpu) -> int:
    count = int(gpu.call("cuDeviceGetCount"))
    if count < 2:
        pytest.skip(f"2 GPUs needed, {count} here")
    return 1


# --- between processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [False, True], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize(("kind", "other"), [("stage", "stage"), ("stage", "allocate"), ("allocate", "stage")])
def test_bytes_of_one_processes_device_reach_anothers(
    gpu: Gpu, sides: Worlds, transport: str, kind: str, other: str, second: bool
) -> None:
    world = sides(2)
    devices = [0, second_device(gpu) if second else 0]
    nics = "lo" if transport == "tcp" else None
    notify = [world[rank].open_on(transport, devices[rank], nics) for rank in range(2)]
    mine = getattr(world[0], kind)("memory", SIZE)
    theirs = getattr(world[1], other)("memory", SIZE)
    world[0].fill("memory", 7)
    world[0].write("memory", theirs, notify[1], 0, SIZE, 0)
    assert world[1].wait(1) == 1
    assert world[1].wrong_words("memory", 7) == 0
    world[1].fill("memory", 8)
    world[1].write("memory", mine, notify[0], 0, SIZE, 0)
    assert world[0].wait(1) == 1
    assert world[0].wrong_words("memory", 8) == 0
    # A part, from and to odd places: nothing beside it changes.
    world[0].fill("memory", 9)
    before, after = world[1].byte("memory", UNALIGNED - 1), world[1].byte("memory", 2 * UNALIGNED)
    world[0].write("memory", theirs, notify[1], 11, 11 + UNALIGNED, UNALIGNED)
    assert world[1].wait(2) == 2
    assert [world[1].byte("memory", UNALIGNED - 1), world[1].byte("memory", 2 * UNALIGNED)] == [before, after]
    for offset in (0, 1, UNALIGNED - 1):
        assert world[1].byte("memory", UNALIGNED + offset) == world[0].byte("memory", 11 + offset)
    world.all("close")


def test_a_peer_that_is_killed_half_way_fails_its_own_writes_only(gpu: Gpu, sides: Worlds, transport: str) -> None:
    world = sides(3)
    nics = "lo" if transport == "tcp" else None
    notify = [world[rank].open_on(transport, 0, nics, 1.0) for rank in range(3)]
    size = 256 << 20
    target = world[0].stage("memory", size)
    world[1].stage("memory", size)
    world[2].stage("memory", SIZE)
    world[2].fill("memory", 3)
    world[1].write_ahead("memory", target, notify[0], size)
    world[1].kill()
    small = world[0].stage("small", SIZE)
    world[2].write("memory", small, notify[0], 0, SIZE, 0)
    assert world[0].wait(1) >= 1
    assert world[0].wrong_words("small", 3) == 0


# --- one process ------------------------------------------------------------------------------------------------------


def echo(engine: te.Engine, source: te.RegionSlice, target: te.RegionSlice) -> None:
    """Writes from one region of this engine to another, and waits until it has counted."""
    with engine.counter() as counter:
        remote = target.region.descriptor[target.offset_bytes : target.offset_bytes + target.length_bytes]
        engine.write(source, remote, notify=counter.descriptor, timeout_s=30).wait()
        counter.wait(1, timeout_s=30)


def test_tensors_are_staged_with_sub_ranges_and_any_dtype(engine: te.Engine, torch: Any) -> None:
    source = torch.randn(1000, 333, device="cuda", dtype=torch.float16)
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    with engine.register(source, staging=True) as from_region, engine.register(target, staging=True) as to_region:
        assert from_region.device == f"cuda:{source.device.index}"
        echo(engine, from_region.of(source[100:200]), to_region.of(target[500:600]))
        assert torch.equal(target[500:600], source[100:200])
        assert not target[:500].any()
        assert not target[600:].any()
        echo(engine, from_region[:], to_region[:])
        assert torch.equal(target, source)


def test_a_tensor_that_the_transport_does_not_reach_is_refused_with_the_remedy(engine: te.Engine, torch: Any) -> None:
    with pytest.raises(te.RegistrationError, match=r"staging=True.*engine.allocate"):
        engine.register(torch.zeros(100, device="cuda"))


def test_arrays_of_other_libraries_are_taken_by_their_interfaces(engine: te.Engine, gpu: Gpu, torch: Any) -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(10_000, dtype=cupy.int32)
    cupy.cuda.Device().synchronize()

    class ThroughDlpack:
        def __dlpack__(self, **arguments: Any) -> Any:
            return array.__dlpack__(**arguments)

        def __dlpack_device__(self) -> tuple[int, int]:
            return array.__dlpack_device__()

    target = torch.zeros(10_000, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for memory in (array, ThroughDlpack()):
        target.zero_()
        torch.cuda.synchronize()
        with engine.register(memory, staging=True) as source, engine.register(target, staging=True) as to:
            assert source.length_bytes == 40_000
            echo(engine, source[:], to[:])
        assert target.tolist() == list(range(10_000))
    with pytest.raises(te.RegistrationError, match="not contiguous"):
        engine.register(array[::2], staging=True)


@pytest.mark.parametrize("what", ["strided", "managed", "freed", "beyond", "host"])
def test_memory_that_is_no_plain_device_memory_is_refused_by_name(
    engine: te.Engine, gpu: Gpu, torch: Any, what: str
) -> None:
    device = f"cuda:{gpu.index}"
    if what == "strided":
        with pytest.raises(te.RegistrationError, match="not contiguous"):
            engine.register(torch.zeros(10, 10, device="cuda").t()[:5], staging=True)
        return
    memory = gpu.device_bytes(1 << 20)
    pointer, expected = memory.pointer, ""
    if what == "managed":
        attach = int(gpu.driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        pointer, expected = int(gpu.call("cuMemAllocManaged", 4096, attach)), "managed memory"
        length = 4096
    elif what == "freed":
        pointer, expected = int(gpu.call("cuMemAlloc", 64 << 20)), "it was freed, or belongs to the host"
        gpu.call("cuMemFree", pointer)
        length = 4096
    elif what == "beyond":
        length, expected = 1 << 40, "the allocation ends after|the address space|freed"
    else:
        array = np.zeros(4096, np.uint8)
        pointer, length, expected = array.ctypes.data, 4096, "belongs to the host"
    try:
        for staging in (True, False):
            with pytest.raises(te.RegistrationError, match=expected):
                engine.register((pointer, length, device), staging=staging)
    finally:
        if what == "managed":
            gpu.call("cuMemFree", pointer)


def test_memory_that_is_freed_and_reused_is_noticed(engine: te.Engine, gpu: Gpu) -> None:
    size = 64 << 20
    pointer = int(gpu.call("cuMemAlloc", size))
    region = engine.register((pointer, size, f"cuda:{gpu.index}"), staging=True)
    other = engine.allocate(size)
    gpu.call("cuMemFree", pointer)
    again = int(gpu.call("cuMemAlloc", size))  # most likely in the same place
    try:
        with pytest.raises(te.RegistrationError, match="was freed after it was registered"):
            engine.write(region[0:100], other.region.descriptor[0:100])
    finally:
        gpu.call("cuMemFree", again)


def test_memory_of_another_gpu_than_the_engines_is_refused(engine: te.Engine, gpu: Gpu) -> None:
    with pytest.raises(te.RegistrationError, match="this engine serves cuda:0"):
        engine.register((gpu.device_bytes(4096).pointer, 4096, "cuda:1"), staging=True)
    with pytest.raises(te.ConfigError, match="there is no device cuda:99"):
        te.Engine("tcp", nics="lo", device="cuda:99")


def test_allocated_memory_is_the_gpus_and_the_hosts_at_once(engine: te.Engine, torch: Any) -> None:
    with engine.allocate(1 << 20, device="cuda:0") as source, engine.allocate(1 << 20, device="cuda:0") as target:
        assert source.region.reach == "host"
        assert source.device == "cuda:0"
        tensor = source.as_torch(torch.int32, (512, 512))
        assert tensor.is_cuda
        assert tensor.data_ptr() == source.device_pointer
        tensor.copy_(torch.arange(512 * 512, device="cuda", dtype=torch.int32).reshape(512, 512))
        torch.cuda.synchronize()
        np.testing.assert_array_equal(source.as_numpy(np.int32), np.arange(512 * 512, dtype=np.int32))
        echo(engine, source.region.of(tensor), target.region[:])
        assert torch.equal(target.as_torch(torch.int32), tensor.reshape(-1))
        assert target.region.of(target.as_torch()[100:200]).offset_bytes == 100


EXPANDABLE = """
import torch, transfer_engine as te
with te.Engine("tcp", nics="lo") as engine:
    small = torch.zeros(1000, device="cuda")
    source = torch.randint(0, 255, (150 << 20,), device="cuda", dtype=torch.uint8)  # over many segments
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    counter = engine.counter()
    with engine.register(source, staging=True) as a, engine.register(target, staging=True) as b:
        engine.write(a[3:], b.descriptor[3:], notify=counter.descriptor, timeout_s=60).wait()
        counter.wait(1)
    assert torch.equal(source[3:], target[3:]) and not target[:3].any()
print("right")
"""


def test_expandable_segments_of_torch_are_taken(torch: Any) -> None:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    result = subprocess.run(
        [sys.executable, "-c", EXPANDABLE], env=environment, capture_output=True, text=True, timeout=150
    )
    assert result.stdout.strip() == "right", result.stderr


def test_a_receiving_kernel_that_waits_on_the_counter_sees_staged_bytes(engine: te.Engine, torch: Any) -> None:
    """Many small staged writes: each is verified by the device right after it was counted."""
    source = torch.empty(4096, dtype=torch.int64, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    with (
        engine.register(source, staging=True) as a,
        engine.register(target, staging=True) as b,
        engine.counter() as counter,
    ):
        for round_ in range(1, 201):
            source.fill_(round_)
            torch.cuda.synchronize()
            transfer = engine.write(a[:], b.descriptor[:], notify=counter.descriptor, timeout_s=30)
            counter.wait(round_, timeout_s=30)
            assert bool((target == round_).all()), round_
            transfer.wait()
    until(lambda: engine.stats()["engine"]["operations_in_use"] == 0)


def test_staging_and_the_capture_of_a_graph_leave_each_other_alone(engine: te.Engine, torch: Any) -> None:
    """In the default mode a capture forbids all threads the calls that staging needs, unless they opt out."""
    source = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    other = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with (
        engine.register(source, staging=True) as a,
        engine.register(target, staging=True) as b,
        engine.counter() as counter,
    ):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for round_ in range(1, 21):
                other += 1
                engine.write(a[:], b.descriptor[:], notify=counter.descriptor, timeout_s=30).wait()
                counter.wait(round_, timeout_s=30)
        assert torch.equal(target, source)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((other == 20).all())
