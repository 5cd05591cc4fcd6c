"""The kernels of the non-uniform quantisers against their NumPy reference, on adversarial floats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.kernels import codebook as kernels
from tests.kernels import reference

SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x80800000, 0x800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
     0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x477FEFFF, 0x477FF000],
    np.uint32,
)  # fmt: skip


def adversarial(rng: np.random.Generator, count: int) -> np.ndarray:
    """Words of values around one power of ten, a third of them special ones, some any bits at all."""
    words = (rng.normal(size=count) * 10.0 ** rng.integers(-38, 38)).astype(np.float32).view(np.uint32).copy()
    special = rng.random(count) < 0.2
    words[special] = rng.choice(SPECIAL, int(special.sum()))
    anything = rng.random(count) < 0.2
    words[anything] = rng.integers(0, 1 << 32, int(anything.sum()), dtype=np.uint32)
    return words


def finite_centroids(rng: np.random.Generator, words: np.ndarray, most: int) -> np.ndarray:
    field = words >> 23 & 255
    normal = np.unique(words[(field != 0) & (field != 255)].view(np.float32))
    return np.sort(rng.choice(normal, min(most, normal.size), replace=False))


@st.composite
def chunks(draw):
    """(words, other words, generator)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(20, 300))
    return adversarial(rng, count), adversarial(rng, count), rng


@given(chunks(), st.integers(1, 256))
def test_nearest_add_and_difference_equal_the_reference(case, most):
    words, base, rng = case
    centroids = finite_centroids(rng, words, most)
    wide = centroids.astype(np.float64)
    midpoints = np.append((wide[1:] + wide[:-1]) / 2, np.inf)
    indices = np.empty(words.size, np.uint8)
    kernels.nearest(words, midpoints, 0, indices)
    assert np.array_equal(indices, reference.codebook_nearest(words, centroids, 0))

    out = np.empty_like(words)
    kernels.add(base, indices, centroids, out)
    assert np.array_equal(out, reference.codebook_add(base, indices, centroids))
    assert np.all(np.isfinite(out.view(np.float32)))
    assert np.all((out >> 23 & 255 != 0) | (out == 0)), "nothing subnormal, no -0.0"

    kernels.difference(words, base, out)
    expected = reference.codebook_difference(words, base)
    assert np.array_equal(out.view(np.float32), expected, equal_nan=True)


def test_nearest_around_every_midpoint_and_every_edge_of_a_bin():
    rng = np.random.default_rng(6)
    edges = np.arange(1 << 15, dtype=np.uint32) << np.uint32(17)
    for centroids in (finite_centroids(rng, adversarial(rng, 2000), 256), np.linspace(1, 1.001, 200, dtype=np.float32)):
        wide = centroids.astype(np.float64)
        between = ((wide[1:] + wide[:-1]) / 2).astype(np.float32).view(np.uint32)
        words = np.concatenate([edges, edges - np.uint32(1), between, between - np.uint32(1), between + np.uint32(1)])
        indices = np.empty(words.size, np.uint8)
        kernels.nearest(words, np.append((wide[1:] + wide[:-1]) / 2, np.inf), 7, indices)
        assert np.array_equal(indices, reference.codebook_nearest(words, centroids, 7))


@pytest.mark.parametrize("distance", [0, 1, 2, 22, 23, 24, 25, 26, 30, 53, 54, 60, 200])
def test_a_sum_by_way_of_float64_is_rounded_once(distance):
    """Exponents apart by any distance, mantissas that make ties: where rounding twice would show if it could."""
    rng = np.random.default_rng(distance)
    mantissas = rng.choice([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF], (2, 4000)).astype(np.uint32)
    signs = rng.integers(0, 2, (2, 4000)).astype(np.uint32) << np.uint32(31)
    base = signs[0] | np.uint32(230 << 23) | mantissas[0]
    added = (signs[1] | np.uint32((230 - distance) << 23) | mantissas[1]).view(np.float32)
    out = np.empty(1, np.uint32)
    zero = np.zeros(1, np.uint8)
    for k in range(base.size):
        kernels.add(base[k : k + 1], zero, added[k : k + 1], out)
        assert out[0] == reference.codebook_add(base[k : k + 1], zero, added[k : k + 1])[0]


@given(chunks())
def test_histograms_and_splits_equal_the_reference(case):
    words, ranks, rng = case
    for shift in (23, 21):
        buckets = 1 << (32 - shift)
        counts, sums = np.zeros(buckets, np.int64), np.zeros(buckets)
        kernels.bucket_statistics(words, counts, sums, shift)
        expected_counts, expected_sums = reference.bucket_statistics(words, shift)
        assert np.array_equal(counts, expected_counts)
        assert np.array_equal(sums, expected_sums)

    bins = reference.rank_bins(words, ranks)
    ranked = np.zeros(kernels.BINS // 2, np.int64)
    kernels.rank_counts(words, ranks, ranked)
    assert np.array_equal(ranked, np.bincount(bins[bins >= 0], minlength=ranked.size))
    split = tuple(rng.choice(np.concatenate([bins, reference.rank_bins(words, words), [0, 1 << 14]]), 4).tolist())
    levels = np.zeros(kernels.BINS, np.int64)
    kernels.level_counts(words, ranks, split, levels)
    assert np.array_equal(levels, reference.level_counts(words, ranks, split))
    indices = rng.integers(0, 256, words.size).astype(np.uint8)
    expected = reference.split_indices(indices, words, ranks, split, 3, 200)
    kernels.split_indices(words, ranks, split, 3, 200, indices)
    assert np.array_equal(indices, expected)


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (3, 2), (40, 7), (9, 600), (130, 130)]), st.integers(-126, 106)
)
def test_products_equal_the_reference(seed, shape, step):
    rng = np.random.default_rng(seed)
    rows, width = shape
    rank = int(rng.integers(1, min(shape) + 1))
    words = adversarial(rng, rows * width)
    numbers = rng.integers(-90, 91, rank * (1 + rows + width)).astype(np.int32)
    first, last = sorted(rng.integers(0, rows + 1, 2).tolist())
    part = words[first * width : last * width].copy()
    out = np.empty_like(part)
    assert kernels.add_products(part, numbers, rank, width, step, first * width, out)
    assert np.array_equal(out, reference.products_add(part, numbers, rank, width, step, first * width))


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        ([1, 1 << 30, 1, 1], True), ([1, -(1 << 30), 1, 1], True), ([1, 1 << 30, 1, 2], False),
        ([1 << 20, 1 << 11, 0, 0], False), ([0, -(1 << 31), 1, 1], False), ([1, 1, 46341, 46341], False),
        ([-(1 << 31), 0, 0, 0], False), ([1, 46340, 1, 46340], True),
    ],
)  # fmt: skip
def test_sums_beyond_32_bits_are_refused(numbers, fits):
    """A weight, two rows of one number, and one column."""
    out = np.empty(2, np.uint32)
    assert kernels.add_products(np.zeros(2, np.uint32), np.array(numbers, np.int32), 1, 1, 0, 0, out) == fits


@pytest.mark.parametrize(
    ("rank", "width", "start", "count"),
    [(0, 2, 0, 4), (3, 2, 0, 4), (2, 0, 0, 4), (2, 2, 1, 4), (2, 2, 0, 5), (2, 2, 4, 4)],
)
def test_products_of_other_sizes_are_refused(rank, width, start, count):
    numbers = np.zeros(2 * (1 + 3 + 2), np.int32)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.add_products(np.zeros(count, "u4"), numbers, rank, width, 0, start, np.empty(count, "u4"))
