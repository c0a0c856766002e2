"""Bad input: a typed error that names the values, before anything is posted; and the engine goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Link, Rig, on

SIZE = 64 * 1024


@contextlib.contextmanager
def nothing_posted(rig: Rig, link: Link) -> Iterator[None]:
    """Whatever is refused inside has moved nothing and counted nothing; afterwards a good write works."""

    def posted() -> int:
        return sum(nic["writes"] for nic in rig.near.stats()["nics"].values())

    before, value = posted(), link.value
    link.poison()
    yield
    assert posted() == before
    link.check([], value)
    link.write(5, 7, 1000).wait(SOON_S)
    assert link.wait(value + 1) == value + 1
    link.check([(5, 7, 1000)])


def pages(link: Link, sources: Any, targets: Any, page: int = 64, **arguments: Any) -> te.Transfer:
    return link.near.write_pages(
        te.Pages(link.region, sources, page, **arguments),
        te.Pages(link.remote, targets, page, **arguments),
        notify=link.notify,
    )


region_from = te.RegionDescriptor.from_bytes
counter_from = te.CounterDescriptor.from_bytes


@dataclass
class Wrong:
    """A call that is refused, with which error and what its text must show."""

    error: type[te.TransferEngineError]
    text: str
    call: Callable[[Link], Any]


WRONG = {
    # lengths that differ
    "lengths": Wrong(te.ArgumentError, "5 bytes.*6", lambda k: k.near.write(k.region[:5], k.remote[:6])),
    "whole_regions": Wrong(te.ArgumentError, "100 bytes.*65536", lambda k: k.near.write(k.region[:100], k.remote)),
    "page_counts": Wrong(te.ArgumentError, "2 pages.*3", lambda k: pages(k, [0, 1], [0, 1, 2])),
    "page_bytes": Wrong(
        te.ArgumentError,
        "64.*65",
        lambda k: k.near.write_pages(te.Pages(k.region, [0], 64), te.Pages(k.remote, [0], 65)),
    ),
    # ranges outside
    "source_end": Wrong(te.RangeError, "65537", lambda k: k.region[0:65537]),
    "target_end": Wrong(te.RangeError, "65537", lambda k: k.remote[0:65537]),
    "backwards": Wrong(te.RangeError, "9:8", lambda k: k.remote[9:8]),
    "negative": Wrong(te.RangeError, "-1", lambda k: k.remote[-1:]),
    "wrapping_slice": Wrong(te.RangeError, str(2**64 - 1), lambda k: k.remote[2**64 - 1 : 2**64]),
    "huge_slice": Wrong(te.RangeError, str(2**70), lambda k: k.region[0 : 2**70]),
    # pages outside, sums beyond 64 bits included
    "source_index": Wrong(te.RangeError, "1024", lambda k: pages(k, [0, 1024], [0, 1])),
    "target_index": Wrong(te.RangeError, "1024", lambda k: pages(k, [0, 1], [0, 1024])),
    "negative_index": Wrong(te.RangeError, "-1", lambda k: pages(k, [0, -1], [0, 1])),
    "least_index": Wrong(te.RangeError, str(-(2**63)), lambda k: pages(k, [0, 1], [0, -(2**63)])),
    "greatest_index": Wrong(te.RangeError, str(2**63 - 1), lambda k: pages(k, [0, 1], [0, 2**63 - 1])),
    "product_overflows": Wrong(
        te.RangeError, str(2**60), lambda k: pages(k, [0, 1], [0, 2**60], page=16, stride_bytes=16)
    ),
    "product_wraps_to_zero": Wrong(
        te.RangeError,
        "index 4",
        lambda k: k.near.write_pages(te.Pages(k.region, [0, 0], 64), te.Pages(k.remote, [0, 4], 64, 2**62)),
    ),
    "offset_overflows": Wrong(te.RangeError, str(2**63 - 1), lambda k: pages(k, [0], [0], offset_bytes=2**63 - 1)),
    "offset_outside": Wrong(te.RangeError, "65473", lambda k: pages(k, [0], [0], offset_bytes=65473)),
    "page_longer_than_region": Wrong(te.RangeError, "65537", lambda k: pages(k, [0], [0], page=65537)),
    "greatest_page": Wrong(te.RangeError, str(2**63 - 1), lambda k: pages(k, [0], [0], page=2**63 - 1)),
    "page_of_nothing": Wrong(te.ArgumentError, "got 0", lambda k: pages(k, [0], [0], page=0)),
    "negative_stride": Wrong(te.ArgumentError, "-64", lambda k: pages(k, [0], [0], stride_bytes=-64)),
    "negative_offset": Wrong(te.RangeError, "-1", lambda k: pages(k, [0], [0], offset_bytes=-1)),
    # types
    "float_indices": Wrong(te.ArgumentTypeError, "float64", lambda k: pages(k, np.zeros(2), [0, 1])),
    "bool_indices": Wrong(te.ArgumentTypeError, "bool", lambda k: pages(k, np.zeros(2, bool), [0, 1])),
    "uint64_indices": Wrong(te.ArgumentTypeError, "uint64", lambda k: pages(k, np.zeros(2, np.uint64), [0, 1])),
    "text_indices": Wrong(te.ArgumentTypeError, "indices", lambda k: pages(k, ["a", "b"], [0, 1])),
    "two_dimensions": Wrong(te.ArgumentError, r"\(2, 1\)", lambda k: pages(k, np.zeros((2, 1), int), [0, 1])),
    "no_region": Wrong(te.ArgumentTypeError, "bytearray", lambda k: k.near.write(bytearray(5), k.remote[:5])),
    "no_descriptor": Wrong(te.ArgumentTypeError, "bytes", lambda k: k.near.write(k.region[:5], bytes(k.remote))),
    "counter_bytes": Wrong(
        te.ArgumentTypeError, "bytes", lambda k: k.near.write(k.region[:5], k.remote[:5], notify=bytes(k.notify))
    ),
    "own_region_as_target": Wrong(te.ArgumentTypeError, "Region", lambda k: k.near.write(k.region[:5], k.region[:5])),
    "batch_entry": Wrong(te.ArgumentTypeError, "entry 0.*str", lambda k: k.near.write_batch(["write"])),
    # deadlines
    "negative_timeout": Wrong(te.ArgumentError, "-1", lambda k: k.write(0, 0, 5, timeout_s=-1)),
    "no_number": Wrong(te.ArgumentError, "nan", lambda k: k.write(0, 0, 5, timeout_s=float("nan"))),
    "timeout_text": Wrong(te.ArgumentTypeError, "str", lambda k: k.write(0, 0, 5, timeout_s="5")),
    # foreign, truncated and damaged bytes
    "foreign": Wrong(te.DescriptorError, "descriptor", lambda k: region_from(b"hello")),
    "nothing": Wrong(te.DescriptorError, "descriptor", lambda k: region_from(b"")),
    "truncated": Wrong(te.DescriptorError, "descriptor", lambda k: region_from(bytes(k.remote)[:-1])),
    "longer": Wrong(te.DescriptorError, "descriptor", lambda k: counter_from(bytes(k.notify) + b"\0")),
    "other_kind": Wrong(te.DescriptorError, "descriptor", lambda k: region_from(bytes(k.notify))),
    # messages
    "long_message": Wrong(
        te.ArgumentError, str((1 << 20) + 1), lambda k: k.near.send(k.remote.address, bytes((1 << 20) + 1))
    ),
    "text_message": Wrong(te.ArgumentTypeError, "str", lambda k: k.near.send(k.remote.address, "hello")),
    "no_address": Wrong(te.ArgumentTypeError, "int", lambda k: k.near.send(5, b"hello")),
    # memory
    "read_only_target": Wrong(te.RegistrationError, "read-only", lambda k: k.near.register(b"constant").descriptor),
    "scattered_memory": Wrong(
        te.RegistrationError, "contiguous", lambda k: k.near.register(np.zeros((4, 4), np.uint8)[:, 1])
    ),
    "no_memory": Wrong(te.ArgumentTypeError, "object", lambda k: k.near.register(object())),
}


@on(apart=False)
@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_with_the_values_before_anything_is_posted(rig: Rig, name: str) -> None:
    wrong, link = WRONG[name], rig.link(SIZE)
    with nothing_posted(rig, link):
        with pytest.raises(wrong.error, match=wrong.text) as caught:
            wrong.call(link)
        assert caught.value.hint


@on(apart=False)
def test_one_bad_entry_refuses_a_whole_batch(rig: Rig) -> None:
    link = rig.link(SIZE)
    good = te.Write(link.region[:100], link.remote[:100], link.notify)
    for bad in (
        te.Write(link.region[:5], link.remote[:6]),
        te.PageWrite(te.Pages(link.region, [0], 64), te.Pages(link.remote, [1024], 64)),
        te.PageWrite(te.Pages(link.region, [0, 1], 64), te.Pages(link.remote, [0], 64)),
    ):
        with nothing_posted(rig, link), pytest.raises(te.TransferEngineError):
            rig.near.write_batch([good, bad])


@on(apart=False)
def test_no_single_flipped_bit_makes_another_descriptor(rig: Rig) -> None:
    link = rig.link(SIZE)
    for value in (link.remote, link.notify, rig.near.address):
        data = bytes(value)
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 1 << position % 8
            with pytest.raises(te.DescriptorError):
                type(value).from_bytes(damaged)


def forged(descriptor: Any, **fields: int) -> Any:
    """A descriptor with a right checksum and wrong contents."""
    copy = type(descriptor).from_bytes(bytes(descriptor))
    for name, value in fields.items():
        setattr(copy._native, name, value)
    return type(descriptor).from_native(copy._native)


@on(nics=(1, 2), apart=False)
def test_a_descriptor_that_claims_too_much_gives_no_access(rig: Rig) -> None:
    link = rig.link(SIZE)
    longer = forged(link.remote, length=2 * SIZE)
    with nothing_posted(rig, link), pytest.raises(te.TransferEngineError) as caught:
        link.near.write(link.region[:100], longer[SIZE - 50 : SIZE + 50], notify=link.notify).wait(SOON_S)
    assert isinstance(caught.value, te.RangeError | te.RemoteAccessError)


@on(nics=(1, 2), apart=False)
def test_descriptors_that_were_never_given_out_are_refused_by_the_owner(rig: Rig) -> None:
    link = rig.link(SIZE)
    with nothing_posted(rig, link):
        with pytest.raises(te.RemoteAccessError):
            link.near.write(link.region, forged(link.remote, serial=12345), notify=link.notify).wait(SOON_S)
        with pytest.raises(te.TransferEngineError):
            link.near.write(link.region, link.remote, notify=forged(link.notify, serial=12345)).wait(SOON_S)


@on(nics=(1,), apart=False)
def test_descriptors_of_another_transport_are_refused(rig: Rig) -> None:
    link = rig.link(SIZE)
    other = "tcp" if rig.case.transport.name == "sim" else "sim"
    with te.Engine(other, nics=["lo"] if other == "tcp" else None) as engine:
        remote = engine.register(bytearray(100)).descriptor
        with nothing_posted(rig, link), pytest.raises(te.TransferEngineError, match=f"{rig.near.transport}|{other}"):
            link.near.write(link.region[:100], remote).wait(SOON_S)


@on(nics=(1,), apart=False)
def test_a_region_of_another_engine_is_no_source(rig: Rig) -> None:
    link = rig.link(SIZE)
    foreign = rig.engine().register(bytearray(100))
    with nothing_posted(rig, link), pytest.raises(te.ArgumentError, match="another engine"):
        link.near.write(foreign, link.remote[:100])


@on(nics=(1,), apart=False)
def test_a_counter_and_a_region_of_different_peers_do_not_go_together(rig: Rig) -> None:
    link = rig.link(SIZE)
    elsewhere = rig.link(100, far=rig.another_far())
    with nothing_posted(rig, link), pytest.raises(te.ArgumentError):
        link.near.write(link.region[:100], link.remote[:100], notify=elsewhere.notify)


@on(nics=(1,), apart=False)
def test_a_closed_engine_refuses_everything(rig: Rig) -> None:
    link = rig.link(SIZE)
    transfer = link.write(0, 0, 10)
    transfer.wait(SOON_S)
    rig.near.close()
    for call in (
        lambda: link.write(0, 0, 10),
        lambda: pages(link, [0], [0]),
        lambda: rig.near.write_batch([]),
        lambda: rig.near.register(bytearray(5)),
        lambda: rig.near.send(link.remote.address, b""),
        lambda: rig.near.connect(link.remote.address),
        lambda: rig.near.fence(link.remote.address),
        rig.near.counter,
        rig.near.stats,
        rig.near.receive,
    ):
        with pytest.raises(te.EngineClosed):
            call()
    transfer.wait()
    assert transfer.done()
