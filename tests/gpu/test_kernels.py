"""Kernels on the device: they compile, are cached, launch into any stream, and do what they say to every byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine import _cuda
from transfer_engine.kernels import launch, loading, patterns

from .support import Gpu, sync

pytestmark = pytest.mark.gpu
GRID, BLOCK = 64, 256


def gpu_attribute(device: int, part: str) -> int:
    return _cuda.attribute(_cuda.driver("test"), device, f"COMPUTE_CAPABILITY_{part}", "test")


GUARD = 64
SIZES = [1, 7, 8, 15, 16, 17, 4095, 4096, 65537, (1 << 20) + 3]


@pytest.mark.parametrize("name", ["copy", "pingpong", "spin_check", "waits"])
def test_every_module_loads_and_is_loaded_once(device: int, name: str) -> None:
    module = te.kernels.load(name, device)
    assert list(module) == loading._KERNEL.findall((te.kernels.include_dir() / f"{name}.cu").read_text())
    assert te.kernels.load(name, f"cuda:{device}") is module


def test_a_second_process_would_find_it_in_the_cache(
    device: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_KERNEL_CACHE", str(tmp_path))
    source = (te.kernels.include_dir() / "waits.cu").read_text()
    capability = [gpu_attribute(device, part) for part in ("MAJOR", "MINOR")]
    architecture = "sm_{}{}".format(*capability)
    first = loading.cubin("waits", source, architecture)

    def compiled(*_: Any) -> bytes:
        raise AssertionError("compiled although it is in the cache")

    monkeypatch.setattr(loading, "_compiled", compiled)
    assert loading.cubin("waits", source, architecture) == first
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(loading, "_modules", {})
    assert te.kernels.load("waits", device)["te_raise"].device == device


def test_a_kernel_of_the_users_may_include_the_header(gpu: Gpu, stream: int) -> None:
    source = """
        #include "transfer_engine.cuh"
        extern "C" __global__ void mine(unsigned long long* word, unsigned by, double half) {
          te::raise(word, by + static_cast<unsigned long long>(2 * half));
        }
    """
    word = gpu.host_words(1)
    launch(te.kernels.compile(source, gpu.index)["mine"], stream, 1, 1, word.pointer(), np.uint32(40), 1.0)
    gpu.wait(stream)
    assert word[0] == 42


def test_a_source_that_does_not_compile_raises_the_log(device: int) -> None:
    with pytest.raises(te.ConfigError, match="nonsense"):
        te.kernels.compile('extern "C" __global__ void k() { nonsense(); }', device)
    with pytest.raises(te.ConfigError, match="no kernel"):
        te.kernels.compile("__device__ int x;", device)


def test_a_launch_that_cannot_be_is_refused(gpu: Gpu, stream: int) -> None:
    kernel = te.kernels.load("waits", gpu.index)["te_raise"]
    with pytest.raises(te.ConfigError, match="te_raise"):
        launch(kernel, stream, 1, 4096, 0, 0)


@pytest.mark.parametrize("kind", ["none", "handle", "torch", "torch default", "cupy", "cuda.core"])
def test_kernels_launch_into_streams_of_all_kinds(gpu: Gpu, stream: int, kind: str) -> None:
    if kind.startswith("torch"):
        torch = pytest.importorskip("torch")
        with torch.cuda.device(gpu.index):
            where = torch.cuda.Stream() if kind == "torch" else torch.cuda.current_stream()
    elif kind == "cupy":
        cupy = pytest.importorskip("cupy")
        with cupy.cuda.Device(gpu.index):
            where = cupy.cuda.Stream(non_blocking=True)
    elif kind == "cuda.core":
        core = pytest.importorskip("cuda.core")
        device = core.Device(gpu.index)
        device.set_current()
        where = device.create_stream()
    else:
        where = {"none": None, "handle": stream}[kind]
    word = gpu.host_words(1)
    launch(te.kernels.load("waits", gpu.index)["te_raise"], where, 1, 1, word.pointer(), 3)
    sync(gpu)
    assert word[0] == 3


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_pattern_fills_what_it_should_and_nothing_else(gpu: Gpu, stream: int, nbytes: int) -> None:
    copy = te.kernels.load("copy", gpu.index)
    memory = gpu.device_bytes(nbytes + 2 * GUARD)
    launch(copy["te_fill"], stream, GRID, BLOCK, memory.pointer + GUARD, nbytes, 11, 2)
    gpu.wait(stream)
    found = memory.read()
    assert not found[:GUARD].any()
    assert not found[GUARD + nbytes :].any()
    expected = patterns.pattern(11, 2, (nbytes + 7) // 8).view(np.uint8)[:nbytes]
    np.testing.assert_array_equal(found[GUARD : GUARD + nbytes], expected)


@pytest.mark.parametrize("nbytes", SIZES)
def test_verifying_counts_exactly_the_words_that_are_wrong(gpu: Gpu, stream: int, nbytes: int) -> None:
    copy = te.kernels.load("copy", gpu.index)
    words = (nbytes + 7) // 8
    content = patterns.pattern(5, 1, words).view(np.uint8)[:nbytes].copy()
    damaged = sorted({0, words // 2, words - 1})
    for word in damaged:
        content[min(8 * word + 7, nbytes - 1)] ^= 1
    memory, wrong = gpu.device_bytes(nbytes), gpu.device_bytes(8)
    memory.write(content)
    launch(copy["te_verify"], stream, GRID, BLOCK, memory.pointer, nbytes, 5, 1, wrong.pointer)
    gpu.wait(stream)
    assert wrong.read(np.uint64)[0] == len(damaged)
    launch(copy["te_verify"], stream, GRID, BLOCK, memory.pointer, nbytes, 6, 1, wrong.pointer)
    gpu.wait(stream)
    assert wrong.read(np.uint64)[0] == len(damaged) + words


@pytest.mark.parametrize("kernel", ["te_push", "te_pull"])
@pytest.mark.parametrize("nbytes", SIZES)
def test_copies_are_whole_and_touch_nothing_else(gpu: Gpu, stream: int, kernel: str, nbytes: int) -> None:
    copy = te.kernels.load("copy", gpu.index)
    source, target = gpu.device_bytes(nbytes), gpu.device_bytes(nbytes + 2 * GUARD)
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    source.write(content)
    launch(copy[kernel], stream, GRID, BLOCK, target.pointer + GUARD, source.pointer, nbytes)
    gpu.wait(stream)
    found = target.read()
    assert not found[:GUARD].any()
    assert not found[GUARD + nbytes :].any()
    np.testing.assert_array_equal(found[GUARD : GUARD + nbytes], content)
