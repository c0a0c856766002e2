from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.spans import parse_device, span_of

SOON_S = 20.0


@pytest.mark.parametrize(
    "memory",
    [
        bytearray(48),
        memoryview(bytearray(48)),
        memoryview(bytearray(64))[8:56],
        memoryview(bytearray(48)).cast("I", (3, 4)),
        array.array("d", [0.0] * 6),
        (ctypes.c_int * 12)(),
        np.zeros((3, 4), np.float32),
        np.zeros((4, 3), np.float32).T,
        np.zeros(6, "datetime64[s]"),
        np.zeros(3, np.dtype([("a", np.int64), ("b", np.int64)])),
        np.zeros(100, np.uint8)[20:68],
    ],
    ids=lambda memory: type(memory).__name__,
)
def test_anything_with_contiguous_memory_registers(engine: te.Engine, memory: Any) -> None:
    region = engine.register(memory)
    assert len(region) == region.length_bytes == len(region.descriptor) == 48
    assert region.device == "cpu"
    assert not region.read_only


def test_a_raw_pointer_registers(engine: te.Engine) -> None:
    owner = np.zeros(48, np.uint8)
    region = engine.register((owner.ctypes.data, 48, "cpu"))
    assert len(region) == 48
    assert region.of(owner[8:16]).offset_bytes == 8


def test_dlpack_host_memory_registers_without_a_copy(engine: te.Engine) -> None:
    owner = np.zeros(48, np.uint8)
    exporter = SimpleNamespace(__dlpack__=owner.__dlpack__, __dlpack_device__=owner.__dlpack_device__)
    assert span_of(exporter).pointer == owner.ctypes.data
    assert len(engine.register(exporter)) == 48


@pytest.mark.parametrize("empty", [bytearray(), b"", np.zeros(0, np.uint8), np.zeros((0, 5)), (0, 0, None)])
def test_zero_bytes_register(engine: te.Engine, empty: Any) -> None:
    assert len(engine.register(empty)) == 0


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros(96, np.uint8)[::2],
        np.zeros((4, 4))[:, :2],
        np.zeros(8)[::-1],
        memoryview(bytearray(96))[::2],
        np.array([object()]),
    ],
)
def test_scattered_memory_is_refused_with_a_remedy(engine: te.Engine, memory: Any) -> None:
    with pytest.raises(te.RegistrationError) as caught:
        engine.register(memory)
    assert caught.value.hint in str(caught.value)


@pytest.mark.parametrize("memory", ["text", 5, None, [1, 2, 3], object()])
def test_objects_without_memory_raise_a_type_error(engine: te.Engine, memory: Any) -> None:
    with pytest.raises(TypeError, match="memory"):
        engine.register(memory)


@pytest.mark.parametrize("memory", [(1, 2), ("a", 2, None), (1, 2.0, None), (True, 1, None)])
def test_malformed_raw_memory_raises_a_type_error(engine: te.Engine, memory: Any) -> None:
    with pytest.raises(TypeError, match="nbytes"):
        engine.register(memory)


@pytest.mark.parametrize(
    "memory", [(-1, 2, None), (4096, -1, None), (0, 1, None), (2**64 - 1, 2, None), (4096, 1, "tpu")]
)
def test_impossible_raw_memory_raises_an_argument_error(engine: te.Engine, memory: Any) -> None:
    with pytest.raises(te.ArgumentError):
        engine.register(memory)


