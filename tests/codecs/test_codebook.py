"""The codebook lattice: lookup, nearest level, additive values, differences of indices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.codebook import (
    CODEBOOK_DTYPES,
    CodebookLattice,
    as_bits,
    as_float32,
    codebook,
    differences,
    has_unrepresentable,
)
from ckstore.codecs.integers import decode_integers, encode_integers
from ckstore.codecs.lattice import FLOATS
from ckstore.errors import IntegrityError, UsageError
from tests.children import flushed

HOSTILE = np.array(
    [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 1.0, -1.0, 6e-8, 65504.0], np.float32
)


def of(values, dtype: str = "float32", protected: bool = False) -> CodebookLattice:
    return CodebookLattice(dtype, np.array(values, np.float32), protected)


def hostile_bits(dtype: str) -> np.ndarray:
    if dtype == "float32":
        return HOSTILE.view(np.uint32)
    return np.arange(1 << 16).astype(np.uint16)


def doubles(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Values of bits as float64, without ckstore."""
    if dtype == "bfloat16":
        bits, dtype = bits.astype(np.uint32) << np.uint32(16), "float32"
    with np.errstate(invalid="ignore"):
        return bits.view(dtype).astype(np.float64)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float64", [0.0, 1.0]),
        ("float32", []),
        ("float32", [1.0, 0.0]),
        ("float32", [1.0, 1.0]),
        ("float32", [0.0, np.inf]),
        ("float32", [np.nan]),
        ("float32", [-0.0, 1.0]),
        ("float32", [1e-40, 1.0]),
        ("float32", list(range(257))),
        ("float32", [[0.0, 1.0]]),
    ],
)
def test_invalid_codebooks_are_refused(dtype, values):
    with pytest.raises(UsageError):
        of(values, dtype)


def test_centroids_of_another_dtype_and_a_level_too_many_are_refused():
    with pytest.raises(UsageError):
        CodebookLattice("float32", np.array([0.0, 1.0]))  # type: ignore[arg-type]
    assert of(range(255), protected=True).levels == 256
    with pytest.raises(UsageError):
        of(range(256), protected=True)


def test_codebooks_of_any_finite_values_are_sorted_and_hold_zero():
    lattice = codebook(np.array([3.0, -1e-40, 3.0, -2.0, 1e-39, -0.0]), "float32")
    assert lattice.centroids.tolist() == [-2.0, 0.0, 3.0]
    assert lattice.zero == 1
    assert not np.signbit(lattice.centroids[1])


@given(st.integers(1, 256), st.integers(0, 2**32 - 1))
def test_the_nearest_level_is_the_nearest(count, seed):
    rng = np.random.default_rng(seed)
    centroids = np.unique(rng.normal(size=count).astype(np.float32))
    lattice = of(centroids)
    values = np.concatenate([rng.normal(size=300).astype(np.float32) * 2, centroids])
    distance = np.abs(values.astype(np.float64)[:, None] - centroids.astype(np.float64))
    indices = lattice.nearest(values)
    assert indices.dtype == np.uint8
    assert np.array_equal(np.take_along_axis(distance, indices[:, None].astype(np.intp), 1)[:, 0], distance.min(1))
    assert np.array_equal(lattice.nearest(centroids), np.arange(centroids.size))
    assert np.array_equal(lattice.nearest(lattice.values(indices).view(np.float32)), indices)


def test_a_midpoint_belongs_to_the_lower_level_and_non_finite_values_to_that_of_zero():
    lattice = of([-4.0, 0.5, 2.0, 1e38])
    values = np.array([1.25, np.nextafter(np.float32(1.25), np.float32(2)), -np.inf, np.inf, np.nan, -1e-42], "f4")
    assert lattice.nearest(values).tolist() == [1, 2, 1, 1, 1, 1]
    assert of([7.0]).nearest(values).tolist() == [0] * 6


