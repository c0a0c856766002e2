"""Tests that need a GPU: skipped, with the reason, where there is none. `--gpu-record` writes what ran."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transfer_engine.tools import gpu_record

import transfer_engine as te

from ..nvlink.players import World, worlds
from .support import Gpu

ROOT = Path(__file__).resolve().parents[2]
_counts: dict[str, int] = {"passed": 0, "failed": 0}
_skipped: list[dict[str, str]] = []
_deselected: list[str] = []  # a part of the tests leaves no record


def missing() -> str | None:
    """Why nothing here can run."""
    try:
        importlib.import_module("cuda.core")
        Gpu()
    except ImportError as cause:
        return f"cuda.core is not installed: {cause}"
    except te.TransferEngineError as cause:
        return f"no usable GPU: {cause.message}"
    return None


_reason = missing()


class _Skipped(pytest.Module):
    def collect(self) -> Any:
        pytest.skip(str(_reason), allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Where nothing can run, each file says so once."""
    if _reason is None or module_path.parent != Path(__file__).parent:
        return None
    return _Skipped.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def _usable() -> None:
    if _reason:
        pytest.skip(_reason)


@pytest.fixture
def gpu(_usable: None) -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.free()


@pytest.fixture
def device(gpu: Gpu) -> int:
    return gpu.index


@pytest.fixture
def stream(gpu: Gpu) -> Iterator[int]:
    stream = gpu.stream()
    yield stream
    gpu.call("cuStreamDestroy", stream)


@pytest.fixture
def torch(gpu: Gpu) -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return module


@pytest.fixture
def world(_usable: None) -> Iterator[Callable[[int], World]]:
    """Processes that run peer.py."""
    with worlds(Path(__file__).with_name("peer.py")) as start:
        yield start


# --- the record -------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", action="store_true", help="write docs/results/gpu-tests.json (TE_GPU_RESULTS)")


def _recording(config: pytest.Config) -> bool:
    return bool(config.getoption("--gpu-record", default=False))


class _Counts:
    """A plugin of its own: of a conftest these hooks see what lies in its folder only."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            _counts["failed"] += 1
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            _skipped.append({"test": report.nodeid, "reason": reason.removeprefix("Skipped: ")})
        elif report.when == "call":
            _counts["passed"] += 1

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        _deselected.extend(item.nodeid for item in items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _counts["failed"] += 1


def pytest_configure(config: pytest.Config) -> None:
    if _recording(config):
        config.pluginmanager.register(_Counts(), "counts of the record")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _recording(session.config):
        return
    if not _counts["passed"]:
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        return
    if _deselected:
        return
    record = {**gpu_record.header(ROOT), **_counts, "skipped": _skipped}
    session.config.stash[_written] = gpu_record.write(ROOT, gpu_record.TESTS, record)


_written = pytest.StashKey[Path]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not _recording(config):
        return
    if not _counts["passed"]:
        terminalreporter.write_line("no GPU here: nothing was tested, and no record was written", red=True)
    elif _deselected:
        terminalreporter.write_line("a part of the tests leaves no record")
    elif _written in config.stash:
        terminalreporter.write_line(f"recorded in {config.stash[_written]}")