def test_device_memory_is_refused_without_a_driver(engine: te.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_LIBCUDA", "/nowhere/libcuda.so.1")
    for staging in (False, True):
        with pytest.raises(te.RegistrationError, match="TE_LIBCUDA is set to /nowhere"):
            engine.register((4096, 4096, "cuda:0"), staging=staging)
    interface = {"data": (4096, False), "shape": (8,), "typestr": "<f4", "version": 3, "strides": None}
    with pytest.raises(te.RegistrationError, match="TE_LIBCUDA"):
        engine.register(SimpleNamespace(__cuda_array_interface__=interface))
    with pytest.raises(te.RegistrationError):
        engine.allocate(4096, device="cuda:0")


def test_devices_are_understood() -> None:
    assert parse_device(None) == parse_device("cpu") == parse_device(SimpleNamespace(type="cpu", index=None))
    assert parse_device("cuda") == parse_device("cuda:0")
    assert parse_device("cuda:3") == parse_device(SimpleNamespace(type="cuda", index=3))
    for wrong in ("cuda:x", "cuda:-1", "gpu", ""):
        with pytest.raises(te.ArgumentError):
            parse_device(wrong)
    with pytest.raises(TypeError):
        parse_device(7)


@pytest.mark.parametrize("memory", [b"constant", memoryview(b"constant"), np.frombuffer(b"constant", np.uint8)])
def test_read_only_memory_is_a_source_and_never_a_target(pair: Any, memory: Any) -> None:
    region = pair.a.register(memory)
    assert region.read_only
    with pytest.raises(te.RegistrationError, match="read-only: cannot be a target"):
        region.descriptor  # noqa: B018
    pair.a.write(region, pair.remote[8:16]).wait(SOON_S)
    pair.assert_only(8, np.frombuffer(b"constant", np.uint8))


def test_memory_stays_alive_and_in_place_while_it_is_registered(engine: te.Engine) -> None:
    class Tracked(np.ndarray[Any, Any]):
        pass

    memory = np.zeros(100, np.uint8).view(Tracked)
    alive = weakref.ref(memory)
    region = engine.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    region.close(SOON_S)
    del region
    gc.collect()
    assert alive() is None


def test_memory_stays_registered_when_the_region_object_is_dropped(pair: Any) -> None:
    target = np.zeros(8, np.uint8)
    remote = pair.b.register(target).descriptor
    gc.collect()
    pair.a.write(pair.region[:8], remote).wait(SOON_S)
    np.testing.assert_array_equal(target, pair.source[:8])


def test_a_registered_bytearray_cannot_be_moved(engine: te.Engine) -> None:
    memory = bytearray(100)
    region = engine.register(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    region.close(SOON_S)
    del region
    memory.extend(b"more")


def test_closing_the_engine_lets_go_of_memory(make_engine: Any) -> None:
    engine = make_engine()
    memory = bytearray(100)
    engine.register(memory)
    engine.close()
    gc.collect()
    memory.extend(b"more")


def test_of_finds_the_slice_that_a_view_covers(engine: te.Engine) -> None:
    memory = np.zeros((10, 10), np.int32)
    region = engine.register(memory)
    part = region.of(memory[3])
    assert (part.offset_bytes, part.length_bytes) == (120, 40)
    assert region.of(memory).length_bytes == 400
    assert region.of(memory[5:5]).length_bytes == 0


def test_of_refuses_views_of_other_memory(engine: te.Engine) -> None:
    memory = np.zeros(100, np.uint8)
    region = engine.register(memory[20:80])
    for wrong in (memory[19:30], memory[70:81], memory, np.zeros(5, np.uint8)):
        with pytest.raises(te.RangeError):
            region.of(wrong)
    with pytest.raises(te.RegistrationError):
        region.of(memory[20:80:2])


def test_a_closed_region_is_refused_on_both_sides(pair: Any) -> None:
    target = np.zeros(64, np.uint8)
    region = pair.b.register(target)
    remote = region.descriptor
    pair.a.write(pair.region[:64], remote).wait(SOON_S)
    region.close(SOON_S)
    region.close(SOON_S)
    assert region.closed
    target[:] = 1
    with pytest.raises(te.RegionClosed):
        pair.a.write(pair.region[:64], remote).wait(SOON_S)
    assert (target == 1).all()
    pair.region.close(SOON_S)
    with pytest.raises(te.RegionClosed) as caught:
        pair.a.write(pair.region[:64], pair.remote[:64])
    assert "this process closed it" in caught.value.hint


def test_a_region_closes_with_its_block(engine: te.Engine) -> None:
    with engine.register(bytearray(10)) as region:
        assert not region.closed
    assert region.closed
    with pytest.raises(te.RegionClosed):
        region.descriptor  # noqa: B018


def test_a_region_of_another_engine_is_refused(pair: Any) -> None:
    with pytest.raises(te.ArgumentError, match="another engine"):
        pair.b.write(pair.region[:8], pair.remote[:8])


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1 << 20])
def test_allocated_memory_is_zero_and_page_aligned_and_shared_with_its_array(engine: te.Engine, nbytes: int) -> None:
    with engine.allocate(nbytes) as buffer:
        view = buffer.as_numpy()
        assert len(buffer) == len(buffer.region) == view.nbytes == nbytes
        assert not view.any()
        assert nbytes == 0 or view.ctypes.data % mmap.PAGESIZE == 0
        view[:] = 7
        assert (buffer.as_numpy() == 7).all()
        assert nbytes == 0 or buffer.region.of(view).length_bytes == nbytes
    view[:] = 8  # the memory outlives its registration


