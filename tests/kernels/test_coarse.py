"""The kernels of coarse layers against their NumPy reference and other conversions, on adversarial floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.lattice import STEP_RANGE, LinearLattice
from ckstore.codecs.rounded import ROUNDED, RoundedLattice, largest_finite, quarter_octave
from ckstore.kernels import coarse as kernels
from tests.children import flushed
from tests.kernels import reference

NONE = np.empty(0, np.int16)
UNSIGNED = {"float64": np.uint64, "float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def finite_bits(rng: np.random.Generator, dtype: str, count: int, *, special: float = 0.3) -> np.ndarray:
    """Bits of finite values: around one magnitude, any at all, and zeros, subnormals, the largest and the least."""
    unsigned = UNSIGNED[dtype]
    width = 8 * np.dtype(unsigned).itemsize
    largest = 0x7FEFFFFFFFFFFFFF if dtype == "float64" else largest_finite(dtype)
    magnitude = rng.integers(0, largest + 1, count, dtype=np.uint64)
    middle = int(rng.integers(0, largest, endpoint=True))
    near = np.clip(middle + rng.normal(size=count) * largest / 50, 0, float(largest) * (1 - 1e-9)).astype(np.uint64)
    magnitude = np.where(rng.random(count) < 0.5, near, magnitude)
    edges = np.array([0, 0, 1, 2, largest, largest - 1, largest // 2, 1 << (width // 2)], np.uint64)
    magnitude = np.where(rng.random(count) < special, rng.choice(edges, count), magnitude)
    sign = rng.integers(0, 2, count, dtype=np.uint64) << np.uint64(width - 1)
    return (magnitude | sign).astype(unsigned)


@st.composite
def grids(draw, dtype: str):
    """(generator, count, width, start, rows, cols, largest sum of exponents) of a chunk of some object."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(1, 40) | st.just(600))
    count, start = draw(st.integers(1, 200) | st.just(1500)), draw(st.integers(0, 100))
    total = -(-(start + count) // width)
    spread = draw(st.integers(0, 20))
    rows = rng.integers(-spread, spread + 1, total).astype(np.int16) if draw(st.booleans()) else NONE
    cols = rng.integers(-spread, spread + 1, width).astype(np.int16) if draw(st.booleans()) else NONE
    return rng, count, width, start, rows, cols, 2 * spread


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(st.data())
def test_linear_values_equal_the_reference(dtype: str, data) -> None:
    rng, count, width, start, rows, cols, reach = data.draw(grids(dtype))
    lowest, highest = STEP_RANGE[dtype]
    step = data.draw(st.integers(lowest + reach, highest - reach))
    integers = rng.integers(-(1 << rng.integers(1, 25)), 1 << rng.integers(1, 25), count).astype(np.int32)
    integers[rng.random(count) < 0.2] = 0
    out = np.empty(count, dtype)
    kernels.linear_values(integers, step, rows, cols, width, start, out)
    exponent = reference.exponents(count, step, rows, cols, width, start)
    expected = reference.linear_values(integers, exponent, dtype).view(dtype)
    largest = np.finfo(dtype).max
    assert np.array_equal(out.view(UNSIGNED[dtype]), np.clip(expected, -largest, largest).view(UNSIGNED[dtype]))


@pytest.mark.parametrize("dtype", STEP_RANGE)
def test_the_largest_numbers_stay_finite(dtype: str) -> None:
    """Masks are filled with them; rounded up to a multiple of the step they would be infinite."""
    largest = 0x7FEFFFFFFFFFFFFF if dtype == "float64" else largest_finite(dtype)
    sign = 1 << (8 * np.dtype(UNSIGNED[dtype]).itemsize - 1)
    bits = np.array([largest, largest | sign, largest - 1], UNSIGNED[dtype])
    lattice = LinearLattice(dtype, STEP_RANGE[dtype][1], 3)
    assert (lattice.values(lattice.quantise(bits, 0), 0) & (sign - 1) <= largest).all()


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_rounded_ordinals_equal_the_reference(dtype: str, data) -> None:
    rng, count, width, start, rows, cols, _ = data.draw(grids(dtype))
    shift, level = data.draw(st.integers(1, 31)), data.draw(st.integers(-200, 1100))
    unit = quarter_octave(dtype)
    models = reference.models(count, level, rows, cols, width, start, unit)
    bits = finite_bits(rng, dtype, count)
    integers = np.empty(count, np.int32)
    kernels.rounded_quantise(bits, shift, unit, level, rows, cols, width, start, integers)
    assert np.array_equal(integers, reference.rounded_quantise(bits, shift, models))
    largest = largest_finite(dtype)
    anything = rng.integers(-(1 << 31), 1 << 31, count).astype(np.int32)
    for coded in (integers, anything):
        out = np.empty(count, UNSIGNED[dtype])
        kernels.rounded_values(coded, shift, unit, level, rows, cols, width, start, largest, out)
        assert np.array_equal(out, reference.rounded_values(coded, shift, models, largest, UNSIGNED[dtype]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(st.data())
def test_deviation_equals_the_reference(dtype: str, data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values, others = (finite_bits(rng, dtype, 700).view(dtype) * np.dtype(dtype).type(2.0**-40) for _ in range(2))
    strange = np.array([np.nan, np.inf, -np.inf], dtype)
    for array in (values, others):
        chosen = rng.random(700) < 0.1
        array[chosen] = rng.choice(strange, int(chosen.sum()))
    with np.errstate(over="ignore"):
        found = kernels.deviation(values, others)
        expected = reference.deviation(values, others)
    assert (found[0], found[3]) == (expected[0], expected[3])
    assert np.allclose(found[1:3], expected[1:3], rtol=1e-12)


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_sums_of_ordinals_equal_the_reference(dtype: str, data) -> None:
    rng, count, width, *_ = data.draw(grids(dtype))
    bits = finite_bits(rng, dtype, count)
    infinite = rng.random(count) < 0.1
    bits[infinite] = largest_finite(dtype) + rng.integers(1, 3)
    shift = data.draw(st.sampled_from([0, 3] if dtype != "float64" else [29]))
    rows, cols, counts = (np.zeros(size, np.int64) for size in (-(-count // width), width, -(-count // width) + width))
    kernels.order_sums(bits, width, largest_finite(dtype), shift, rows, cols, counts)
    for found, expected in zip(
        (rows, cols, counts), reference.order_sums(bits, width, largest_finite(dtype), shift), strict=True
    ):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(st.data())
def test_sums_of_values_and_squares_in_steps_equal_numpys(dtype: str, data) -> None:
    rng, count, width, start, rows, cols, reach = data.draw(grids(dtype))
    values, others = (rng.normal(size=count).astype(dtype) for _ in range(2))
    step = data.draw(st.integers(-30 - reach, 30 + reach))
    exponent = reference.exponents(count, step, rows, cols, width, start)
    differences = np.ldexp(values.astype(np.float64) - others.astype(np.float64), -exponent)
    found = kernels.weighted_squares(values, others, step, rows, cols, width, start)
    assert np.isclose(found, (differences**2).sum(), rtol=1e-12)
    values[rng.random(count) < 0.1] = np.nan
    known = np.nan_to_num(values.astype(np.float64))
    place = np.arange(count)
    for squared, summed in ((False, known), (True, known**2)):
        by_rows, by_cols = np.zeros(-(-count // width)), np.zeros(width)
        kernels.value_sums(values, squared, width, by_rows, by_cols)
        assert np.allclose(by_rows, np.bincount(place // width, summed, by_rows.size), atol=1e-9)
        assert np.allclose(by_cols, np.bincount(place % width, summed, width), atol=1e-9)


def decoded() -> bytes:
    """Values of lattices whose steps and values are as small as they may be, one after the other."""
    rng = np.random.default_rng(3)
    integers = rng.integers(-5, 6, 4000).astype(np.int32)
    linear = [LinearLattice(dtype, lowest, 40) for dtype, (lowest, _) in STEP_RANGE.items()]
    rounded = [
        RoundedLattice(dtype, shift, int(rng.integers(-3, 4)), 40) for dtype in ROUNDED for shift in (1, 7, 10, 20, 23)
    ]
    return b"".join(lattice.values(integers, 0).tobytes() for lattice in (*linear, *rounded))


def test_a_process_that_flushes_subnormals_decodes_the_same_bits(tmp_path: Path) -> None:
    assert flushed(decoded, tmp_path / "out") == decoded()
    assert any(0 < word < 1 << 23 for word in np.frombuffer(decoded(), "u4").tolist()), "nothing subnormal is decoded"
