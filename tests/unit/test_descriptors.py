from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transfer_engine as te
from transfer_engine.descriptors import byte_range


@pytest.fixture(params=["address", "region", "counter"])
def value(request: pytest.FixtureRequest, engine: te.Engine) -> Any:
    if request.param == "address":
        return engine.address
    if request.param == "region":
        return engine.register(bytearray(100)).descriptor
    return engine.counter().descriptor


def test_it_round_trips_through_bytes_and_pickle(value: Any) -> None:
    for other in (type(value).from_bytes(bytes(value)), pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert other == value
        assert hash(other) == hash(value)
        assert bytes(other) == bytes(value)
        assert repr(other) == repr(value)
    assert value != bytes(value)
    assert {value: 1}[type(value).from_bytes(bytearray(bytes(value)))] == 1


def test_it_has_no_order(value: Any) -> None:
    with pytest.raises(TypeError):
        value < value  # noqa: B015


def test_every_damaged_or_truncated_form_is_refused(value: Any) -> None:
    data = bytes(value)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(te.DescriptorError):
            type(value).from_bytes(flipped)
        with pytest.raises(te.DescriptorError):
            type(value).from_bytes(data[:position])
    with pytest.raises(te.DescriptorError):
        type(value).from_bytes(data + b"\0")


@given(data=st.binary(max_size=300))
@pytest.mark.parametrize("cls", [te.Address, te.RegionDescriptor, te.CounterDescriptor])
def test_foreign_bytes_are_refused(cls: Any, data: bytes) -> None:
    with pytest.raises(te.DescriptorError):
        cls.from_bytes(data)


@pytest.mark.parametrize("cls", [te.Address, te.RegionDescriptor, te.CounterDescriptor])
@pytest.mark.parametrize("wrong", ["text", 5, None, [1, 2]])
def test_other_types_raise_a_type_error(cls: Any, wrong: Any) -> None:
    with pytest.raises(TypeError):
        cls.from_bytes(wrong)


def test_one_kind_is_not_taken_for_another(engine: te.Engine) -> None:
    with pytest.raises(te.DescriptorError, match="the bytes of a region descriptor, not of a counter descriptor"):
        te.CounterDescriptor.from_bytes(bytes(engine.register(bytearray(8)).descriptor))
    with pytest.raises(te.DescriptorError, match="the bytes of an address, not of a region descriptor"):
        te.RegionDescriptor.from_bytes(bytes(engine.address))


def test_the_text_of_an_address_round_trips(engine: te.Engine) -> None:
    text = str(engine.address)
    assert text.startswith("te1:")
    assert text.split() == [text]
    assert te.Address.from_text(f"  {text}\n") == engine.address


@pytest.mark.parametrize("text", ["", "te1:", "te2:AAAA", "te1:AAAA", "te1:ä", "te1:A A", "hello"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(te.DescriptorError):
        te.Address.from_text(text)


@pytest.mark.parametrize("wrong", [None, 5, b"te1:AAAA"])
def test_what_is_no_text_raises_a_type_error(wrong: Any) -> None:
    with pytest.raises(te.ArgumentTypeError, match=type(wrong).__name__):
        te.Address.from_text(wrong)


def test_an_address_tells_who_and_where(make_engine: Any) -> None:
    identity = bytes(range(1, 17))
    first = make_engine(nics=2, identity=identity).address
    second = make_engine(nics=2, identity=identity).address
    assert first.identity == second.identity == identity
    assert first.generation != second.generation
    assert first != second
    assert first.transport == "sim"
    assert len(first.nics) == 2


def test_a_region_descriptor_tells_length_device_and_owner(engine: te.Engine) -> None:
    descriptor = te.RegionDescriptor.from_bytes(bytes(engine.register(bytearray(100)).descriptor))
    assert len(descriptor) == descriptor.length_bytes == 100
    assert descriptor.device == "cpu"
    assert descriptor.address == engine.address
    assert engine.register(bytearray(100)).descriptor.serial != descriptor.serial


def test_a_counter_descriptor_tells_its_owner(engine: te.Engine) -> None:
    assert engine.counter().descriptor.address == engine.address


# --- slices ---------------------------------------------------------------------------------------------------------

bounds = st.one_of(st.none(), st.integers(-20, 120), st.integers(-(2**70), 2**70))


@given(start=bounds, stop=bounds)
def test_a_slice_gives_exactly_its_bytes_or_a_range_error(start: int | None, stop: int | None) -> None:
    length = 100
    first, last = start if start is not None else 0, stop if stop is not None else length
    if 0 <= first <= last <= length:
        assert byte_range(slice(start, stop), length) == (first, last)
    else:
        with pytest.raises(te.RangeError):
            byte_range(slice(start, stop), length)


@pytest.fixture(params=["region", "remote", "region_slice", "remote_slice"])
def sliceable(request: pytest.FixtureRequest, engine: te.Engine) -> Any:
    region = engine.register(bytearray(200))
    return {
        "region": engine.register(bytearray(100)),
        "remote": engine.register(bytearray(100)).descriptor,
        "region_slice": region[50:150],
        "remote_slice": region.descriptor[50:150],
    }[request.param]


def test_slices_are_checked_at_once(sliceable: Any) -> None:
    assert len(sliceable[10:30]) == 20
    assert len(sliceable[:]) == 100
    assert len(sliceable[100:]) == len(sliceable[0:0]) == 0
    assert sliceable[100:]  # empty ones are true, as all objects
    for wrong in (
        slice(0, 101),
        slice(-1, 5),
        slice(0, -1),
        slice(5, 4),
        slice(101, 101),
        slice(0, 10, 2),
        slice(0, 1 << 64),
    ):
        with pytest.raises(IndexError):
            sliceable[wrong]
    for wrong in (5, "a", slice(0.0, 5.0), slice("a", None), (0, 1), None):
        with pytest.raises(TypeError):
            sliceable[wrong]
    with pytest.raises(TypeError):
        list(sliceable)


def test_slices_take_numpy_integers(sliceable: Any) -> None:
    part = sliceable[np.int64(10) : np.uint8(30)]
    assert len(part) == 20


def test_slices_of_slices_count_from_their_own_start(engine: te.Engine) -> None:
    region = engine.register(bytearray(100))
    part = region[20:80][10:20]
    assert (part.region, part.offset_bytes, part.length_bytes) == (region, 30, 10)
    remote = region.descriptor[20:80][10:20]
    assert (remote.descriptor, remote.offset_bytes, remote.length_bytes) == (region.descriptor, 30, 10)
