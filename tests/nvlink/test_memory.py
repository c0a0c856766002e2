"""Buffers of one process: what is refused, how long memory stays, how it is shared."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.nvlink import dlpack
from transfer_engine.nvlink.memory import allocated

from .standin import GRANULARITY, MemfdDriver, get, put


@pytest.fixture
def driver() -> MemfdDriver:
    return MemfdDriver()


@pytest.mark.parametrize("nbytes", [1, 3, 4097, GRANULARITY, GRANULARITY + 1])
def test_a_buffer_has_the_length_that_was_asked_for_and_zeros(driver: MemfdDriver, nbytes: int) -> None:
    with allocated(driver, nbytes, 0) as buffer:
        assert buffer.nbytes == len(buffer) == nbytes
        assert buffer.device == "cuda:0"
        assert buffer.handle_kind == "posix"
        assert buffer.fabric_refusal == "a stand-in"
        assert get(buffer.pointer, nbytes) == bytes(nbytes)
        assert f"{nbytes} bytes" in repr(buffer)
    assert buffer.closed
    driver.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [(0, te.ArgumentError), (-1, te.ArgumentError), (1 << 63, te.ArgumentError), (1.5, te.ArgumentTypeError),
     (True, te.ArgumentTypeError), ("4", te.ArgumentTypeError), (None, te.ArgumentTypeError)],
)  # fmt: skip
def test_impossible_lengths_are_refused(nbytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="nbytes"):
        te.nvlink.allocate(nbytes, 0)


@pytest.mark.parametrize(("device", "error"), [("cpu", te.ArgumentError), (None, te.ArgumentTypeError)])
def test_what_is_no_gpu_is_refused(device: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        te.nvlink.allocate(1, device)


def test_missing_bindings_are_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_engine._cuda._loaded", [])
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    te.nvlink.driver.cuda_driver.cache_clear()  # type: ignore[attr-defined]
    with pytest.raises(te.TransportUnavailable, match=r"transfer_engine\[cuda\]"):
        te.nvlink.allocate(1, 0)


def test_a_closed_buffer_has_no_address_any_more(driver: MemfdDriver) -> None:
    buffer = allocated(driver, 5, 0)
    buffer.close()
    buffer.close()
    with pytest.raises(te.EngineClosed):
        _ = buffer.pointer
    with pytest.raises(te.EngineClosed):
        buffer.__dlpack__()
    assert "closed" in repr(buffer)


def test_a_dropped_buffer_is_freed(driver: MemfdDriver) -> None:
    allocated(driver, 5, 0)
    gc.collect()
    driver.assert_nothing_is_left()


def test_what_cannot_be_mapped_or_cleared_is_released(driver: MemfdDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.refuse_map = True
    with pytest.raises(te.ConfigError):
        allocated(driver, 5, 0)
    driver.assert_nothing_is_left()
    driver.refuse_map = False

    def fail(*_: Any) -> None:
        raise te.ConfigError("no")

    monkeypatch.setattr(driver, "zero", fail)
    with pytest.raises(te.ConfigError):
        allocated(driver, 5, 0)
    driver.assert_nothing_is_left()


def test_an_array_that_shares_the_memory_keeps_it_after_close(driver: MemfdDriver) -> None:
    buffer = allocated(driver, 4097, 0)
    put(buffer.pointer, b"\x07" * 4097)
    arrays = [np.from_dlpack(buffer), np.from_dlpack(buffer)]
    view = arrays[0][10:20]
    buffer.close()
    with pytest.raises(te.EngineClosed):
        _ = buffer.pointer
    assert arrays[1].shape == (4097,)
    assert arrays[1].dtype == np.uint8
    assert (arrays[1] == 7).all()
    del arrays
    gc.collect()
    assert (view == 7).all()
    assert driver.mapped
    del view
    gc.collect()
    driver.assert_nothing_is_left()
    assert not dlpack._alive


def test_an_array_may_outlive_the_buffers_object(driver: MemfdDriver) -> None:
    array = np.from_dlpack(allocated(driver, 3, 0))
    gc.collect()
    assert array.tolist() == [0, 0, 0]
    del array
    gc.collect()
    driver.assert_nothing_is_left()


def test_a_capsule_that_nobody_takes_lets_go(driver: MemfdDriver) -> None:
    with allocated(driver, 3, 0) as buffer:
        capsule = buffer.__dlpack__(stream=1, max_version=(1, 0))
        del capsule
    driver.assert_nothing_is_left()


def test_a_forked_child_frees_nothing(driver: MemfdDriver) -> None:
    buffer = allocated(driver, 3, 0)
    child = os.fork()
    if not child:
        buffer.close()
        os._exit(len(driver.mapped) * 10 + len(driver.handles))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    buffer.close()
    driver.assert_nothing_is_left()


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy])
def test_buffers_are_not_pickled(driver: MemfdDriver, how: Any) -> None:
    with allocated(driver, 3, 0) as buffer, pytest.raises(te.ArgumentTypeError, match="map_peers"):
        how(buffer)


@pytest.mark.parametrize("rendezvous", [None, "127.0.0.1:1", object()])
def test_map_peers_needs_a_rendezvous(driver: MemfdDriver, rendezvous: Any) -> None:
    with allocated(driver, 3, 0) as buffer, pytest.raises(te.ArgumentTypeError, match=r"te\.Rendezvous"):
        te.nvlink.map_peers(buffer, rendezvous)


@pytest.mark.parametrize(
    ("memory", "error"),
    [(np.zeros(4), te.RegistrationError), (b"bytes", te.ArgumentTypeError), (None, te.ArgumentTypeError)],
)
def test_memory_that_was_not_allocated_for_it_is_refused_with_the_remedy(memory: Any, error: type[Exception]) -> None:
    with te.Rendezvous(None, 0, 1) as rendezvous, pytest.raises(error, match="allocate"):
        te.nvlink.map_peers(memory, rendezvous)


def test_a_mapping_is_a_mapping_of_ranks(driver: MemfdDriver) -> None:
    with te.Rendezvous(None, 0, 1) as rendezvous, allocated(driver, 3, 0) as buffer:
        with te.nvlink.map_peers(buffer, rendezvous) as mapped:
            assert dict(mapped) == {0: buffer}
            assert (mapped.rank, mapped.world_size, len(mapped)) == (0, 1, 1)
            with pytest.raises(KeyError):
                mapped[1]
        assert mapped.closed
        assert not buffer.closed
        with pytest.raises(te.EngineClosed):
            mapped[0]
