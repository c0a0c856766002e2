"""Flags and watchers of devices from Python, against the stand-ins for CUDA's driver and GDRCopy's library."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .conftest import SOON_S, Pair
from .cuda_driver import Driver

PERMISSION = "open=13"


class Gdr:
    """The stand-in for GDRCopy's library."""

    loads = 0

    def __init__(self, path: str) -> None:
        self.symbols = library = ctypes.CDLL(path)
        library.standin_gdrapi_statistic.restype = ctypes.c_uint64

    def configure(self, options: str) -> None:
        assert self.symbols.standin_gdrapi_configure(options.encode()) == 0

    def statistic(self, name: str) -> int:
        return int(self.symbols.standin_gdrapi_statistic(name.encode()))


@pytest.fixture
def gdr(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gdr]:
    path = os.environ.get("TE_TEST_STANDIN_GDRAPI")
    if path is None:
        pytest.skip("TE_TEST_STANDIN_GDRAPI does not name the stand-in (make test-python does)")
    monkeypatch.delenv("TE_GDR", raising=False)
    # A name of its own for each test: under one that has been loaded, the library is not looked at again.
    folder, name = os.path.split(path)
    Gdr.loads += 1
    monkeypatch.setenv("TE_LIBGDRAPI", f"{folder}/{'./' * Gdr.loads}{name}")
    gdr = Gdr(path)
    gdr.configure("")
    violations = gdr.statistic("violations")
    yield gdr
    gdr.configure("")
    assert gdr.statistic("violations") == violations


def word(driver: Driver, pointer: int) -> int:
    """What the device reads there, in its own memory."""
    return int(driver.read(pointer, 8).view(np.uint64)[0])


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0)
    return condition()


def comes(driver: Driver, pointer: int, value: int) -> bool:
    return eventually(lambda: word(driver, pointer) == value)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_epochs_lie_in_gpu_memory_and_the_device_sees_them(
    driver: Driver, gdr: Gdr, make_engine: Callable[..., te.Engine], device: str
) -> None:
    pair = Pair(make_engine(), make_engine())
    with pair.b.flag(device) as flag, pair.b.flag(device) as other:
        assert flag.kind == other.kind == "gdr"
        assert flag.device_pointer % 64 == flag.control_pointer % 64 == 0
        assert len({flag.device_pointer, other.device_pointer, flag.control_pointer, other.control_pointer}) == 4
        assert word(driver, flag.device_pointer) == 0
        flag.raise_(7)
        assert comes(driver, flag.device_pointer, 7)
        pair.counter.bind(flag)
        for round_ in range(1, 11):
            pair.a.write(pair.region[:64], pair.remote[:64], notify=pair.notify).wait(SOON_S)
            assert pair.counter.wait(round_, timeout_s=SOON_S) == round_
            assert comes(driver, flag.device_pointer, 7 + round_)
        assert flag.value == 17
        assert word(driver, other.device_pointer) == 0
    with pair.b.flag() as host:
        assert (host.kind, host.device_pointer, host.control_pointer) == ("host", 0, 0)


@pytest.mark.parametrize(
    ("setting", "options", "kind"),
    [("auto", "", "gdr"), ("auto", PERMISSION, "mapped"), ("off", "", "mapped"), ("require", "", "gdr")],
)
def test_the_variable_says_whether_gdrcopy_is_used(
    gdr: Gdr, monkeypatch: pytest.MonkeyPatch, setting: str, options: str, kind: str
) -> None:
    gdr.configure(options)
    monkeypatch.setenv("TE_GDR", setting)
    before = gdr.statistic("pins")
    with te.Engine("sim", settings=te.Settings(core="none")) as engine:
        assert engine.flag("cuda:0").kind == kind
        assert engine.watcher("cuda:0").kind in ("mapped", kind)  # by what was measured
    assert (gdr.statistic("pins") > before) == (kind == "gdr")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PERMISSION, "permission denied for /dev/gdrdrv.*chmod 0666"),
        ("open=2", "/dev/gdrdrv is missing.*modprobe gdrdrv"),
        ("version=1.0", r"is GDRCopy 1\.0; 2\.0 or newer is needed"),
        ("pin=12", "gdr_pin_buffer .* on cuda:1: Cannot allocate memory"),
        ("map=12", "gdr_map on cuda:1: Cannot allocate memory"),
    ],
)
def test_what_is_required_and_lacks_is_refused_with_the_reason(
    gdr: Gdr, make_engine: Callable[..., te.Engine], options: str, reason: str
) -> None:
    engine = make_engine(gdr="require")
    gdr.configure(options)
    for make in (engine.flag, engine.watcher):
        with pytest.raises(te.TransportUnavailable, match=f'setting gdr is "require": .*{reason}') as caught:
            make("cuda:1")
        assert "transfer-engine doctor" in caught.value.hint
    gdr.configure("")
    assert engine.flag("cuda:1").kind == "gdr"


