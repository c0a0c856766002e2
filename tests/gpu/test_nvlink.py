"""Memory of the device shared between processes: on one GPU, and on two where there are two."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.kernels import launch, patterns

from ..nvlink.players import RankFailed, World
from .support import Gpu, sync

pytestmark = pytest.mark.gpu
Worlds = Callable[[int], World]
SIZE = (3 << 20) + 5  # more than one granule, and odd


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def devices(request: pytest.FixtureRequest, gpu: Gpu) -> list[int]:
    count = int(gpu.call("cuDeviceGetCount"))
    if count < request.param:
        pytest.skip(f"{request.param} GPUs needed, {count} here")
    return [0, request.param - 1]


def mapped(ranks: World, devices: list[int], sizes: list[int]) -> None:
    plan = enumerate(zip(sizes, devices, strict=True))
    results = ranks.each({rank: ("allocate", size, device) for rank, (size, device) in plan})
    for rank, size in enumerate(sizes):
        assert not isinstance(results[rank], Exception), results[rank]
        assert results[rank][0] == size
        assert results[rank][1] == ("posix" if results[rank][2] else "fabric")
    for result in ranks.all("map"):
        assert result == sizes, result


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4097, 2 << 20, SIZE])
def test_memory_is_zeroed_and_usable_by_kernels_to_its_last_byte(gpu: Gpu, stream: int, nbytes: int) -> None:
    with te.nvlink.allocate(nbytes, gpu.index) as buffer:
        found = np.empty(nbytes, np.uint8)
        gpu.call("cuMemcpyDtoH", found.ctypes.data, buffer.pointer, nbytes)
        assert not found.any()
        launch(te.kernels.load("copy", gpu.index)["te_fill"], stream, 8, 256, buffer.pointer, nbytes, 1, 1)
        gpu.wait(stream)
        gpu.call("cuMemcpyDtoH", found.ctypes.data, buffer.pointer, nbytes)
        np.testing.assert_array_equal(found, patterns.pattern(1, 1, (nbytes + 7) // 8).view(np.uint8)[:nbytes])
        assert buffer.handle_kind == ("posix" if buffer.fabric_refusal else "fabric")


def test_torch_shares_the_memory_and_keeps_it(gpu: Gpu, torch: Any) -> None:
    buffer = te.nvlink.allocate(4096, gpu.index)
    tensor = buffer.as_torch(torch.float32, (32, 32))
    assert tensor.device == torch.device("cuda", gpu.index)
    assert tensor.data_ptr() == buffer.pointer
    tensor += 1.5
    buffer.close()
    assert buffer.closed
    assert tensor.sum().item() == 1.5 * 1024
    del tensor
    with pytest.raises(te.EngineClosed):
        buffer.as_torch()


def test_a_shape_that_does_not_fit_is_refused(gpu: Gpu, torch: Any) -> None:
    with te.nvlink.allocate(10, gpu.index) as buffer:
        with pytest.raises(te.ArgumentError):
            buffer.as_torch(torch.float32)
        with pytest.raises(te.ArgumentError):
            buffer.as_torch(torch.uint8, (3, 4))


def test_cupy_shares_the_memory(gpu: Gpu) -> None:
    cupy = pytest.importorskip("cupy")
    with te.nvlink.allocate(100, gpu.index) as buffer, cupy.cuda.Device(gpu.index):
        array = cupy.asarray(buffer)
        assert array.data.ptr == buffer.pointer
        array[:] = 9
        assert int(array.sum()) == 900
        sync(gpu)
        del array


def test_memory_comes_back(gpu: Gpu) -> None:
    sync(gpu)
    before, _ = gpu.call("cuMemGetInfo")
    for _ in range(20):
        with te.nvlink.allocate(256 << 20, gpu.index):
            pass
    after, _ = gpu.call("cuMemGetInfo")
    assert after > before - (256 << 20)


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 62) - 1])
def test_more_than_there_is_is_refused(gpu: Gpu, nbytes: int) -> None:
    with pytest.raises(te.RegistrationError, match=f"{nbytes} bytes"):
        te.nvlink.allocate(nbytes, gpu.index)


def test_a_device_that_does_not_exist_is_refused(gpu: Gpu) -> None:
    with pytest.raises(te.ArgumentError, match="cuda:99"):
        te.nvlink.allocate(1, 99)


def test_memory_of_torch_is_refused_with_the_remedy(gpu: Gpu, torch: Any) -> None:
    tensor = torch.zeros(10, device=f"cuda:{gpu.index}")
    with te.Rendezvous(None, 0, 1) as rendezvous, pytest.raises(te.RegistrationError, match=r"te\.nvlink\.allocate"):
        te.nvlink.map_peers(tensor, rendezvous)


# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_each_side_writes_and_reads_the_others_memory(world: Worlds, devices: list[int]) -> None:
    ranks = world(2)
    mapped(ranks, devices, [SIZE, 4097])
    for writer, owner in itertools.product((0, 1), (0, 1)):
        seed = 10 + 2 * writer + owner
        ranks[writer].fill(owner, seed)
        assert ranks[owner].wrong_words(owner, seed) == 0
        assert ranks[1 - owner].wrong_words(owner, seed) == 0
        assert ranks[owner].wrong_words(owner, seed + 100) > 0


@pytest.mark.multiprocess
def test_pushes_and_pulls_arrive_whole(world: Worlds, devices: list[int]) -> None:
    ranks = world(2)
    mapped(ranks, devices, [SIZE, SIZE])
    ranks[0].fill(0, 3)
    ranks[0].push(1)
    assert ranks[1].wrong_words(1, 3) == 0
    ranks[1].fill(1, 4)
    ranks[0].pull(1)
    assert ranks[0].wrong_words(0, 4) == 0


@pytest.mark.multiprocess
def test_torch_writes_a_peers_memory_without_a_copy(world: Worlds, devices: list[int], torch: Any) -> None:
    ranks = world(2)
    mapped(ranks, devices, [SIZE, SIZE])
    assert ranks[1].fill_by_torch(0, 7) == [f"cuda:{devices[1]}", [SIZE], True]
    assert ranks[0].sum_by_torch() == 7 * SIZE


@pytest.mark.multiprocess
def test_a_killed_peer_takes_no_memory_away(world: Worlds, devices: list[int]) -> None:
    ranks = world(2)
    mapped(ranks, devices, [SIZE, SIZE])
    ranks[0].fill(1, 21)
    ranks[1].kill()
    assert ranks[0].wrong_words(1, 21) == 0
    ranks[0].fill(1, 22)
    assert ranks[0].wrong_words(1, 22) == 0
    ranks[0].close_buffer()
    ranks[0].close_mapped()


@pytest.mark.multiprocess
def test_closing_in_any_order_disturbs_nobody(world: Worlds, devices: list[int]) -> None:
    ranks = world(2)
    steps = [(rank, what) for rank in (0, 1) for what in ("close_buffer", "close_mapped")]
    for order in itertools.permutations(steps):
        mapped(ranks, devices, [4097, 4097])
        ranks[0].fill(1, 5)
        mappings = {0, 1}
        for rank, what in order:
            getattr(ranks[rank], what)()
            if what == "close_mapped":
                mappings.remove(rank)
            if 0 in mappings:
                assert ranks[0].wrong_words(1, 5) == 0


@pytest.mark.multiprocess
def test_a_rank_without_memory_stops_both(world: Worlds, devices: list[int]) -> None:
    ranks = world(2)
    ranks[0].allocate(10, devices[0])
    results = ranks.all("map")
    assert isinstance(results[0], RankFailed)
    assert results[0].kind == "PeerError"
    assert isinstance(results[1], RankFailed)
    assert results[1].kind == "ArgumentTypeError"
