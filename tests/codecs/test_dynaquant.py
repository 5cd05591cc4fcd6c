"""Inshrinkerator: its split and its levels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.codebook import as_bits, as_float32
from ckstore.codecs.schemes.dynaquant import (
    ACCURACY,
    EMBEDDING_LEVELS,
    LEVELS,
    METRICS,
    PROTECT,
    PRUNE,
    DynaQuantSettings,
    RankStatistics,
    Split,
    Treatment,
    assign,
    kmeans_round,
    kmeans_start,
    level_codebook,
    weighted_kmeans,
)
from ckstore.errors import UsageError

SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-39, np.nan, np.inf, -np.inf, 3.4028235e38, -1.1754944e-38], np.float32)

settings_of = st.builds(
    DynaQuantSettings,
    st.sampled_from(LEVELS),
    st.sampled_from(PRUNE),
    st.sampled_from(PROTECT),
    st.sampled_from(METRICS),
    st.sampled_from(EMBEDDING_LEVELS),
)


def weights(seed: int, count: int = 20_000) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(5, count) * 0.02).astype(np.float32)


def quantise(values, settings, sensitivity=None, dtype="float32"):
    """Quantise one layer that is the only one of its type: the paper's one-shot compression."""
    ranks = RankStatistics()
    ranks.add(values, sensitivity)
    split = ranks.split(settings, known=sensitivity is not None)
    return treated(values, Treatment(split, settings.levels, sensitivity), dtype)


def treated(values, treatment, dtype="float32"):
    lattice = level_codebook(values, treatment, dtype)
    return (lattice, *assign(lattice, values, treatment))


