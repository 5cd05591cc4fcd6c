"""Rounded ordinals and coarse linear lattices: error bounds, the sign of 0, and stable decoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.lattice import FLOATS, STEP_RANGE, LinearLattice, floats, step_exponent
from ckstore.codecs.rounded import ROUNDED, RoundedLattice, largest_finite, quarter_octave
from ckstore.codecs.short_floats import SHORT

UNSIGNED = {"float64": np.uint64, "float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NONE = np.empty(0, np.int16)


def seeds() -> st.SearchStrategy[np.random.Generator]:
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def any_finite(rng: np.random.Generator, dtype: str, count: int, *, signed: bool = True) -> np.ndarray:
    """Bits of finite values of any magnitude, a fifth of them zeros, and some the least, the largest and subnormal."""
    magnitude = rng.integers(0, largest_finite(dtype) + 1, count)
    edges = [0, 0, 0, 1, (1 << FLOATS[dtype][0]) - 1, largest_finite(dtype)]
    magnitude = np.where(rng.random(count) < 0.4, rng.choice(edges, count), magnitude)
    sign = rng.integers(0, 1 + signed, count) << (8 * np.dtype(UNSIGNED[dtype]).itemsize - 1)
    return (magnitude | sign).astype(UNSIGNED[dtype])


def orders(bits: np.ndarray) -> np.ndarray:
    """Order-preserving integers, 0 for both zeros."""
    sign = 1 << (8 * bits.itemsize - 1)
    magnitude = (bits & (sign - 1)).astype(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


@st.composite
def rounded_lattices(draw, dtype: str) -> tuple[RoundedLattice, np.random.Generator, int]:
    """A lattice with steps of an eighth of an octave to four, as its rows and columns may be; generator; count."""
    rng = draw(seeds())
    width, count = draw(st.integers(1, 30)), draw(st.integers(1, 200))
    reach = draw(st.sampled_from([0, 4, 40, 200]))
    rows = rng.integers(-reach, reach + 1, -(-count // width)).astype(np.int16) if draw(st.booleans()) else NONE
    cols = rng.integers(-reach, reach + 1, width).astype(np.int16) if draw(st.booleans()) else NONE
    shift = FLOATS[dtype][0] + draw(st.integers(-3, 2))
    level = draw(st.integers(-20, 4 * FLOATS[dtype][1] + 20))
    return RoundedLattice(dtype, shift, level, width, rows, cols), rng, count


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_an_ordinal_is_rounded_up_from_three_eighths_of_a_step(dtype: str, data) -> None:
    lattice, rng, count = data.draw(rounded_lattices(dtype))
    bits = any_finite(rng, dtype, count)
    found = orders(lattice.values(lattice.quantise(bits, 0), 0))
    error = found - orders(bits)
    step = 1 << lattice.shift
    assert (error[found != 0] <= 0.625 * step).all()
    assert (error[found != 0] >= -0.375 * step).all()
    # The distance from 0 of flushed values is at most the sum of the reach and the error.
    assert (np.abs(error[found == 0]) <= (0.625 + 0.625) * step).all()


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_zero_stays_plus_zero_and_nothing_changes_its_sign(dtype: str, data) -> None:
    lattice, rng, count = data.draw(rounded_lattices(dtype))
    bits = any_finite(rng, dtype, count, signed=data.draw(st.booleans()))
    values = lattice.values(lattice.quantise(bits, 0), 0)
    assert (values[orders(bits) == 0] == 0).all()
    assert (orders(values) * np.sign(orders(bits)) >= 0).all()
    assert (np.abs(orders(values)) <= largest_finite(dtype)).all()


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_values_of_at_least_a_step_stay_positive(dtype: str, data) -> None:
    lattice, rng, count = data.draw(rounded_lattices(dtype))
    bits = any_finite(rng, dtype, count, signed=False)
    bits[bits < (1 << lattice.shift)] = 0
    assert lattice.is_above_zero(bits)
    assert (orders(lattice.values(lattice.quantise(bits, 0), 0))[bits > 0] > 0).all()
    bits[rng.integers(count)] = rng.integers(1, 1 << lattice.shift)
    assert not lattice.is_above_zero(bits)


@pytest.mark.parametrize("dtype", ROUNDED)
@given(st.data())
def test_decoded_ordinals_are_their_own_values(dtype: str, data) -> None:
    lattice, rng, count = data.draw(rounded_lattices(dtype))
    integers = lattice.quantise(any_finite(rng, dtype, count), 0)
    values = lattice.values(integers, 0)
    again = lattice.quantise(values, 0)
    assert np.array_equal(lattice.values(again, 0), values)
    inside = (orders(values) != 0) & (np.abs(orders(values)) < largest_finite(dtype))
    assert np.array_equal(again[inside], integers[inside])


@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_quarter_octave_is_a_quarter_of_an_octave(dtype: str) -> None:
    bits = np.array([1 << FLOATS[dtype][0] + 2], UNSIGNED[dtype])
    doubled = (bits + 4 * quarter_octave(dtype)).astype(bits.dtype)
    assert floats(doubled, dtype)[0] == 2 * floats(bits, dtype)[0]


@pytest.mark.parametrize("dtype", STEP_RANGE)
@given(st.data())
def test_a_linear_value_is_off_by_reach_steps_and_a_rounding(dtype: str, data) -> None:
    """The bound also holds for values of 16 bits: a rounded value is on the grid already."""
    rng = data.draw(seeds())
    count, width = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 30))
    lowest, highest = STEP_RANGE[dtype]
    lowest, highest = max(lowest, -60), min(highest, 60)
    scale = 2.0 ** data.draw(st.integers(lowest + 22, highest))
    values = rng.normal(size=count) * scale * (rng.random(count) < 0.8)
    carrier = "float32" if dtype in SHORT else dtype
    words = np.clip(values, -60000, 60000).astype(carrier) if dtype == "float16" else values.astype(carrier)
    bits = words.view(UNSIGNED[carrier])
    if dtype == "float16":
        bits = words.astype(np.float16).view(np.uint16)
    elif dtype == "bfloat16":
        bits = (bits >> np.uint32(16)).astype(np.uint16)
    doubles = floats(bits, dtype).astype(np.float64)
    finest = step_exponent(0.0, float(np.abs(doubles).max()), dtype)
    step = data.draw(st.integers(finest, min(highest, finest + 25)))
    rows = rng.integers(0, 1 + min(5, STEP_RANGE[dtype][1] - step), -(-count // width)).astype(np.int16)
    rows = rows if data.draw(st.booleans()) else NONE
    lattice = LinearLattice(dtype, step, width, rows)
    steps = 2.0 ** (step + (rows[np.arange(count) // width].astype(float) if rows.size else np.zeros(count)))
    integers = lattice.quantise(bits, 0)
    decoded = lattice.values(integers, 0)
    error = np.abs(floats(decoded, dtype).astype(np.float64) - doubles)
    assert (error <= 0.5 * steps).all()
    assert (decoded[bits << 1 == 0] == 0).all()
    again = lattice.quantise(decoded, 0)
    assert np.array_equal(lattice.values(again, 0), decoded)
    if dtype not in SHORT:
        assert np.array_equal(again, integers)
