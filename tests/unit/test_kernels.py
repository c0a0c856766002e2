"""Kernels as far as they go without a GPU: finding, compiling and caching them, and what launch() takes."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer_engine as te
from transfer_engine.kernels import cache, launching, loading, patterns


class Compiler:
    """cuda.core and NVRTC, as far as they are used; what they compile is the source itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[tuple[str, dict[str, Any]]] = []
        self.version = (13, 0)
        core = SimpleNamespace(ProgramOptions=lambda **options: options, Program=self._program)
        nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, *self.version))
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)

    def _program(self, source: str, language: str, options: dict[str, Any]) -> Any:
        assert language == "c++"

        def compile_(target: str, logs: Any) -> Any:
            assert target == "cubin"
            if "wrong" in source:
                logs.write("line 1: wrong")
                raise RuntimeError("NVRTC_ERROR_COMPILATION")
            self.compiled.append((source, options))
            return SimpleNamespace(code=source.encode())

        return SimpleNamespace(compile=compile_)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    monkeypatch.setenv("TE_KERNEL_CACHE", str(tmp_path / "cache"))
    return Compiler(monkeypatch)


def entries(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").iterdir())


# --- the sources ------------------------------------------------------------------------------------------------------


def test_the_sources_are_installed_with_the_package_and_name_their_kernels() -> None:
    assert loading.source_names() == ["copy", "pingpong", "spin_check", "waits"]
    assert (te.kernels.include_dir() / "transfer_engine.cuh").is_file()
    found = {
        name: loading._KERNEL.findall((te.kernels.include_dir() / f"{name}.cu").read_text())
        for name in loading.source_names()
    }
    assert found["waits"] == ["te_raise", "te_wait"]
    assert found["copy"] == ["te_push", "te_pull", "te_fill", "te_verify"]


def test_the_sources_include_no_header_that_the_package_lacks() -> None:
    for path in te.kernels.include_dir().glob("*.cu*"):
        for header in re.findall(r"#include\s+[\"<](.*)[\">]", path.read_text()):
            assert (te.kernels.include_dir() / header).is_file(), f"{path.name}: {header}"


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.integers(0, 50))
def test_the_pattern_of_many_words_is_that_of_each_word(seed: int, round_: int, words: int) -> None:
    many = patterns.pattern(seed, round_, words)
    assert many.dtype == np.uint64
    assert many.tolist() == [patterns.pattern_word(seed, round_, index) for index in range(words)]


def test_the_pattern_is_what_the_device_computes() -> None:
    assert patterns.pattern_word(5, 2, 9) == 13227057494856727330  # of pattern.cuh, compiled for the host


# --- compiling and the cache ------------------------------------------------------------------------------------------


def test_a_source_is_compiled_once_and_read_from_the_cache_after_that(compiler: Compiler, tmp_path: Path) -> None:
    assert loading.cubin("a", "text", "sm_90") == b"text"
    assert loading.cubin("a", "text", "sm_90") == b"text"
    [(_, options)] = compiler.compiled
    assert options["arch"] == "sm_90"
    assert options["include_path"] == [str(te.kernels.include_dir())]
    assert len(entries(tmp_path)) == 1


def test_another_text_architecture_or_compiler_is_another_entry(compiler: Compiler, tmp_path: Path) -> None:
    loading.cubin("a", "text", "sm_90")
    loading.cubin("a", "text ", "sm_90")
    loading.cubin("a", "text", "sm_100")
    compiler.version = (13, 1)
    loading.cubin("a", "text", "sm_90")
    assert len(compiler.compiled) == len(entries(tmp_path)) == 4


@pytest.mark.parametrize("damage", [b"", b"x", b"te kernel 1\n", None], ids=["empty", "foreign", "cut", "flipped"])
def test_a_damaged_entry_is_compiled_again_and_replaced(
    compiler: Compiler, tmp_path: Path, damage: bytes | None
) -> None:
    loading.cubin("a", "text", "sm_90")
    [entry] = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    assert loading.cubin("a", "text", "sm_90") == b"text"
    assert len(compiler.compiled) == 2
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TE_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert loading.cubin("a", "text", "sm_90") == b"text"
    assert loading.cubin("a", "text", "sm_90") == b"text"
    assert len(compiler.compiled) == 2