def test_memory_that_is_used_up_is_told_as_such(driver: Driver, gdr: Gdr, engine: te.Engine) -> None:
    driver.configure("host_alloc_fail=1")
    for make in (engine.flag, engine.watcher):
        with pytest.raises(te.ResourceExhausted, match="cuMemHostAlloc on cuda:0: CUDA_ERROR_OUT_OF_MEMORY"):
            make("cuda:0")
    driver.configure("")
    assert engine.flag("cuda:0").kind == "gdr"


def test_refusals_name_a_missing_library_and_a_missing_device(
    gdr: Gdr, make_engine: Callable[..., te.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_LIBGDRAPI", "/nowhere/libgdrapi.so.2")
    with pytest.raises(te.TransportUnavailable, match=r"TE_LIBGDRAPI is set to /nowhere/libgdrapi\.so\.2"):
        make_engine(gdr="require").flag("cuda:0")
    engine = make_engine()
    assert engine.flag("cuda:0").kind == "mapped"
    for make in (engine.flag, engine.watcher):
        with pytest.raises(te.ConfigError, match="there is no device cuda:9: this process sees 2"):
            make("cuda:9")
    assert engine.flag().kind == "host"


def test_a_device_that_raises_a_watcher_posts_what_is_prepared(gdr: Gdr, make_engine: Callable[..., te.Engine]) -> None:
    pair = Pair(make_engine(gdr="off"), make_engine())
    with pair.a.watcher("cuda:1") as watcher, pair.a.flag("cuda:1") as completed:
        assert watcher.kind == completed.kind == "mapped"
        raised = ctypes.c_uint64.from_address(watcher.device_pointer)  # the stand-in has mapped memory at one address
        prepared = pair.a.prepare(te.Write(pair.region[:100], pair.remote[:100], notify=pair.notify))
        trigger = watcher.trigger(prepared, completed=completed)
        for round_ in range(1, 6):
            raised.value = round_
            assert pair.counter.wait(round_, timeout_s=SOON_S) == round_
            trigger.wait(round_, SOON_S)
        watcher.add(n=5)
        assert pair.counter.wait(10, timeout_s=SOON_S) == 10
        trigger.wait(10, SOON_S)
        assert eventually(lambda: completed.value == 10)
        assert ctypes.c_uint64.from_address(completed.device_pointer).value == 10
    pair.assert_only(0, pair.source[:100])


def test_closing_aborts_and_the_memory_goes_with_the_engine(driver: Driver, gdr: Gdr) -> None:
    def held() -> tuple[Any, ...]:
        driver.symbols.standin_cuda_statistic.restype = ctypes.c_uint64
        counted = (driver.symbols.standin_cuda_statistic(name) for name in (b"allocations", b"host_allocations"))
        return (*counted, gdr.statistic("pinned"), gdr.statistic("opened"))

    before = held()
    engine = te.Engine("sim", settings=te.Settings(core="none", gdr="require"))
    flag, watcher = engine.flag("cuda:0"), engine.watcher("cuda:0")
    control = ctypes.c_uint64.from_address(flag.control_pointer)
    there = held()
    assert there != before
    assert control.value == 0
    flag.close()
    watcher.close()
    assert control.value == 3  # TE_ABORT_CLOSED, which a kernel that polls would see
    assert held() == there
    engine.close()
    with pytest.raises(te.TransferEngineError):
        engine.flag("cuda:0")
    del engine, flag, watcher
    assert held() == before
