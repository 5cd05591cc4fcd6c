from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckstore.reading import gather as gathering
from ckstore.reading.gather import gather


class Extent:
    """A flat extent that notes the reads of it."""

    def __init__(self, count: int) -> None:
        self.data = np.arange(count, dtype=np.uint32)
        self.stretches: list[tuple[int, int]] = []

    def read(self, first: int, last: int) -> np.ndarray[Any, Any]:
        assert 0 <= first < last <= self.data.size
        self.stretches.append((first, last))
        return self.data[first:last].copy()

    @property
    def total(self) -> int:
        return sum(last - first for first, last in self.stretches)


def expected(extent: Extent, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], wanted: list[Any]) -> Any:
    whole = as_strided(extent.data[offset:], shape, tuple(4 * stride for stride in strides))
    return whole[np.ix_(*(np.asarray(positions, dtype=np.int64) for positions in wanted))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    strides = tuple(draw(st.integers(0, 40)) for _ in shape)
    wanted: list[Any] = []
    for size in shape:
        if draw(st.booleans()):
            positions = draw(st.sets(st.integers(0, size - 1)))
            wanted.append(np.array(sorted(positions), dtype=np.int64))
        else:
            start, stop, step = draw(st.slices(size)).indices(size)
            wanted.append(range(start, stop, step))
    return draw(st.integers(0, 5)), shape, strides, wanted


@pytest.mark.long
@pytest.mark.parametrize("gap", [1, 8, 1 << 15])
@pytest.mark.parametrize("sparse", [1, 1 << 21])
@given(case=cases())
def test_any_positions_of_any_strides_equal_those_of_numpy(gap: int, sparse: int, case: Any) -> None:
    offset, shape, strides, wanted = case
    extent = Extent(offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
    before = gathering.GAP, gathering.SPARSE
    gathering.GAP, gathering.SPARSE = gap, sparse
    try:
        found = gather(extent.read, extent.data.dtype, offset, strides, wanted)
    finally:
        gathering.GAP, gathering.SPARSE = before
    np.testing.assert_array_equal(found, expected(extent, offset, shape, strides, wanted))
    assert found.flags.c_contiguous
    assert found.flags.writeable


def test_contiguous_rows_are_one_read_of_just_these() -> None:
    extent = Extent(1000 * 100)
    gather(extent.read, extent.data.dtype, 0, (100, 1), [range(10, 20), range(100)])
    assert extent.stretches == [(1000, 2000)]


def test_rows_far_apart_are_read_one_by_one() -> None:
    extent = Extent(200_000 * 10)
    rows = np.array([0, 4, 9])
    found = gather(extent.read, extent.data.dtype, 0, (200_000, 1), [rows, range(7)])
    np.testing.assert_array_equal(found, extent.data.reshape(10, -1)[[0, 4, 9], :7])
    assert extent.total == 3 * 7


def test_a_column_is_read_in_blocks_not_at_once() -> None:
    extent = Extent(3 * gathering.SPARSE)
    found = gather(extent.read, extent.data.dtype, 5, (1024, 1), [range(3 * gathering.SPARSE // 1024), range(1)])
    np.testing.assert_array_equal(found[:, 0], extent.data[5::1024])
    assert max(last - first for first, last in extent.stretches) <= gathering.SPARSE


def test_an_expanded_axis_is_read_once() -> None:
    extent = Extent(4)
    found = gather(extent.read, extent.data.dtype, 0, (1, 0), [range(4), range(1000)])
    assert found.shape == (4, 1000)
    assert extent.total == 4
