"""Two engines of one process on the simulated fabric, and patterns that show a wrong byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .cuda_driver import Driver

SOON_S = 20.0  # a deadline, not a duration
POISON = 0xA5


@dataclass
class Pair:
    """A sender and a receiver."""

    a: te.Engine
    b: te.Engine
    source: np.ndarray[Any, Any] = field(init=False)
    target: np.ndarray[Any, Any] = field(init=False)
    region: te.Region = field(init=False)
    remote: te.RegionDescriptor = field(init=False)
    counter: te.Counter = field(init=False)
    notify: te.CounterDescriptor = field(init=False)

    def __post_init__(self) -> None:
        self.source = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
        self.target = np.full(1 << 16, POISON, np.uint8)
        self.region = self.a.register(self.source)
        self.remote = te.RegionDescriptor.from_bytes(bytes(self.b.register(self.target).descriptor))
        self.counter = self.b.counter()
        self.notify = te.CounterDescriptor.from_bytes(bytes(self.counter.descriptor))

    def assert_only(self, start: int, expected: Any) -> None:
        """The target holds `expected` from `start` on, and poison everywhere else."""
        whole = np.full(len(self.target), POISON, np.uint8)
        whole[start : start + len(expected)] = expected
        np.testing.assert_array_equal(self.target, whole)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., te.Engine]]:
    engines: list[te.Engine] = []

    def make(nics: int = 1, **settings: Any) -> te.Engine:
        settings = {"core": "none", "connect_timeout_s": 2.0, **settings}
        engine = te.Engine(transport="sim", nics=nics, settings=te.Settings(**settings))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: Callable[..., te.Engine]) -> te.Engine:
    return make_engine()


@pytest.fixture(params=[1, 2], ids=["one_nic", "two_nics"])
def pair(request: pytest.FixtureRequest, make_engine: Callable[..., te.Engine]) -> Pair:
    return Pair(make_engine(request.param), make_engine(request.param))


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a program in an interpreter of its own."""

    def run(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    path = os.environ.get("TE_TEST_STANDIN_CUDA")
    if path is None:
        pytest.skip("TE_TEST_STANDIN_CUDA does not name the stand-in (make test-python does)")
    monkeypatch.setenv("TE_STANDIN_CUDA", "devices=2")
    monkeypatch.setenv("TE_LIBCUDA", path)
    driver = Driver(path)
    driver.configure("")
    yield driver
    for pointer in list(driver.allocated):
        driver.free(pointer)