def test_an_entry_that_could_not_be_renamed_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TE_KERNEL_CACHE", str(tmp_path))
    (tmp_path / "name").mkdir()
    cache.write("name", b"body")
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert cache.read("name") is None


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.folder({"TE_KERNEL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache.folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/transfer_engine/kernels")
    assert cache.folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/transfer_engine/kernels"

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache.folder({}) is None


def test_a_source_that_does_not_compile_raises_the_compilers_log(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(te.ConfigError, match=r"(?s)a\.cu does not compile for sm_90.*NVRTC_ERROR.*line 1: wrong"):
        loading.cubin("a", "wrong", "sm_90")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("module", ["cuda.core", "cuda.bindings.nvrtc"])
def test_a_missing_package_is_named_with_what_to_install(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(te.TransportUnavailable, match=r"pip install 'transfer_engine\[cuda\]'"):
        loading.cubin("a", "text", "sm_90")


def test_a_missing_nvrtc_library_is_named(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise RuntimeError("libnvrtc.so.13 not found\nand more")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=absent))
    with pytest.raises(te.TransportUnavailable, match=r"NVRTC.*libnvrtc.so.13 not found"):
        loading.cubin("a", "text", "sm_90")


def test_loading_without_the_bindings_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_engine._cuda._loaded", [])
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(te.TransportUnavailable, match=r"cuda.bindings.*\n.*transfer_engine\[cuda\]"):
        te.kernels.load("waits", 0)


@pytest.mark.parametrize(
    ("name", "device", "error"),
    [
        ("nothing", 0, te.ArgumentError),
        (3, 0, te.ArgumentTypeError),
        ("waits", "cpu", te.ArgumentError),
        ("waits", None, te.ArgumentTypeError),
        ("waits", -1, te.ArgumentError),
        ("waits", "cuda:x", te.ArgumentError),
    ],
)
def test_what_cannot_be_loaded_is_refused(name: Any, device: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        te.kernels.load(name, device)


# --- streams and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (0x7F0000001000, 0x7F0000001000),
        (SimpleNamespace(cuda_stream=7), 7),
        (SimpleNamespace(ptr=8), 8),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 9)), 9),
        (SimpleNamespace(__cuda_stream__=(0, 10)), 10),
    ],
    ids=["none", "zero", "int", "torch", "cupy", "protocol", "attribute"],
)
def test_streams_of_all_kinds_have_their_handle(stream: Any, handle: int) -> None:
    assert te.kernels.stream_handle(stream) == handle


@pytest.mark.parametrize("stream", ["stream", 1.5, True, object(), SimpleNamespace(__cuda_stream__=lambda: (1, 9))])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(te.ArgumentTypeError, match="is no stream"):
        te.kernels.stream_handle(stream)


def test_a_negative_handle_is_refused() -> None:
    with pytest.raises(te.ArgumentError):
        te.kernels.stream_handle(-1)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (5, (5).to_bytes(8, "little")),
        (-1, b"\xff" * 8),
        (2**64 - 1, b"\xff" * 8),
        (1.5, bytes(ctypes.c_double(1.5))),
        (True, b"\x01"),
        (ctypes.c_uint32(3), (3).to_bytes(4, "little")),
        (np.int32(-2), (-2).to_bytes(4, "little", signed=True)),
        (np.float64(1.5), bytes(ctypes.c_double(1.5))),
        (SimpleNamespace(data_ptr=lambda: 4096), (4096).to_bytes(8, "little")),
        (SimpleNamespace(__cuda_array_interface__={"data": (8192, False)}), (8192).to_bytes(8, "little")),
    ],
)
def test_arguments_have_the_bytes_that_a_kernel_takes(argument: Any, expected: bytes) -> None:
    assert bytes(launching._value(argument, 0)) == expected


def test_a_tensor_of_the_host_is_refused_unless_it_is_pinned() -> None:
    tensor = SimpleNamespace(is_cuda=False, is_pinned=lambda: False, data_ptr=lambda: 4096)
    with pytest.raises(te.ArgumentError, match="argument 2"):
        launching._value(tensor, 2)
    tensor.is_pinned = lambda: True
    assert launching._value(tensor, 2).value == 4096


@pytest.mark.parametrize(
    ("argument", "error"), [(2**64, te.ArgumentError), ("x", te.ArgumentTypeError), (None, te.ArgumentTypeError)]
)
def test_arguments_that_are_none_are_refused_by_their_place(argument: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="argument 3"):
        launching._value(argument, 3)


@pytest.mark.parametrize(("grid", "sizes"), [(4, (4, 1, 1)), ((2, 3), (2, 3, 1)), ((1, 2, 3), (1, 2, 3))])
def test_grids_have_up_to_three_dimensions(grid: Any, sizes: tuple[int, ...]) -> None:
    assert launching._dimensions(grid, "grid") == sizes


@pytest.mark.parametrize("grid", [0, -1, (1, 0), (), (1, 1, 1, 1), "1", 1 << 31, None, 1.0])
def test_impossible_grids_are_refused(grid: Any) -> None:
    with pytest.raises((te.ArgumentError, te.ArgumentTypeError), match="grid"):
        launching._dimensions(grid, "grid")


def test_launching_takes_kernels_only() -> None:
    with pytest.raises(te.ArgumentTypeError, match=r"te\.kernels\.load"):
        te.kernels.launch("te_raise", None, 1, 1)  # type: ignore[arg-type]
