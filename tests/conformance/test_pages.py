"""Paged writes: each page to its place, each counted once, indices taken as they were at the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import transfer_engine as te

from .rig import SOON_S, Link, Piece, Rig, on, permutation


def pieces_of(targets: Any, sources: Any, page: int, stride: int) -> list[Piece]:
    return [(int(t) * stride, int(s) * stride, page) for t, s in zip(targets, sources, strict=True)]


def write_pages(link: Link, count: int, page: int, stride: int, dtype: Any = np.int64, **arguments: Any) -> None:
    """Random pages to random places, then every byte and the count are looked at."""
    room = (link.length - page) // stride + 1
    targets = permutation(1, count, room).astype(dtype)
    sources = np.random.default_rng(2).integers(0, room, count).astype(dtype)
    before = link.value
    link.poison()
    link.pages(targets, sources, page, stride=stride, **arguments).wait(SOON_S)
    assert link.wait(before + count) == before + count
    link.check(pieces_of(targets, sources, page, stride), before + count)


@on(nics=(1, 2, 3, 8), nics_apart=(2,))
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pages_land_where_their_indices_say_and_count_once_each(rig: Rig, dtype: Any) -> None:
    link = rig.link(1 << 20)
    for count, page, stride in ((0, 64, 64), (1, 4096, 4096), (7, 1000, 1100), (200, 4096, 5000), (1000, 256, 1024)):
        write_pages(link, count, page, stride, dtype)


@on(nics=(1, 3), nics_apart=(3,))
@pytest.mark.parametrize("immediates", ["each", "last"])
@pytest.mark.parametrize("chunk", [0, 300])
def test_pages_count_exactly_whichever_of_them_notify_and_however_long_they_are(
    rig: Rig, immediates: str, chunk: int
) -> None:
    rig.set_up(page_immediates=immediates, chunk_bytes=chunk)
    link = rig.link(300_000)
    for count, page, stride in ((1, 299, 299), (50, 300, 300), (51, 301, 400), (100, 1000, 1000), (3, 90_000, 90_000)):
        write_pages(link, count, page, stride)


@on(nics=(1, 2), apart=False)
def test_more_pages_than_one_notification_can_name_are_counted_exactly(rig: Rig) -> None:
    count = (1 << 16) * rig.case.nics + 5
    link = rig.link(count * 2)
    targets = permutation(3, count).astype(np.int32)
    link.pages(targets, np.arange(count, dtype=np.int32), 1, stride=2).wait(SOON_S)
    assert link.wait(count) == count
    found = np.frombuffer(rig.far.read(link.memory), np.uint8)
    np.testing.assert_array_equal(found[::2][targets], link.source[::2])
    assert (found[1::2] == 0xA5).all()


@on(nics=(1, 3))
def test_index_arrays_changed_right_after_the_call_change_nothing(rig: Rig) -> None:
    link = rig.link(1 << 18)
    count, page = 512, 512
    for dtype in (np.int32, np.int64):
        targets, sources = permutation(4, count).astype(dtype), permutation(5, count).astype(dtype)
        expected = pieces_of(targets, sources, page, page)
        before = link.value
        link.poison()
        transfer = link.pages(targets, sources, page)
        targets[:] = -1
        sources[:] = 0
        del targets, sources
        transfer.wait(SOON_S)
        assert link.wait(before + count) == before + count
        link.check(expected)


@on(nics=(1,), apart=False)
def test_any_form_of_indices_gives_the_same_pages(rig: Rig) -> None:
    link = rig.link(64 * 64)
    expected = pieces_of(range(0, 32, 2), range(16), 64, 64)
    forms: list[Any] = [
        range(0, 32, 2),
        list(range(0, 32, 2)),
        np.arange(0, 32, 2, dtype=np.uint8),
        np.arange(0, 32, 2, dtype=np.uint32),
        np.arange(0, 32, 2, dtype=np.int16),
        np.arange(0, 32, 2, dtype=">i8"),
        np.arange(32, dtype=np.int64)[::2],
        np.arange(64, dtype=np.int32)[::4] // 2,
        np.arange(30, -2, -2, dtype=np.int32)[::-1],
    ]
    for done, form in enumerate(forms, 1):
        link.poison()
        link.pages(form, np.arange(16), 64).wait(SOON_S)
        assert link.wait(16 * done) == 16 * done
        link.check(expected)


@on(nics=(1, 3))
def test_the_two_sides_have_their_own_offsets_and_strides(rig: Rig) -> None:
    link = rig.link(1 << 16)
    sources, targets = permutation(6, 50, 60), permutation(7, 50, 55)
    rig.near.write_pages(
        te.Pages(link.region, sources, page_bytes=700, stride_bytes=1000, offset_bytes=13),
        te.Pages(link.remote, targets, page_bytes=700, stride_bytes=1111, offset_bytes=99),
        notify=link.notify,
    ).wait(SOON_S)
    assert link.wait(50) == 50
    link.check([(99 + 1111 * int(t), 13 + 1000 * int(s), 700) for t, s in zip(targets, sources, strict=True)], 50)


@on(nics=(1, 3))
def test_one_page_may_go_to_many_places(rig: Rig) -> None:
    link = rig.link(100 * 333)
    link.pages(np.arange(100), np.zeros(100, np.int32), 333).wait(SOON_S)
    assert link.wait(100) == 100
    link.check(pieces_of(range(100), [0] * 100, 333, 333), 100)


@on(nics=(1, 3))
def test_paged_writes_and_writes_share_a_counter(rig: Rig) -> None:
    link = rig.link(1 << 17)
    for i in range(20):
        link.write(0, 0, 1000 * i)
        link.pages(np.arange(i), np.arange(i), 1024)
    total = 20 + sum(range(20))
    assert link.wait(total) == total
    link.write(0, 0, 0)
    assert link.wait(total + 1) == total + 1


@pytest.mark.soak
@on(nics=(1, 3))
def test_a_million_pages_are_counted_exactly(rig: Rig) -> None:
    count = 1_000_000
    link = rig.link(count * 64)
    targets = permutation(8, count).astype(np.int32)
    link.pages(targets, np.arange(count, dtype=np.int32), 64).wait(SOON_S)
    assert link.wait(count) == count
    found = np.frombuffer(rig.far.read(link.memory), np.uint8).reshape(count, 64)
    np.testing.assert_array_equal(found[targets], link.source.reshape(count, 64))
