"""Models of magnitudes by rows and columns: the elements of a row, means of logarithms, exponents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.lattice import FLOATS, floats
from ckstore.codecs.rounded import ROUNDED, largest_finite
from ckstore.encoding.magnitudes import BUNDLE_ROW, LogModel, exponent_bias, member_rows, row_width, whole
from ckstore.objects.units import Member, Unit


def unit_of(shape: tuple[int, ...], dtype: str = "float32") -> Unit:
    return Unit("w", "s", dtype, shape, "weight", (Member(0, 0, 0, int(np.prod(shape))),))


def bundle_of(counts: list[int], dtype: str = "float32") -> Unit:
    members = tuple(Member(0, index, 0, count) for index, count in enumerate(counts))
    return Unit("bundle:model|float32|second#0", "s", dtype, (sum(counts),), "second", members)


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        ((400, 300), 300),
        ((128, 64, 3, 3), 576),
        ((64, 3, 7, 7), 147),
        ((512, 1, 9, 9), 81),
        ((2, 3, 256, 256), 256),
        ((70_000,), 70_000),
        ((70_000, 1), 70_000),
        ((1, 70_000), 70_000),
        ((35_000, 3), 105_000),
        ((2, 70_000), 140_000),
        ((1, 1), 1),
    ],
)
def test_rows_are_cut_where_they_and_the_columns_are_fewest(shape: tuple[int, ...], width: int) -> None:
    assert row_width(unit_of(shape)) == width


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_a_width_cuts_between_axes_and_never_into_slivers(shape: list[int]) -> None:
    unit = unit_of(tuple(shape))
    width = row_width(unit)
    assert unit.count % width == 0
    assert width in {int(np.prod(shape[axis:])) for axis in range(len(shape))}
    assert width == unit.count or min(width, unit.count // width) >= 16


def logarithms(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Magnitudes' ordinals in octaves; NaN for zeros and for values that are not finite."""
    magnitude = (bits & ((1 << (8 * bits.itemsize - 1)) - 1)).astype(np.int64)
    known = (magnitude > 0) & (magnitude <= largest_finite(dtype))
    return np.where(known, magnitude, np.nan) / (1 << FLOATS[dtype][0])


def strange_bits(rng: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    """Bits of any kind, a third of them zeros, some of them infinite or NaN."""
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    bits = rng.integers(0, 1 << (8 * np.dtype(unsigned).itemsize), count, dtype=np.uint64).astype(unsigned)
    bits[rng.random(count) < 0.3] = 0
    return bits


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_a_model_is_the_mean_of_logarithms_by_rows_and_columns(dtype: str, data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shape = data.draw(st.sampled_from([(20, 16), (16, 4, 5), (17,), (200, 2), (1, 40)]))
    unit = unit_of(shape, dtype)
    bits = strange_bits(rng, dtype, unit.count)
    if data.draw(st.booleans()):
        bits.reshape(-1, row_width(unit))[:, 0] = 0
    bits[-1] = 1000
    known = logarithms(bits, dtype)
    model = LogModel.of(unit, bits)
    table = known.reshape(-1, row_width(unit))
    level = model.level + exponent_bias(dtype)
    assert np.isclose(level, np.nanmean(known), rtol=1e-12)
    if table.shape[0] == 1:
        assert (model.rows.tolist(), model.cols.size) == ([0.0], 0)
        return
    for found, axis in ((model.rows, 1), (model.cols, 0)):
        total, count = np.nansum(table, axis), np.isfinite(table).sum(axis)
        expected = np.where(count > 0, total / np.maximum(count, 1) - level, 0.0)
        assert np.allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("unit", [unit_of((20, 16)), unit_of((50,)), bundle_of([70, 1, 130])], ids=str)
def test_zeros_alone_give_no_model(unit: Unit) -> None:
    model = LogModel.of(unit, np.zeros(unit.count, np.uint32))
    assert model.level == -127
    assert not model.rows.any()
    assert not model.cols.any()
    assert [axis.size for axis in model.exponents()] == [0, 0]


def test_every_member_of_a_bundle_has_its_own_mean() -> None:
    """Blocks do not end where members do: one that two share counts for both, and takes the smaller mean."""
    counts = [5 * BUNDLE_ROW, 2 * BUNDLE_ROW, BUNDLE_ROW // 2, 40 * BUNDLE_ROW]
    unit = bundle_of(counts)
    values = np.repeat(np.array([2.0**-10, 2.0**-4, 2.0**-30, 2.0**-2], np.float32), counts)
    model = LogModel.of(unit, values.view(np.uint32))
    rows = model.rows + model.level
    assert rows.size == 48
    assert np.array_equal(np.rint(rows[:7]), [-10] * 5 + [-4] * 2)
    assert rows[7] < -10
    assert np.abs(rows[8:] + 2).max() < 1
    assert model.cols.size == 0


@given(st.lists(st.integers(1, 3 * BUNDLE_ROW), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_blocks_get_the_least_of_their_members(counts: list[int], seed: int) -> None:
    unit = bundle_of(counts)
    octaves = np.random.default_rng(seed).integers(-9, 9, len(counts)).astype(np.float64)
    by_element = np.repeat(octaves, counts)
    blocks = [by_element[start : start + BUNDLE_ROW].min() for start in range(0, unit.count, BUNDLE_ROW)]
    assert member_rows(unit, octaves).tolist() == blocks


def test_exponents_are_whole_near_zero_and_absent_where_all_are_zero() -> None:
    assert whole(np.array([0.4, -0.5, 0.2])).size == 0
    assert whole(np.array([-1.6, 0.0, 999.0, -999.0])).tolist()[:2] == [-2, 0]
    assert whole(np.array([999.0, -999.0])).sum() == 0
    assert np.abs(whole(np.array([999.0, -999.0]))).max() <= 45, "one character each in a manifest"
    assert whole(np.array([1.0])).dtype == np.int16


def test_a_models_predictions_are_near_the_values() -> None:
    rng = np.random.default_rng(0)
    rows, cols = rng.normal(size=(40, 1)) * 5, rng.normal(size=(1, 30)) * 5
    values = np.exp2(rows + cols + rng.normal(size=(40, 30)) * 0.1 - 20).astype(np.float32)
    model = LogModel.of(unit_of((40, 30)), values.view(np.uint32).reshape(-1))
    predicted = np.exp2(model.level + model.rows[:, None] + model.cols)
    assert np.abs(np.log2(predicted / floats(values.view(np.uint32), "float32"))).max() < 0.7
