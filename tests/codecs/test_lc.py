"""LC-Checkpoint: the paper's claims about its buckets, its promotion and its merging."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.codecs.codebook import CodebookLattice, codebook, differences
from ckstore.codecs.integers import encode_integers
from ckstore.codecs.schemes.lc import SPLIT, assign, bucket_codebook, promoted
from ckstore.errors import UsageError

SPECIAL = np.array([0.0, -0.0, 1e-45, -1e-39, np.nan, np.inf, -np.inf, 3.4028235e38, -1.1754944e-38], np.float32)


def changes_of(seed: int, count: int = 2000) -> np.ndarray:
    """Changes over some 20 octaves, special values among them."""
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=count) * np.exp(rng.normal(size=count) * 2)).astype(np.float32)
    values[:: count // 20] = rng.choice(SPECIAL, values[:: count // 20].size)
    return values


def quantised(
    values: np.ndarray, bits: int, dtype: str = "float32", split: int = 0
) -> tuple[CodebookLattice, np.ndarray]:
    lattice = bucket_codebook(values, bits, dtype, split)
    return lattice, assign(lattice, values, split)


def test_buckets_of_a_few_values() -> None:
    values = np.array([4.0, 5.0, -1.5, 0.001], np.float32)
    for bits, found in ((2, [4.5, 4.5, -1.5, 0.0010000000474974513]), (1, [4.5, 4.5, 0.0, 0.0])):
        lattice, indices = quantised(values, bits)
        assert lattice.centroids[indices].tolist() == found


def buckets(values: np.ndarray) -> list[tuple[int, int] | None]:
    """Return (exponent, sign) of each value, None for values that count as 0; by frexp, not by bits."""
    result: list[tuple[int, int] | None] = []
    for value in values.astype(np.float64).tolist():
        plain = np.isfinite(value) and abs(value) >= 2.0**-126
        result.append((int(np.frexp(value)[1]), int(value < 0)) if plain else None)
    return result


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_promotion_keeps_the_buckets_of_largest_exponent(bits, seed):
    values = changes_of(seed)
    lattice, indices = quantised(values, bits)
    decoded = lattice.centroids[indices]
    members: dict[tuple[int, int], list[int]] = {}
    for place, bucket in enumerate(buckets(values)):
        if bucket is not None:
            members.setdefault(bucket, []).append(place)
        else:
            assert decoded[place] == 0
    kept = {bucket for bucket, places in members.items() if decoded[places[0]] != 0}
    assert len(kept) == min(len(members), 2**bits - 1)
    assert lattice.levels == len(kept) + 1
    for bucket, places in members.items():
        if bucket in kept:
            mean = values[places].astype(np.float64).mean()
            assert np.all(decoded[places] == decoded[places[0]])
            assert abs(decoded[places[0]] - mean) <= 2.0**-23 * abs(mean)
        else:
            assert not np.any(decoded[places])
            assert all(exponent >= bucket[0] for exponent, _ in kept)


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_no_change_is_off_by_more_than_its_bucket(bits, seed):
    values = changes_of(seed)
    finite = np.isfinite(values)
    lattice, indices = quantised(values, bits)
    decoded = lattice.centroids[indices].astype(np.float64)
    error = np.abs(decoded - values)[finite]
    kept = decoded[finite] != 0
    assert np.all(error[kept] < np.abs(values[finite][kept])), "a bucket is as wide as its smallest magnitude"
    smallest = np.abs(decoded[finite][kept]).min()
    assert np.all(np.abs(values[finite][~kept]) < 2 * smallest), "values that become 0 have no larger exponent"


def test_a_mean_stays_in_its_bucket_though_sums_are_rounded():
    largest = np.nextafter(np.float32(2), np.float32(1))
    values = np.array([largest, -largest, 4.0], np.float32)
    counts, sums = np.zeros(512, np.int64), np.zeros(512)
    counts[values.view(np.uint32) >> 23] = 1
    sums[values.view(np.uint32) >> 23] = values * (1 + 1e-6)
    assert promoted(counts, sums, 8, "float32", 0).centroids.tolist() == [
        -largest,
        0.0,
        largest,
        np.float32(4 * (1 + 1e-6)),
    ]


def test_of_two_last_buckets_the_fuller_one_is_kept():
    values = np.array([8.0, -1.0, -1.5, 1.0], np.float32)
    lattice, _ = quantised(values, 2)
    assert lattice.levels == 4
    lattice, _ = quantised(np.append(values, -8.0).astype(np.float32), 2)
    assert lattice.centroids.tolist() == [-8.0, -1.25, 0.0, 8.0]


@pytest.mark.parametrize("values", [[], [0.0, -0.0], [np.nan, np.inf, 1e-42]])
def test_no_change_at_all_is_a_single_level(values):
    lattice, indices = quantised(np.array(values, np.float32), 3)
    assert lattice.centroids.tolist() == [0.0]
    assert not np.any(indices)


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(UsageError):
        quantised(np.ones(1, np.float32), bits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_errors_do_not_add_up_along_a_chain(dtype):
    """The paper's reason for quantising against decoded values: the error stays that of one version."""
    rng = np.random.default_rng(11)
    weights = rng.normal(size=20_000).astype(np.float32)
    first = codebook(np.empty(0), dtype)
    state = first.values(first.nearest(weights * 0))
    errors = []
    for version in range(8):
        weights += (rng.normal(size=weights.size) * 0.05 / (1 + version)).astype(np.float32)
        bits = weights.view(np.uint32) if dtype == "float32" else (weights.view(np.uint32) >> 16).astype(np.uint16)
        lattice, indices = quantised(differences(bits, state, dtype), 4, dtype)
        state = lattice.add(state, indices)
        exact, decoded = (
            (array if dtype == "float32" else array.astype(np.uint32) << np.uint32(16)).view(np.float32)
            for array in (bits, state)
        )
        errors.append(float(np.sqrt(np.mean((exact - decoded) ** 2))))
    assert errors[-1] < errors[1] < errors[0]