@pytest.mark.parametrize(
    "wrong",
    [
        {"levels": 3},
        {"levels": 33},
        {"prune": -0.1},
        {"prune": 0.9, "protect": 0.1},
        {"metric": "size"},
        {"embedding_levels": 64},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError):
        DynaQuantSettings(**wrong)


@pytest.mark.long
def test_a_bins_middle_is_within_the_relative_accuracy():
    values = np.exp(np.random.default_rng(1).uniform(-80, 80, 5000)).astype(np.float32)
    assert ACCURACY <= 0.01
    for value in np.concatenate([values, -values]):
        one = np.array([value])
        treatment = Treatment(Split(0, 0, 1 << 14, 1 << 14), 16, one)
        (middle,) = level_codebook(one, treatment).centroids[[0 if value < 0 else 1]]
        assert abs(middle - value) <= ACCURACY * abs(value)


@given(settings_of, st.integers(0, 2**32 - 1))
def test_the_split_takes_the_shares_it_is_asked_for(settings, seed):
    values = weights(seed)
    sensitivity = np.abs(weights(seed + 1) * values)
    lattice, indices, aside = quantise(values, settings, sensitivity)
    decoded = lattice.values(lattice.numbers(indices, aside)).view(np.float32)
    protected = indices == lattice.levels - 1
    either = np.zeros(values.size, bool)
    for ranks in (np.abs(values), sensitivity):
        assert np.all(protected[ranks > np.quantile(ranks, 1 - settings.protect) * 1.02])
        # Whole bins go to one side: no further off than half the fullest bin, and that is below 1 % of the elements.
        either |= ranks >= np.quantile(ranks, 1 - settings.protect - 0.005)
    assert not np.any(protected & ~either)
    ranks = np.abs(values) if settings.metric == "magnitude" else sensitivity
    pruned = ranks < np.quantile(ranks, settings.prune) * 0.98
    assert not np.any(decoded[pruned & ~protected])
    assert np.array_equal(aside, as_bits(values[protected], "bfloat16"))
    assert np.array_equal(decoded[protected], as_float32(as_bits(values[protected], "bfloat16"), "bfloat16"))
    assert np.all(np.abs(decoded[protected] / values[protected] - 1) <= 2.0**-8)
    assert lattice.levels <= settings.levels + 2


def test_the_largest_by_either_metric_are_protected_with_any_pruning_metric():
    """Large weights without a gradient, and small ones with a large gradient; one metric alone sees half."""
    values = weights(3)
    sensitivity = np.abs(values)[np.random.default_rng(3).permutation(values.size)]
    large, sensitive = (ranks > np.quantile(ranks, 0.995) * 1.02 for ranks in (np.abs(values), sensitivity))
    assert np.mean(large & sensitive) < 0.001
    for metric in METRICS:
        settings = DynaQuantSettings(8, 0.3, 0.005, metric)
        lattice, indices, _ = quantise(values, settings, sensitivity)
        protected = indices == lattice.levels - 1
        assert np.all(protected[large | sensitive])
        assert np.mean(protected) < 0.014


def test_pruning_by_sensitivity_is_not_pruning_by_magnitude():
    values = weights(3)
    sensitivity = 1 / np.abs(values)
    settings = DynaQuantSettings(prune=0.3, metric="sensitivity")
    lattice, indices, aside = quantise(values, settings, sensitivity)
    decoded = lattice.values(lattice.numbers(indices, aside)).view(np.float32)
    unprotected = indices != lattice.levels - 1
    assert not np.any(decoded[(np.abs(values) > np.quantile(np.abs(values), 0.72)) & unprotected])
    by_magnitude = quantise(values, DynaQuantSettings(prune=0.3))
    without = quantise(values, settings)
    assert np.array_equal(without[1], by_magnitude[1]), "magnitude replaces an unknown sensitivity"


def test_one_share_is_pruned_of_the_layers_of_a_type_together():
    """Of a layer whose weights are a quarter of another's, more: the thresholds come from the merged histograms."""
    layers = [weights(1), weights(2) / 4]
    ranks = RankStatistics()
    for layer in layers:
        one = RankStatistics()
        one.add(layer, None)
        ranks.merge(one)
    split = ranks.split(DynaQuantSettings(8, 0.3, 0.005), known=False)
    whole = np.concatenate(layers)
    pruned, protected = [], []
    for layer in layers:
        lattice, indices, _ = treated(layer, Treatment(split, 8, None))
        pruned.append(np.mean(np.abs(layer) < np.quantile(np.abs(whole), 0.3) * 0.98))
        zeros = indices[np.abs(layer) < np.quantile(np.abs(whole), 0.3) * 0.98]
        assert np.all(zeros == lattice.zero)
        protected.append(np.mean(indices == lattice.levels - 1))
    assert pruned[1] > 2 * pruned[0]
    assert sum(pruned) / 2 == pytest.approx(0.3, abs=0.02)
    assert protected[1] < protected[0]
    assert sum(protected) / 2 == pytest.approx(0.005, abs=0.001)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_protected_elements_of_16_bits_are_exact(dtype):
    bits = as_bits(weights(4), dtype)
    values = as_float32(bits, dtype)
    lattice, indices, aside = quantise(values, DynaQuantSettings(protect=0.1), dtype=dtype)
    decoded = lattice.values(lattice.numbers(indices, aside))
    protected = indices == lattice.levels - 1
    assert np.count_nonzero(protected) > 1000
    assert np.array_equal(decoded[protected], bits[protected])


@given(settings_of, st.integers(0, 2**32 - 1))
def test_hostile_elements_take_a_level_and_decode_finite(settings, seed):
    rng = np.random.default_rng(seed)
    values = weights(seed, 500)
    values[rng.random(500) < 0.3] = rng.choice(SPECIAL)
    values[rng.random(500) < 0.3] = rng.choice(SPECIAL)
    sensitivity = np.abs(weights(seed + 1, 500))
    sensitivity[rng.random(500) < 0.3] = rng.choice(SPECIAL)
    lattice, indices, aside = quantise(values, settings, sensitivity)
    decoded = lattice.values(lattice.numbers(indices, aside)).view(np.float32)
    assert np.all(np.isfinite(decoded))
    lost = ~np.isfinite(values) | (np.abs(values) < np.finfo(np.float32).tiny)
    assert not np.any(decoded[lost])
    assert np.all(indices[lost] == lattice.zero)


@pytest.mark.parametrize("values", [[], [0.0, -0.0, 1e-40], [np.nan], [0.5] * 9, [-2.0, 3.0]])
def test_few_distinct_values_are_levels_of_their_own(values):
    values = np.array(values, np.float32)
    lattice, indices, aside = quantise(values, DynaQuantSettings(4, 0.0, 0.0005))
    decoded = lattice.values(lattice.numbers(indices, aside)).view(np.float32)
    expected = np.where(np.isfinite(values) & (np.abs(values) > 1e-30), values, 0)
    assert np.all(np.abs(decoded - expected) <= 0.01 * np.abs(expected))


@given(st.integers(1, 400), st.integers(2, 32), st.integers(0, 2**32 - 1))
def test_every_round_of_kmeans_is_an_improvement(size, count, seed):
    rng = np.random.default_rng(seed)
    points = np.unique(rng.normal(size=size) * np.exp(rng.normal(size=size)))
    masses = rng.random(points.size) ** rng.integers(1, 20) + 1e-12

    def cost(centroids: np.ndarray) -> float:
        return float(masses @ ((points[:, None] - centroids) ** 2).min(axis=1))

    settled = weighted_kmeans(points, masses, count)
    assert settled.size == min(count, points.size)
    assert np.all(np.diff(settled) > 0)
    assert np.allclose(kmeans_round(points, masses, settled), settled)
    centroids = np.sort(rng.choice(points, min(count, points.size), replace=False))
    for _ in range(30):
        moved = kmeans_round(points, masses, centroids)
        assert cost(moved) <= cost(centroids) * (1 + 1e-12) + 1e-15
        centroids = moved


def test_kmeans_settles_near_the_best_of_many_random_starts():
    rng = np.random.default_rng(12)
    points = np.unique(weights(12, 1500).astype(np.float64))
    masses = 0.2 / points.size + 0.8 * np.abs(points) / np.abs(points).sum()

    def cost(centroids: np.ndarray) -> float:
        return float(masses @ ((points[:, None] - centroids) ** 2).min(axis=1))

    for count in (4, 8, 16, 32):
        costs = []
        for _ in range(20):
            centroids = np.sort(rng.choice(points, count, replace=False))
            for _ in range(50):
                centroids = kmeans_round(points, masses, centroids)
            costs.append(cost(centroids))
        assert cost(weighted_kmeans(points, masses, count)) <= 1.02 * min(costs)


def test_kmeans_begins_far_apart_and_anywhere():
    """k-means++: whatever is drawn, each of a few clusters far from each other gets a centroid; the weights count."""
    rng = np.random.default_rng(2)
    points = np.unique(rng.normal(size=(8, 100)) * 1e-3 + np.arange(8)[:, None])
    for masses in (np.ones(points.size), rng.random(points.size) + 1e-6):
        for _ in range(20):
            start = kmeans_start(points, masses, rng.random((8, 1)))
            assert np.array_equal(np.rint(start), np.arange(8))
    heavy = np.where(np.arange(points.size) == 37, 1.0, 1e-12)
    assert points[37] in kmeans_start(points, heavy, rng.random((1, 1)))
    draws = np.array([[0.0], [np.nextafter(1, 0)], [0.5], [np.nextafter(1, 0)]])
    assert np.unique(kmeans_start(points[:5], np.ones(5), draws)).size == 4, "no point is taken twice"


def test_the_same_values_have_the_same_levels_and_similar_ones_similar_levels():
    """Otherwise versions would converge to different levels, and nearly unchanged values would change levels."""
    before = weights(12, 200_000)
    after = before * np.float32(1.001)
    for levels in (4, 8, 16, 32):
        settings = DynaQuantSettings(levels, 0.2, 0.005)
        lattice, indices, _ = quantise(before, settings)
        again, same, _ = quantise(before + 0, settings)
        assert np.array_equal(again.centroids, lattice.centroids)
        assert np.array_equal(same, indices)
        assert np.mean(quantise(after, settings)[1] != indices) < 0.1, levels


def test_more_levels_lose_less():
    values = weights(8)
    errors = []
    for levels in LEVELS:
        lattice, indices, aside = quantise(values, DynaQuantSettings(levels, 0.0, 0.0005))
        errors.append(float(np.mean((lattice.values(lattice.numbers(indices, aside)).view(np.float32) - values) ** 2)))
    assert errors == sorted(errors)


def test_ranks_of_other_sizes_are_refused():
    with pytest.raises(UsageError):
        RankStatistics().add(np.zeros(5, np.float32), np.zeros(4, np.float32))
