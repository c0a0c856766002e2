from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import transfer_engine as te
from transfer_engine.pages import integers


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.longlong])
def test_int32_and_int64_indices_are_used_without_a_copy(dtype: Any) -> None:
    indices = np.arange(10, dtype=dtype)
    assert integers(indices, "indices", "Pages") is indices


@pytest.mark.parametrize(
    "indices",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2], np.int16),
        np.array([3, 1, 2], np.uint32),
        np.array([3, 1, 2], ">i8"),
        np.array([3, 0, 1, 0, 2], np.int64)[::2],
    ],
)
def test_what_converts_safely_is_converted(indices: Any) -> None:
    array = integers(indices, "indices", "Pages")
    assert array.dtype in (np.int32, np.int64)
    assert array.dtype.isnative
    assert array.tolist() == [3, 1, 2]


def test_ranges_and_empty_lists_are_indices() -> None:
    assert integers(range(4, 0, -2), "indices", "Pages").tolist() == [4, 2]
    assert integers([], "indices", "Pages").tolist() == []
    assert integers(range(0), "indices", "Pages").dtype == np.int64
    for empty in (np.array([]), np.zeros(0, bool), (), np.array([], object)):
        assert integers(empty, "indices", "Pages").dtype == np.int64


@pytest.mark.parametrize(
    "indices",
    [
        np.array([1.0]), [1.5], np.array([True]), np.array([1], np.uint64), ["a"], [None], [2**63], [2**70], 5, None,
        np.array(["1"]), [[1], [2, 3]],
    ],
)  # fmt: skip
def test_what_does_not_convert_safely_raises_a_type_error(indices: Any) -> None:
    with pytest.raises(TypeError):
        integers(indices, "indices", "Pages")


@pytest.mark.parametrize("indices", [np.zeros((2, 2), np.int64), np.int64(3) * np.ones((), np.int64), [[1, 2]]])
def test_indices_have_one_dimension(indices: Any) -> None:
    with pytest.raises((te.ArgumentError, TypeError)):
        integers(np.asarray(indices), "indices", "Pages")


def test_stride_defaults_to_the_page_length(engine: te.Engine) -> None:
    pages = te.Pages(engine.register(bytearray(64)), [0, 1], 16)
    assert (pages.page_bytes, pages.stride_bytes, pages.offset_bytes) == (16, 16, 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"page_bytes": 0}, te.ArgumentError),
        ({"page_bytes": -1}, te.ArgumentError),
        ({"page_bytes": 1.5}, te.ArgumentTypeError),
        ({"stride_bytes": 0}, te.ArgumentError),
        ({"stride_bytes": "8"}, te.ArgumentTypeError),
        ({"offset_bytes": -1}, te.RangeError),
        ({"page_bytes": 1 << 63}, te.ArgumentError),
    ],
)
def test_impossible_geometry_is_refused_at_once(engine: te.Engine, arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        te.Pages(engine.register(bytearray(64)), [0], **{"page_bytes": 16, **arguments})


def test_pages_lie_in_whole_regions(engine: te.Engine) -> None:
    region = engine.register(bytearray(64))
    for wrong in (region[:], region.descriptor[:], bytearray(64), None):
        with pytest.raises(TypeError):
            te.Pages(wrong, [0], 16)  # type: ignore[arg-type]
    with pytest.raises(te.ArgumentTypeError) as caught:
        te.Pages(engine.allocate(64), [0], 16)  # type: ignore[arg-type]
    assert "buffer.region" in caught.value.hint


def test_torch_indices_share_their_memory() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4, dtype=torch.int32)
    assert integers(tensor, "indices", "Pages").ctypes.data == tensor.data_ptr()
    with pytest.raises(TypeError):
        integers(torch.zeros(2), "indices", "Pages")