def test_without_a_parent_the_values_are_the_change():
    values = np.random.default_rng(2).normal(size=500).astype(np.float32)
    lattice, indices = quantised(differences(values.view(np.uint32), np.zeros(500, np.uint32), "float32"), 3)
    assert np.array_equal(lattice.values(indices), lattice.add(np.zeros(500, np.uint32), indices))


@given(st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_each_bit_that_splits_a_bucket_halves_the_error(split, seed):
    values = np.random.default_rng(seed).normal(size=4000).astype(np.float32)
    errors = []
    for leading in (split - 1, split):
        lattice, indices = quantised(values, 8, split=leading)
        kept = np.abs(values) > 1 / 16
        decoded = lattice.centroids[indices]
        assert np.all(np.abs(decoded - values)[kept] < np.abs(values[kept]) / 2**leading)
        errors.append(float(np.sqrt(np.mean((decoded - values)[kept] ** 2))))
    assert errors[1] < 0.65 * errors[0]


def test_a_merged_change_takes_the_place_of_all_of_a_chain():
    """It is smaller than they are, and as near to the original."""
    rng = np.random.default_rng(4)
    start = rng.normal(size=50_000).astype(np.float32)
    exact, previous, sizes = start.copy(), start.view(np.uint32), 0
    for _ in range(6):
        exact += (rng.normal(size=exact.size) * 1e-3).astype(np.float32)
        change = quantised(differences(exact.view(np.uint32), previous, "float32"), 3)
        state = change[0].add(previous, change[1])
        sizes += len(encode_integers(change[1]))
        changes, previous = differences(state, start.view(np.uint32), "float32"), state
    lattice, indices = quantised(changes, 8, split=SPLIT)
    assert len(encode_integers(indices)) < 0.5 * sizes
    together = lattice.add(start.view(np.uint32), indices)
    errors = [float(np.sqrt(np.mean((bits.view(np.float32) - exact) ** 2))) for bits in (state, together)]
    assert errors[1] < 1.2 * errors[0]
    unchanged = state == start.view(np.uint32)
    assert np.all(changes[unchanged] == 0)