@pytest.mark.parametrize("dtype", CODEBOOK_DTYPES)
def test_values_are_the_centroids_in_the_dtype(dtype):
    lattice = of([-3.4e38, -1.0, 0.0, 1e-5, 0.1, 3.4e38], dtype)
    bits = lattice.values(np.array([5, 4, 3, 2, 1, 0, 4], np.uint8))
    assert bits.dtype == (np.uint32 if dtype == "float32" else np.uint16)
    largest = {"float32": float(np.float32(3.4e38)), "bfloat16": 3.3895313892515355e38, "float16": 65504.0}[dtype]
    assert doubles(bits, dtype)[0] == largest
    assert doubles(bits, dtype)[-2] == -largest
    assert abs(doubles(bits, dtype)[1] / 0.1 - 1) <= 2.0 ** -FLOATS[dtype][0]
    assert bits[3] == 0
    assert not has_unrepresentable(bits, dtype)


@pytest.mark.parametrize("dtype", CODEBOOK_DTYPES)
def test_protected_elements_keep_their_bits_in_their_numbers(dtype):
    lattice = of([-1.0, 0.0, 1.0], dtype, protected=True)
    assert lattice.levels == 4
    kept = as_bits(np.array([5.5, -7.25], np.float32), "bfloat16" if dtype == "float32" else dtype)
    indices = np.array([3, 0, 3, 2], np.uint8)
    numbers = lattice.numbers(indices, kept)
    bits = lattice.values(numbers)
    assert doubles(bits, dtype).tolist() == [5.5, -1.0, -7.25, 1.0]
    assert doubles(lattice.values(lattice.numbers(indices[1:2], kept[:0])), dtype).tolist() == [-1.0]
    assert np.array_equal(lattice.indices(numbers), indices)
    assert np.array_equal(lattice.restored(lattice.stored(numbers)), numbers)
    for base in (indices[::-1], np.array([250, 0, 3, 1], np.uint8)):
        assert np.array_equal(lattice.apply(base, lattice.delta(numbers, base)), numbers)
        assert lattice.delta(numbers, base)[[0, 2]].tolist() == (4 + kept.astype(int)).tolist()
    for wrong in (3 + (1 << 16), -1):
        with pytest.raises(IntegrityError):
            lattice.restored(np.array([wrong - lattice.zero], np.int32))
    with pytest.raises(IntegrityError):
        lattice.apply(indices, np.full(4, 4 + (1 << 16), np.int32))
    with pytest.raises(UsageError):
        lattice.add(bits, np.zeros(4, np.uint8))


def test_an_index_without_a_level_is_found():
    lattice = of([0.0, 1.0, 2.0])
    for call in (lambda n: lattice.values(n), lambda n: lattice.add(np.zeros(2, np.uint32), n)):
        with pytest.raises(IntegrityError, match="no level 3"):
            call(np.array([0, 3], np.uint8))


@pytest.mark.parametrize("dtype", CODEBOOK_DTYPES)
def test_sums_stay_finite_for_any_base(dtype):
    base = hostile_bits(dtype)
    lattice = of([-3.4e38, -1.0, -1e-7, 0.0, 2.0, 3.4e38], dtype)
    for index in range(6):
        bits = lattice.add(base, np.full(base.size, index, np.uint8))
        assert not has_unrepresentable(bits, dtype)
    same = lattice.add(base, np.full(base.size, 3, np.uint8))
    field = base >> FLOATS[dtype][0] & (FLOATS[dtype][1] - 1)
    whole = (field != FLOATS[dtype][1] - 1) & (base << 1 != 0)
    if dtype != "float16":
        whole &= field != 0
    assert np.array_equal(same[whole], base[whole]), "+ 0 changes only values that are subnormal in float32"
    assert not np.any(same[~whole]), "and that becomes +0"


@pytest.mark.parametrize("dtype", CODEBOOK_DTYPES)
def test_changes_added_back_give_the_values(dtype):
    rng = np.random.default_rng(3)
    base = as_bits(rng.normal(size=200).astype(np.float32), dtype)
    bits = as_bits((doubles(base, dtype) + rng.normal(size=200) * 1e-2).astype(np.float32), dtype)
    changes = differences(bits, base, dtype)
    lattice = codebook(changes, dtype)
    indices = lattice.nearest(changes)
    decoded = doubles(lattice.add(base, indices), dtype)
    assert np.allclose(decoded, doubles(bits, dtype), rtol=0, atol=2.0 ** -(FLOATS[dtype][0] - 2))
    if dtype != "float32":
        assert np.array_equal(lattice.add(base, indices), bits)


