"""The lattice kernels against their NumPy reference, on adversarial floats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.lattice import (
    LinearLattice,
    is_mirrored,
    ordinal_correct,
    ordinal_difference,
    step_exponent,
)
from ckstore.codecs.rounded import RoundedLattice
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import IntegrityError
from ckstore.kernels import lattice as kernels
from tests.kernels import reference

SPECIAL = {
    "float32": [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001,
                0xFFC12345, 0x7F800001, 0x3F800000, 0xBF800000],
    "float64": [0, 1 << 63, 1, (1 << 63) + 1, (1 << 52) - 1, 1 << 52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000,
                0xFFF0000000000000, 0x7FF8000000000001, 0x3FF0000000000000],
}  # fmt: skip


@st.composite
def cases(draw):
    """(dtype, bits, other bits, lattice, start): values near the step's size mixed with special ones."""
    dtype = draw(st.sampled_from(["float32", "float64"]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    width = draw(st.integers(1, 7))
    rows_count = draw(st.integers(1, 9))
    count = width * rows_count
    step = draw(st.integers(-100, 60))
    rows = rng.integers(-12, 13, rows_count).astype(np.int16) if draw(st.booleans()) else np.empty(0, np.int16)
    cols = rng.integers(-12, 13, width).astype(np.int16) if draw(st.booleans()) else np.empty(0, np.int16)
    lattice = LinearLattice(dtype, step, width, rows, cols)
    arrays = []
    for _ in range(2):
        values = np.ldexp(rng.normal(size=count) * 10.0 ** rng.integers(-3, 4), step).astype(dtype)
        bits = values.view(f"u{values.itemsize}").copy()
        chosen = rng.random(count) < 0.3
        bits[chosen] = rng.choice(np.array(SPECIAL[dtype], bits.dtype), int(chosen.sum()))
        arrays.append(bits)
    start = draw(st.integers(0, count - 1))
    return dtype, arrays[0][start:], arrays[1][start:], lattice, start


def corrected(predicted, residuals, dtype, mirrored=False):
    """The bits that `ordinal_correct` makes of a copy of residuals."""
    bits = residuals.view(f"u{residuals.itemsize}").copy()
    ordinal_correct(predicted, bits, dtype, mirrored=mirrored)
    return bits


@pytest.mark.parametrize("step", [0, 40, -40, 30_000, -30_000])
def test_integers_of_any_size_move_by_any_exponent(step):
    cols = np.arange(-45, 46, dtype=np.int16)
    column = np.array([0, 1, 2, 3, 5, (1 << 24) - 1, 1 << 24, -1, -2, -3, -5, 1 - (1 << 24), -1 << 24], np.int32)
    rows = np.arange(column.size, dtype=np.int16) - 6
    integers = np.repeat(column, cols.size)
    out = integers.copy()
    kernels.linear_project(out, step, rows, cols, cols.size, 0)
    shift = (step + rows.astype(np.int64)[:, None] + cols).ravel()
    assert np.array_equal(out, reference.linear_project(integers, shift))


@given(cases())
def test_integers_and_values_equal_the_reference(case):
    dtype, parent, bits, lattice, start = case
    exponent = reference.exponents(bits.size, lattice.step, lattice.rows, lattice.cols, lattice.width, start)
    before = lattice.quantise(parent, start)
    assert np.array_equal(before, reference.linear_quantise(parent.view(dtype), exponent))
    halves = reference.linear_quantise(parent.view(dtype), exponent - 1)
    assert np.array_equal(lattice.quantise(parent, start, doubled=True), (halves + (halves > 0)) >> 1)
    coarser = LinearLattice(dtype, lattice.step + 2, lattice.width, lattice.rows, lattice.cols)
    finer = LinearLattice(dtype, lattice.step - 3, lattice.width, lattice.rows, lattice.cols)
    for other in (coarser, finer):
        shift = np.full(bits.size, other.step - lattice.step)
        assert np.array_equal(other.project(lattice, before, start), reference.linear_project(before, shift))
    flat = LinearLattice(dtype, lattice.step, lattice.width)
    shift = flat.step - exponent
    assert np.array_equal(flat.project(lattice, before, start), reference.linear_project(before, shift))
    values = lattice.values(before, start)
    assert np.array_equal(values, reference.linear_values(before, exponent, dtype))
    residuals = ordinal_difference(bits, parent, dtype)
    assert np.array_equal(residuals.view(bits.dtype), reference.ordinal_difference(bits, parent))
    assert np.array_equal(corrected(parent, residuals, dtype), bits)


@given(st.sampled_from(["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]), st.integers(0, 2**32 - 1))
def test_ordinals_of_small_floats_round_trip(dtype, seed):
    rng = np.random.default_rng(seed)
    unsigned = np.uint8 if "8_" in dtype else np.uint16
    bits = rng.integers(0, 1 << (8 * np.dtype(unsigned).itemsize), 300).astype(unsigned)
    other = rng.permutation(bits)
    difference = ordinal_difference(bits, other, dtype)
    assert np.array_equal(difference.view(unsigned), reference.ordinal_difference(bits, other))
    assert np.array_equal(corrected(other, difference, dtype), bits)
    assert np.array_equal(corrected(None, ordinal_difference(bits, None, dtype), dtype), bits)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("count", "chunk"), [((1 << 16) - 1, 1 << 18), (1 << 16, 1 << 18), ((1 << 16) + 3, 1 << 16)])
def test_differences_are_mirrored_in_large_chunks(dtype, count, chunk):
    size = ITEM_SIZES[dtype]
    mirrored = is_mirrored(dtype, count, chunk)
    assert mirrored == (count >= 1 << 16)
    assert not is_mirrored(dtype, count, chunk >> 3)
    assert not is_mirrored("int32", count, chunk)
    rng = np.random.default_rng(count)
    bits, other = rng.integers(0, 1 << 8 * size, (2, count), np.uint64).astype(f"u{size}")
    edges = np.array([0, 1 << 8 * size - 1, (1 << 8 * size) - 1, (1 << 8 * size - 1) - 1], np.uint64).astype(f"u{size}")
    bits[:16], other[:16] = np.repeat(edges, 4), np.tile(edges, 4)
    difference = ordinal_difference(bits, other, dtype, mirrored=mirrored)
    expected = reference.ordinal_difference(bits, other, is_mirrored=mirrored)
    assert np.array_equal(difference.view(bits.dtype), expected)
    assert np.array_equal(corrected(other, difference, dtype, mirrored), bits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
@pytest.mark.parametrize("other", [0, 4, 6])
def test_arrays_of_other_sizes_are_refused(dtype, other):
    unsigned = np.uint16 if dtype == "bfloat16" else np.uint32
    bits, predicted = np.zeros(5, unsigned), np.zeros(other, unsigned)
    with pytest.raises(IntegrityError):
        ordinal_difference(bits, predicted, dtype)
    with pytest.raises(IntegrityError):
        ordinal_correct(predicted, bits, dtype)


def test_every_float16_keeps_its_order():
    values = np.arange(1 << 16).astype(np.uint16)
    ordinals = ordinal_difference(values, None, "float16")
    floats = values.view(np.float16)
    finite = np.isfinite(floats)
    order = np.argsort(ordinals[finite], kind="stable")
    assert np.all(np.diff(floats[finite][order].astype(np.float64)) >= 0)
    assert np.unique(ordinals).size == 1 << 16


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_statistics_leave_out_values_that_are_not_finite(dtype):
    values = np.array([3.0, np.nan, -4.0, np.inf, -np.inf, 0.0], dtype)
    assert kernels.statistics(values) == (25.0, 4.0, 3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("step", "largest"), [(0.0, 0.0), (1e-300, 1.0), (1e30, 1e30), (0.1, 3e38), (5e-324, 5e-324), (0.3, 1.0)]
)
def test_the_step_keeps_integers_in_range_and_is_normal(dtype, step, largest):
    exponent = step_exponent(step, largest, dtype)
    if dtype == "float32":
        assert -126 <= exponent <= 127
    assert largest / 2.0**exponent <= 1 << 22


def test_elements_beyond_two_to_the_31_have_the_right_row():
    """By arithmetic: a chunk that begins far into a large array takes the exponents of its rows."""
    width = 1 << 20
    rows = np.arange(5000, dtype=np.int16) % 7
    lattice = LinearLattice("float32", -10, width, rows)
    start = 4001 * width + 5
    assert start > 1 << 31
    values = np.full(3, 1.0, np.float32)
    integers = lattice.quantise(values.view(np.uint32), start)
    assert integers.tolist() == [2 ** (10 - 4001 % 7)] * 3
    bits = lattice.values(integers, start)
    assert bits.view(np.float32).tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0, 6, 8])
def test_values_are_not_written_to_arrays_of_other_sizes(dtype, size):
    integers = np.arange(7, dtype=np.int32)
    lattices = [LinearLattice(dtype, -3, 7)]
    if dtype in ("float32", "bfloat16"):
        lattices.append(RoundedLattice(dtype, 24 if dtype == "float32" else 8, 0, 7))
    for lattice in lattices:
        values = lattice.values(integers, 0)
        out = np.full(7, 77, values.dtype)
        assert np.array_equal(lattice.values(integers, 0, out), values)
        assert np.array_equal(out, values)
        with pytest.raises(IntegrityError):
            lattice.values(integers, 0, np.full(size, 77, values.dtype))
