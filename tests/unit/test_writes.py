from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transfer_engine as te

SOON_S = 20.0


@pytest.mark.parametrize("length", [0, 1, 3, 4096, 65535, 65536])
def test_a_write_lands_whole_and_nowhere_else_and_raises_its_counter_once(pair: Any, length: int) -> None:
    start = (65536 - length) // 2
    transfer = pair.a.write(pair.region[:length], pair.remote[start : start + length], notify=pair.notify)
    transfer.wait(SOON_S)
    assert pair.counter.wait(1, timeout_s=SOON_S) == 1
    pair.assert_only(start, pair.source[:length])


def test_whole_regions_need_no_slices(pair: Any) -> None:
    pair.a.write(pair.region, pair.remote, flush=True).wait(SOON_S)
    np.testing.assert_array_equal(pair.target, pair.source)


def test_lengths_must_agree(pair: Any) -> None:
    with pytest.raises(te.ArgumentError, match=r"5 bytes.*6"):
        pair.a.write(pair.region[:5], pair.remote[:6])


def test_arguments_of_other_types_raise_type_errors(pair: Any) -> None:
    for source in (bytearray(5), pair.remote[:5], None):
        with pytest.raises(TypeError):
            pair.a.write(source, pair.remote[:5])
    for target in (bytearray(5), pair.region[:5], pair.b.register(bytearray(5)), None):
        with pytest.raises(TypeError):
            pair.a.write(pair.region[:5], target)
    for notify in (pair.counter, 5, bytes(pair.notify)):
        with pytest.raises(TypeError, match="CounterDescriptor"):
            pair.a.write(pair.region[:5], pair.remote[:5], notify=notify)
    for flush in ("no", None, 1):
        with pytest.raises(te.ArgumentTypeError, match="flush"):
            pair.a.write(pair.region[:5], pair.remote[:5], flush=flush)
        with pytest.raises(te.ArgumentTypeError, match="flush"):
            pair.a.write_batch([te.Write(pair.region[:5], pair.remote[:5], flush=flush)])
    with pytest.raises(TypeError):
        pair.a.write(pair.region[:5], pair.remote[:5], timeout_s="soon")
    with pytest.raises(te.ArgumentError):
        pair.a.write(pair.region[:5], pair.remote[:5], timeout_s=-1)
    pair.assert_only(0, [])


def test_many_writes_count_exactly(pair: Any) -> None:
    count = 500
    transfers = [
        pair.a.write(pair.region[i : i + 64], pair.remote[64 * i : 64 * i + 64], notify=pair.notify)
        for i in range(count)
    ]
    assert pair.counter.wait(count, timeout_s=SOON_S) == count
    for transfer in transfers:
        transfer.wait(SOON_S)
    assert pair.counter.value == count
    pair.assert_only(0, np.concatenate([pair.source[i : i + 64] for i in range(count)]))