def test_changes_of_non_finite_values_are_not_numbers():
    bits = np.array([np.nan, np.inf, 1.0, 3e38, 1e-40], np.float32).view(np.uint32)
    base = np.array([1.0, 1.0, np.inf, -3e38, 2.0], np.float32).view(np.uint32)
    changes = differences(bits, base, "float32")
    assert np.isnan(changes[:2]).all()
    assert changes[2:].tolist() == [1.0, float(np.finfo(np.float32).max), -2.0]


@given(st.integers(1, 256), st.integers(1, 256), st.integers(0, 2**32 - 1))
def test_differences_of_indices_round_trip(levels, base_levels, seed):
    """Whatever the codebook of the base: its levels only have to be bytes."""
    rng = np.random.default_rng(seed)
    lattice = of(range(levels))
    indices = rng.integers(0, levels, 500).astype(np.uint8)
    base = rng.integers(0, base_levels, 500).astype(np.uint8)
    delta = lattice.delta(indices, base)
    assert delta.dtype == np.int32
    assert delta.min() >= 0
    assert delta.max() < levels
    assert np.array_equal(delta, [(int(b) - int(n)) % levels for b, n in zip(base, indices, strict=True)])
    assert np.array_equal(lattice.apply(base, delta), indices)
    classes = of(range(base_levels)).classes(base)
    out = np.empty_like(delta)
    decode_integers(encode_integers(delta, classes), out, classes)
    assert np.array_equal(lattice.apply(base, out), indices)


@pytest.mark.parametrize(("levels", "highest"), [(1, 0), (5, 4), (64, 63), (65, 32), (128, 63), (129, 32), (256, 63)])
def test_classes_stay_within_the_coders_range(levels, highest):
    classes = of(range(levels)).classes(np.arange(levels).astype(np.uint8))
    assert classes.dtype == np.uint8
    assert classes.max() == highest
    assert np.all(np.diff(classes.astype(int)) >= 0)


def test_arrays_of_other_sizes_and_dtypes_are_refused():
    lattice, five, six = of([0.0, 1.0]), np.zeros(5, np.uint8), np.zeros(6, np.uint8)
    for call in (lattice.delta, lattice.apply, lambda a, b: lattice.add(a.astype(np.uint32), b)):
        with pytest.raises(IntegrityError):
            call(five, six)
    with pytest.raises(IntegrityError):
        differences(five.astype(np.uint32), six.astype(np.uint32), "float32")
    for values in (np.zeros(3), np.zeros((2, 2), np.float32)):
        with pytest.raises(UsageError):
            lattice.nearest(values)


@pytest.mark.parametrize("dtype", CODEBOOK_DTYPES)
def test_non_finite_values_are_unrepresentable(dtype):
    bits = hostile_bits(dtype)
    finite = np.isfinite(doubles(bits, dtype))
    assert not has_unrepresentable(bits[finite], dtype)
    for word in bits[~finite][:: max(1, int((~finite).sum()) // 50)]:
        assert has_unrepresentable(np.append(bits[finite], word), dtype)
    assert not has_unrepresentable(bits[:0], dtype)
    assert np.array_equal(as_float32(bits, dtype)[finite], doubles(bits, dtype)[finite].astype(np.float32))


def computed() -> bytes:
    """Indices, values and differences of codebooks of all dtypes, one after the other."""
    rng = np.random.default_rng(0)
    found = []
    for dtype in CODEBOOK_DTYPES:
        unsigned = np.uint32 if dtype == "float32" else np.uint16
        base, bits = (rng.integers(0, 1 << 8 * np.dtype(unsigned).itemsize, 20000, dtype=unsigned) for _ in range(2))
        near = rng.integers(0, 1 << 25, 20000).astype(np.uint32)
        if dtype == "float32":
            base[::2] = near[::2]
            bits[::2] = near[::2] + 9
        words = rng.integers(1 << 23, 1 << 25, 200).astype(np.uint32)
        both = np.concatenate((words.view(np.float32), -words.view(np.float32)))
        lattice = CodebookLattice(dtype, np.unique(both[:255]))
        indices = lattice.nearest(differences(bits, base, dtype))
        found += [indices, lattice.add(base, indices), lattice.values(indices), differences(bits, base, dtype)]
    return b"".join(array.tobytes() for array in found)


def test_a_process_that_flushes_subnormals_computes_the_same_bits(tmp_path):
    assert len(computed()) > 100_000
    assert flushed(computed, tmp_path / "out") == computed()