def test_allocated_memory_takes_any_dtype_and_shape_that_fit(engine: te.Engine) -> None:
    buffer = engine.allocate(4096)
    assert buffer.as_numpy("float32", (32, 32)).shape == (32, 32)
    with pytest.raises(te.ArgumentError):
        buffer.as_numpy("float32", (33, 32))
    with pytest.raises(te.ArgumentError):
        engine.allocate(7).as_numpy("int64")
    for arguments in (("zzz",), ("uint8", "shape")):
        with pytest.raises(te.ArgumentTypeError, match=arguments[-1]):
            buffer.as_numpy(*arguments)


def test_a_buffer_is_sliced_as_its_region(pair: Any) -> None:
    buffer = pair.a.allocate(256)
    part = buffer[64:192]
    assert (part.region, part.offset_bytes, part.length_bytes) == (buffer.region, 64, 128)
    with pytest.raises(te.RangeError):
        buffer[0:257]
    for call in (lambda: pair.a.write(buffer, pair.remote[:256]), lambda: pair.a.write(buffer[:], buffer)):
        with pytest.raises(te.ArgumentTypeError) as caught:
            call()
        assert "buffer.region" in caught.value.hint


@pytest.mark.parametrize("wrong", [-1, 1 << 62])
def test_impossible_allocations_raise_typed_errors(engine: te.Engine, wrong: int) -> None:
    with pytest.raises(te.TransferEngineError):
        engine.allocate(wrong)


@pytest.mark.parametrize("wrong", [1.5, "8", None, True])
def test_allocation_lengths_are_integers(engine: te.Engine, wrong: Any) -> None:
    with pytest.raises(TypeError):
        engine.allocate(wrong)


def test_torch_is_not_imported_for_other_memory(engine: te.Engine) -> None:
    before = "torch" in sys.modules
    engine.register(np.zeros(8))
    engine.register(bytearray(8))
    assert ("torch" in sys.modules) == before


def test_tensors_register_by_their_own_account(engine: te.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(64, np.uint8)

    class Tensor:
        layout, is_meta, device, shape = "torch.strided", False, SimpleNamespace(type="cpu", index=None), (4, 8)
        contiguous = True
        numel, element_size = staticmethod(lambda: 32), staticmethod(lambda: 2)
        data_ptr = staticmethod(lambda: memory.ctypes.data)

        def is_contiguous(self) -> bool:
            return self.contiguous

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    tensor = Tensor()
    region = engine.register(tensor)
    assert (len(region), region.of(memory[16:32]).offset_bytes) == (64, 16)
    tensor.device = SimpleNamespace(type="cuda", index=1)
    monkeypatch.setenv("TE_LIBCUDA", "/nowhere/libcuda.so.1")
    with pytest.raises(te.RegistrationError, match="TE_LIBCUDA"):
        engine.register(tensor)
    tensor.contiguous = False
    with pytest.raises(te.RegistrationError, match="not contiguous"):
        engine.register(tensor)


def test_torch_tensors_register(engine: te.Engine) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    region = engine.register(tensor)
    assert len(region) == 64
    assert region.of(tensor[1]).offset_bytes == 16
    with pytest.raises(te.RegistrationError, match="contiguous"):
        engine.register(tensor.t())
    with pytest.raises(te.RegistrationError):
        engine.register(torch.zeros(2, device="meta"))
    assert engine.allocate(64).as_torch(torch.bfloat16, (4, 8)).shape == (4, 8)


def test_memory_in_a_cycle_is_collected_without_harm() -> None:
    script = """
import gc
import transfer_engine as te

class Holder: ...

for kind in (lambda: memoryview(bytearray(4096)), lambda: bytearray(4096)):
    for _ in range(10):
        engine = te.Engine("sim")
        holder = Holder()
        holder.me, holder.part, holder.engine = holder, engine.register(kind()), engine
        holder.buffer = engine.allocate(4096)
        engine.close()
        del holder, engine
        gc.collect()
print("survived")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "survived\n", "")