def test_equal_descriptors_name_the_same_region(pair: Any) -> None:
    for _ in range(3):
        remote = te.RegionDescriptor.from_bytes(bytes(pair.remote))
        pair.a.write(pair.region[:8], remote[:8]).wait(SOON_S)
    assert pair.a.stats()["engine"]["remote_regions"] <= 1


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pages_land_where_their_indices_say(pair: Any, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    sources, targets = rng.permutation(256).astype(dtype), rng.permutation(128)[:100].astype(dtype)
    transfer = pair.a.write_pages(
        te.Pages(pair.region, sources[:100], page_bytes=200, stride_bytes=250, offset_bytes=30),
        te.Pages(pair.remote, targets, page_bytes=200, stride_bytes=512, offset_bytes=7),
        notify=pair.notify,
    )
    transfer.wait(SOON_S)
    assert pair.counter.wait(100, timeout_s=SOON_S) == 100
    expected = np.full(65536, 0xA5, np.uint8)
    for s, t in zip(sources[:100].tolist(), targets.tolist(), strict=True):
        expected[7 + 512 * t : 207 + 512 * t] = pair.source[30 + 250 * s : 230 + 250 * s]
    np.testing.assert_array_equal(pair.target, expected)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    page=st.integers(1, 300),
    gap=st.integers(0, 100),
    offset=st.integers(0, 100),
    count=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_any_geometry_of_pages_is_copied_exactly(
    pair: Any, page: int, gap: int, offset: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stride = page + gap
    targets = rng.permutation((65536 - offset - page) // stride + 1)[:count].tolist()
    sources = rng.integers(0, 65536 - page, count, endpoint=True).tolist()
    pair.target[:] = 0xA5
    pair.a.write_pages(
        te.Pages(pair.region, sources, page_bytes=page, stride_bytes=1),
        te.Pages(pair.remote, targets, page_bytes=page, stride_bytes=stride, offset_bytes=offset),
        flush=True,
    ).wait(SOON_S)
    expected = np.full(65536, 0xA5, np.uint8)
    for s, t in zip(sources, targets, strict=True):
        expected[offset + stride * t :][:page] = pair.source[s : s + page]
    np.testing.assert_array_equal(pair.target, expected)


def test_indices_are_taken_as_they_are_at_the_call(pair: Any) -> None:
    indices = np.arange(8)
    pages = te.Pages(pair.remote, indices, page_bytes=64)
    transfer = pair.a.write_pages(te.Pages(pair.region, np.arange(8), page_bytes=64), pages, flush=True)
    indices[:] = 500
    transfer.wait(SOON_S)
    pair.assert_only(0, pair.source[:512])


def test_strided_indices_work(pair: Any) -> None:
    indices = np.arange(16)[::2]
    pair.a.write_pages(
        te.Pages(pair.region, indices, page_bytes=8), te.Pages(pair.remote, np.arange(8), page_bytes=8), flush=True
    ).wait(SOON_S)
    pair.assert_only(0, pair.source[:128].reshape(16, 8)[::2].ravel())


@pytest.mark.parametrize("bad", [-1, 1024, 2**31 - 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_page_outside_its_region_refuses_the_whole_write(pair: Any, bad: int, side: str) -> None:
    good, wrong = np.arange(3), np.array([0, bad, 1])
    source, target = (wrong, good) if side == "source" else (good, wrong)
    with pytest.raises(te.RangeError) as caught:
        pair.a.write_pages(te.Pages(pair.region, source, 64), te.Pages(pair.remote, target, 64), notify=pair.notify)
    assert "indices[i] * stride_bytes" in caught.value.hint
    pair.assert_only(0, [])
    assert pair.counter.value == 0


def test_pages_must_match(pair: Any) -> None:
    with pytest.raises(te.ArgumentError):
        pair.a.write_pages(te.Pages(pair.region, [0, 1], 64), te.Pages(pair.remote, [0], 64))
    with pytest.raises(te.ArgumentError):
        pair.a.write_pages(te.Pages(pair.region, [0], 64), te.Pages(pair.remote, [0], 65))
    with pytest.raises(TypeError):
        pair.a.write_pages(te.Pages(pair.remote, [0], 64), te.Pages(pair.region, [0], 64))
    with pytest.raises(TypeError):
        pair.a.write_pages(pair.region[:64], pair.remote[:64])


def test_no_pages_is_a_write_that_ends(pair: Any) -> None:
    pair.a.write_pages(te.Pages(pair.region, [], 64), te.Pages(pair.remote, [], 64), notify=pair.notify).wait(SOON_S)
    assert pair.counter.value == 0


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_ends_as_one_and_counts_each_write_and_page(pair: Any) -> None:
    transfer = pair.a.write_batch(
        [
            te.Write(pair.region[:100], pair.remote[:100], notify=pair.notify),
            te.PageWrite(te.Pages(pair.region, [10, 20], 100), te.Pages(pair.remote, [1, 2], 100), notify=pair.notify),
            te.Write(pair.region[:0], pair.remote[:0], notify=pair.notify),
            te.Write(pair.region[500:600], pair.remote[300:400], flush=True),
        ]
    )
    transfer.wait(SOON_S)
    assert pair.counter.wait(4, timeout_s=SOON_S) == 4
    s = pair.source
    pair.assert_only(0, np.concatenate([s[:100], s[1000:1100], s[2000:2100], s[500:600]]))


def test_one_bad_entry_refuses_the_batch(pair: Any) -> None:
    good = te.Write(pair.region[:100], pair.remote[:100], notify=pair.notify)
    bad = te.PageWrite(te.Pages(pair.region, [0], 64), te.Pages(pair.remote, [1024], 64))
    with pytest.raises(te.RangeError):
        pair.a.write_batch([good, bad])
    with pytest.raises(TypeError, match="entry 1"):
        pair.a.write_batch([good, "x"])
    with pytest.raises(te.ArgumentError) as caught:
        pair.a.write_batch([good, te.Write(pair.region[:1], pair.remote[:2])])
    assert str(caught.value).startswith("write_batch: entry 1: the source has 1 bytes, the target 2")
    with pytest.raises(te.ArgumentTypeError, match=r"^write_batch: entry 0: notify must be"):
        pair.a.write_batch([te.Write(pair.region[:1], pair.remote[:1], notify=pair.counter)])
    with pytest.raises(te.ArgumentTypeError, match="not a Write") as single:
        pair.a.write_batch(good)
    assert "list" in single.value.hint
    pair.assert_only(0, [])
    assert pair.counter.value == 0


def test_an_empty_batch_ends(pair: Any) -> None:
    pair.a.write_batch([]).wait(SOON_S)


def test_stats_count_operations_and_are_plain(pair: Any) -> None:
    import json

    pair.a.write(pair.region[:1000], pair.remote[:1000]).wait(SOON_S)
    stats = json.loads(json.dumps(pair.a.stats()))
    assert stats["engine"]["completed"] >= 1
    assert sum(nic["write_bytes"] for nic in stats["nics"].values()) >= 1000
    assert set(stats["nics"]) == set(pair.a.nics)
    assert stats["peers"][str(pair.b.address)]["state"] == "connected"
