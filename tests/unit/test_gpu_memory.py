"""GPU memory from Python, against the stand-in for CUDA's driver, whose addresses the CPU cannot read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .cuda_driver import Driver

SIZE = 300_001


@pytest.fixture
def engine(make_engine: Callable[..., te.Engine]) -> te.Engine:
    return make_engine()


@pytest.fixture
def pattern() -> Any:
    return np.random.default_rng(5).integers(0, 256, SIZE, np.uint8)


def test_staged_bytes_go_from_device_to_device(driver: Driver, engine: te.Engine, pattern: Any) -> None:
    source, target = driver.allocate(SIZE), driver.allocate(SIZE)
    driver.write(source, pattern)
    driver.write(target, np.full(SIZE, 0xA5, np.uint8))
    with (
        engine.register((source, SIZE, "cuda:0"), staging=True) as a,
        engine.register((target, SIZE, "cuda:0"), staging=True) as b,
        engine.counter() as counter,
    ):
        assert (a.reach, a.device) == ("staged", "cuda:0")
        remote = te.RegionDescriptor.from_bytes(bytes(b.descriptor))
        assert remote.device == "cuda:0"
        engine.write(a[5:], remote[2 : SIZE - 3], notify=counter.descriptor).wait(20)
        assert counter.wait(1, timeout_s=20) == 1
        found = driver.read(target, SIZE)
        np.testing.assert_array_equal(found[2:-3], pattern[5:])
        np.testing.assert_array_equal(found[[0, 1, -1, -2, -3]], [0xA5] * 5)


def test_staging_is_without_effect_for_host_memory(driver: Driver, engine: te.Engine) -> None:
    with engine.register(np.zeros(100, np.uint8), staging=True) as region:
        assert region.reach == "host"


def test_objects_say_where_their_device_memory_is(driver: Driver, engine: te.Engine) -> None:
    pointer = driver.allocate(4096, device=1)

    def array(**changes: Any) -> Any:
        interface = {"data": (pointer, False), "shape": (32, 32), "typestr": "<f4", "version": 3, "strides": None}
        return SimpleNamespace(__cuda_array_interface__={**interface, **changes})

    for memory in (array(), array(strides=(128, 4)), array(strides=(4, 128))):  # no device of its own: the driver knows
        with engine.register(memory, staging=True) as region:
            assert (region.device, region.length_bytes) == ("cuda:1", 4096)
    with pytest.raises(te.RegistrationError, match="not contiguous"):
        engine.register(array(strides=(256, 4)), staging=True)
    named = array()
    named.device = "cuda:1"
    with engine.register(named, staging=True) as region:
        assert region.device == "cuda:1"


def test_refusals_name_the_reason_and_the_remedy(driver: Driver, engine: te.Engine) -> None:
    pointer = driver.allocate(4096)
    for memory, staging, reason in (
        ((pointer, 4096, "cuda:0"), False, r"sim cannot reach memory of cuda:0.*staging=True.*engine\.allocate"),
        ((pointer, 4096, "cuda:1"), True, "it is memory of cuda:0, not of cuda:1"),
        ((pointer, 1 << 20, "cuda:0"), True, "the allocation ends after"),
        ((pointer, 4096, "cuda:7"), True, "there is no device cuda:7"),
        ((1 << 20, 4096, "cuda:0"), True, "it was freed, or belongs to the host"),
    ):
        with pytest.raises((te.RegistrationError, te.ConfigError, te.ArgumentError), match=reason):
            engine.register(memory, staging=staging)


def test_memory_that_was_freed_and_reused_is_noticed(driver: Driver, engine: te.Engine) -> None:
    pointer = driver.allocate(4096)
    region = engine.register((pointer, 4096, "cuda:0"), staging=True)
    other = engine.register(np.zeros(4096, np.uint8))
    prepared = engine.prepare(te.Write(region[:], other.descriptor[:]))
    driver.free(pointer)
    assert driver.allocate(4096) == pointer  # the same address, another allocation
    for use in (lambda: engine.write(region[:], other.descriptor[:]), prepared.post):
        with pytest.raises(te.RegistrationError, match="was freed after it was registered"):
            use()
    with pytest.raises(te.RegistrationError, match="was freed"):
        _ = region.descriptor
    region.close()


def test_allocated_memory_is_seen_by_both(driver: Driver, engine: te.Engine) -> None:
    with engine.allocate(5000, device="cuda:1") as buffer:
        array = buffer.as_numpy(np.int32, (1250,))
        assert not array.any()
        array[:] = 7
        assert buffer.device == "cuda:1"
        assert buffer.device_pointer == array.ctypes.data
        assert buffer.__cuda_array_interface__["data"] == (array.ctypes.data, False)
        assert buffer.region.reach == "host"
        view = SimpleNamespace(
            __cuda_array_interface__={"data": (buffer.device_pointer + 100, False), "shape": (10,), "typestr": "|u1"}
        )
        assert buffer.region.of(view).offset_bytes == 100
        with engine.register(buffer) as again:  # as the GPU's: it is the host's all the same
            assert (again.reach, again.length_bytes) == ("host", 5000)
    assert array[0] == 7  # the last view keeps the memory
    assert driver.symbols.standin_cuda_statistic(b"host_allocations") >= 1
    with engine.allocate(10) as plain, pytest.raises(te.ArgumentError, match="no device pointer"):
        _ = plain.device_pointer
    assert not hasattr(plain, "__cuda_array_interface__")
    with pytest.raises(te.ConfigError, match="there is no device cuda:9"):
        engine.allocate(10, device="cuda:9")
    driver.configure("host_alloc_fail=1")
    with pytest.raises(te.RegistrationError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        engine.allocate(10, device="cuda:0")


def test_an_engine_serves_one_gpu_or_all(driver: Driver) -> None:
    pointers = [driver.allocate(4096, device) for device in range(2)]
    with te.Engine("sim", device="cuda:1", settings=te.Settings(core="none")) as engine:
        engine.register((pointers[1], 4096, "cuda:1"), staging=True)
        engine.register(np.zeros(10))
        with pytest.raises(te.RegistrationError, match="the memory is on cuda:0, this engine serves cuda:1") as caught:
            engine.register((pointers[0], 4096, "cuda:0"), staging=True)
        assert "device='cuda:0'" in caught.value.hint
    with pytest.raises(te.ConfigError, match="there is no device cuda:5: this process sees 2"):
        te.Engine("sim", device="cuda:5")


def test_dlpack_exports_of_a_device_are_read(driver: Driver, engine: te.Engine) -> None:
    pointer = driver.allocate(4096)
    capsules = []

    class Exported:
        """A producer as the array API describes it, of 10 x 20 float32 at an offset."""

        def __init__(self, strides: tuple[int, ...] | None) -> None:
            self.strides = strides

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, *, stream: int | None = None) -> Any:
            assert stream == -1  # nobody is to be synchronised
            from transfer_engine import _dlpack

            tensor = _dlpack._Tensor()
            tensor.data, tensor.device_type, tensor.device_id, tensor.ndim = pointer, 2, 0, 2
            tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset = 2, 32, 1, 64
            tensor.shape = (ctypes.c_int64 * 2)(10, 20)
            if self.strides:
                tensor.strides = (ctypes.c_int64 * 2)(*self.strides)
            make = ctypes.pythonapi.PyCapsule_New
            make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
            capsules.append(tensor)
            return make(ctypes.addressof(tensor), b"dltensor", None)

    for strides in (None, (20, 1), (1, 10)):
        with engine.register(Exported(strides), staging=True) as region:
            assert (region.length_bytes, region.device) == (800, "cuda:0")
            assert f"{pointer + 64:#x}" in repr(region)
    with pytest.raises(te.RegistrationError, match="not contiguous"):
        engine.register(Exported((40, 1)), staging=True)


@pytest.mark.parametrize(
    "interface",
    [
        {},
        {"data": None},
        {"data": (4096, False), "shape": (4,)},
        {"data": (4096, False), "shape": (4,), "typestr": "O"},
        {"data": (4096, False), "shape": 4, "typestr": "|u1"},
        {"data": (4096, False), "shape": (-4,), "typestr": "|u1"},
        {"data": (-4096, False), "shape": (4,), "typestr": "|u1"},
        {"data": (1 << 70, False), "shape": (4,), "typestr": "|u1"},
        {"data": (4096, False), "shape": (1 << 70,), "typestr": "|u1"},
        {"data": (None, False), "shape": (4,), "typestr": "|u1"},
    ],
    ids=str,
)
def test_malformed_device_arrays_are_refused_by_type(engine: te.Engine, interface: Any) -> None:
    memory = SimpleNamespace(__cuda_array_interface__=interface)
    region = engine.register(np.zeros(10, np.uint8))
    for use in (engine.register, region.of):
        with pytest.raises((te.ArgumentError, te.ArgumentTypeError)):
            use(memory)


@pytest.mark.parametrize("device", ["cuda:2147483648", "cuda:99999999999999999999"])
def test_numbers_that_are_no_devices_are_refused(engine: te.Engine, device: str) -> None:
    for use in (engine.allocate, lambda _, device: engine.register((4096, 4096, device))):
        with pytest.raises(te.ArgumentError, match="unknown device"):
            use(4096, device=device)
    with pytest.raises(te.ArgumentError, match="unknown device"):
        engine.flag(device)


def test_more_memory_than_there_can_be_is_refused(driver: Driver, engine: te.Engine) -> None:
    for nbytes in (1 << 63, 1 << 64, 1 << 100):
        with pytest.raises(te.RegistrationError):
            engine.allocate(nbytes, device="cuda:0")


def test_without_a_driver_the_hint_says_what_to_install(engine: te.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_LIBCUDA", "/nowhere/libcuda.so.1")
    for use in (
        lambda: engine.allocate(10, device="cuda:0"),
        lambda: engine.register((4096, 10, "cuda:0")),
        lambda: te.Engine("sim", device="cuda:0"),
    ):
        with pytest.raises(te.TransferEngineError) as caught:
            use()
        assert "NVIDIA's driver" in caught.value.hint
