"""Inshrinkerator, first called DynaQuant: prune some elements, protect some, and quantise the rest.

Agrawal et al., "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic Quantization", SoCC 2024.
Elements are ranked by magnitude and by sensitivity. The lowest ranks by one of the two become 0. The highest by either
are protected: stored separately in 16 bits. The rest is quantised to the levels of a weighted k-means over a histogram
of relative accuracy. `RankStatistics`, merged over all layers of a type, determines the split, `level_codebook` makes
the codebook, `assign` the indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.codecs.codebook import Bits, CodebookLattice, Floats, Indices, as_bits, codebook, float_words
from ckstore.codecs.scheme import Layer, Scheme
from ckstore.errors import UsageError

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

#: The paper's search space, each axis from the gentlest setting to the most aggressive one.
LEVELS = (32, 16, 12, 8, 6, 4)
PRUNE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
PROTECT = (0.01, 0.005, 0.0005)
EMBEDDING_LEVELS = (32, 16)
METRICS = ("magnitude", "sensitivity")

#: The relative distance of a bin's values to its middle, at most: DDSketch's relative accuracy is 1 %.
ACCURACY = 2.0**-7

#: Weights in the k-means of a bin's share of the elements and of its share of the magnitudes.
FREQUENCY_WEIGHT, MAGNITUDE_WEIGHT = 0.2, 0.8

#: k-means in one dimension converges within a few dozen rounds; this is the limit.
_ROUNDS = 200

#: Starts of the k-means, and candidates per centroid of a start: a single one is up to 28 % worse than the best.
_STARTS = _CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class DynaQuantSettings:
    """The settings that the configuration search chooses for a version.

    Attributes
    ----------
    levels
        Levels of the quantised elements, 4 to 32.
    prune, protect
        Shares of the elements that become 0, and that are stored separately in 16 bits: the share to protect of the
        largest magnitudes, and the same share of the largest sensitivities, without elements already protected.
    metric
        The rank that pruning uses: `magnitude`, |w|, or `sensitivity`, |g·w|.
    embedding_levels
        Levels of embeddings, which quantisation harms most.

    Raises
    ------
    UsageError
        If they are out of range.
    """

    levels: int = 16
    prune: float = 0.2
    protect: float = 0.005
    metric: str = "magnitude"
    embedding_levels: int = 32

    def __post_init__(self) -> None:
        for levels in (self.levels, self.embedding_levels):
            if not 4 <= levels <= 32:
                raise UsageError(f"DynaQuant quantises to 4 to 32 levels, not {levels}.")
        if not (0 <= self.prune < 1 and 0 <= self.protect < 1 and self.prune + self.protect < 1):
            raise UsageError("The shares to prune and to protect must lie between 0 and 1 and leave some to quantise.")
        if self.metric not in METRICS:
            raise UsageError(f"DynaQuant prunes by {' or '.join(METRICS)}, not by {self.metric}.")


class Split(NamedTuple):
    """The bins of ranks below which elements are pruned, and from which they are protected in any case."""

    prune_magnitude: int
    prune_sensitivity: int
    protect_magnitude: int
    protect_sensitivity: int


class RankStatistics:
    """Histograms of the magnitudes and of the sensitivities of finite elements, gathered chunk by chunk.

    Their bins are log-spaced as in DDSketch (Masson, Rim and Lee, VLDB 2019), in the variant that interpolates within
    an octave: 64 bins an octave, cut by the words of float32 themselves, of a relative accuracy of 2^-7.

    Attributes
    ----------
    magnitudes, sensitivities : (16384,) int64
    """

    def __init__(self) -> None:
        from ckstore.kernels import codebook as kernels

        self.magnitudes: Counts = np.zeros(kernels.BINS // 2, np.int64)
        self.sensitivities: Counts = np.zeros(kernels.BINS // 2, np.int64)

    def add(self, values: Floats, sensitivity: Floats | None) -> None:
        """Add a chunk: its values, and their sensitivity if known; signs are ignored.

        A sensitivity that is not finite ranks above all others. Values that are 0 or subnormal rank last in any case.
        """
        from ckstore.kernels import codebook as kernels

        words, ranks = _pair(values, sensitivity)
        kernels.rank_counts(words, words, self.magnitudes)
        if sensitivity is not None:
            kernels.rank_counts(words, ranks, self.sensitivities)

    def merge(self, other: RankStatistics) -> None:
        """Add the chunks of other statistics."""
        self.magnitudes += other.magnitudes
        self.sensitivities += other.sensitivities

    def split(self, settings: DynaQuantSettings, *, known: bool) -> Split:
        """Return the split that best meets the shares to prune and to protect; whole bins go to one side.

        Unless the elements' sensitivity is `known`, they rank by magnitude alone.
        """
        by_sensitivity = known and settings.metric == "sensitivity"
        return Split(
            0 if by_sensitivity else _quantile(self.magnitudes, settings.prune),
            _quantile(self.sensitivities, settings.prune) if by_sensitivity else 0,
            _quantile(self.magnitudes, 1 - settings.protect),
            _quantile(self.sensitivities, 1 - settings.protect) if known else self.sensitivities.size,
        )


class Treatment(NamedTuple):
    """The quantisation of an object: the split, the number of levels, and the sensitivity of its elements if known."""

    split: Split
    levels: int
    sensitivity: Floats | None


def level_codebook(values: Floats, treatment: Treatment, dtype: str = "float32") -> CodebookLattice:
    """Return the levels of a weighted k-means over the bins, the level 0 of pruned values, and a protected one.

    A bin holds the values, neither pruned nor protected, of one sign, exponent and six bits of the mantissa of float32.
    It weighs 0.2 times its share of the elements and 0.8 times its share of the sum of the bins' magnitudes.
    """
    from ckstore.kernels import codebook as kernels

    counts: Counts = np.zeros(kernels.BINS, np.int64)
    kernels.level_counts(*_pair(values, treatment.sensitivity), treatment.split[:], counts)
    bins = np.flatnonzero(counts)
    if not bins.size:
        return codebook(np.empty(0), dtype, protected=True)
    middles = (bins << kernels.BIN_SHIFT) + (1 << (kernels.BIN_SHIFT - 1))
    points = middles.astype(np.uint32).view(np.float32).astype(np.float64)
    order = np.argsort(points)
    points, counts = points[order], counts[bins][order]
    magnitudes = np.abs(points)
    weights = FREQUENCY_WEIGHT * counts / counts.sum() + MAGNITUDE_WEIGHT * magnitudes / magnitudes.sum()
    return codebook(weighted_kmeans(points, weights, treatment.levels), dtype, protected=True)


def weighted_kmeans(points: Doubles, weights: Doubles, count: int) -> Doubles:
    """Return at most `count` centroids of weighted points in one dimension: Lloyd's rounds from starts of k-means++.

    The random draws are fixed: the same values give the same centroids, and nearly the same values give nearly the same
    centroids. With other draws, versions would converge to different centroids, and every index would change.

    `points` ascend, each once; `weights` are positive. Of several starts, the one with the smallest weighted sum of
    squared distances is returned, ascending; with fewer points than `count`, these.
    """
    if points.size <= count:
        return points
    shape = _STARTS, count, _CANDIDATES
    words = np.frombuffer(blake3(b"k-means++").digest(8 * prod(shape)), "<u8")
    draws = (words >> np.uint64(11)).reshape(shape) * 2.0**-53
    settled = [_settled(points, weights, kmeans_start(points, weights, one)) for one in draws]
    return min(settled, key=lambda centroids: float(weights @ _distances(points, centroids).min(axis=0)))


def kmeans_start(points: Doubles, weights: Doubles, draws: Doubles) -> Doubles:
    """Return initial centroids by weighted k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Each is a point, drawn in proportion to its weight and to its squared distance to the nearest centroid so far. As
    their section 7 proposes, several candidates are drawn each time, and the one that reduces these distances most is
    chosen. `draws` (count, candidates) are uniform in [0, 1); there are more points than draws.
    """
    nearest = np.full(points.size, np.inf)
    chances = weights
    centroids = []
    for draw in draws:
        mass = np.cumsum(chances)
        # A draw next to 1 is rounded up to the whole mass, which lies beyond the last point with a chance.
        places = np.minimum(draw * mass[-1], np.nextafter(mass[-1], 0))
        candidates = points[np.searchsorted(mass, places, side="right")]
        left = np.minimum(nearest, _distances(points, candidates))
        best = int(np.argmin(left @ weights))
        centroids.append(candidates[best])
        nearest = left[best]
        chances = nearest * weights
    return np.sort(centroids)


def _settled(points: Doubles, weights: Doubles, centroids: Doubles) -> Doubles:
    for _ in range(_ROUNDS):
        moved = kmeans_round(points, weights, centroids)
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    return centroids


def _distances(points: Doubles, centroids: Doubles) -> Doubles:
    """Return the squared distances of each point (columns) to each centroid (rows)."""
    squares: Doubles = np.square(points - centroids[:, None])
    return squares


def kmeans_round(points: Doubles, weights: Doubles, centroids: Doubles) -> Doubles:
    """Do Lloyd's step: move each centroid to the mean of its nearest points; one without points stays."""
    edges = np.searchsorted(points, (centroids[1:] + centroids[:-1]) / 2)
    owner = np.zeros(points.size, np.intp)
    np.add.at(owner, edges[edges < points.size], 1)
    owner = np.cumsum(owner)
    mass = np.bincount(owner, weights, centroids.size)
    moment = np.bincount(owner, weights * points, centroids.size)
    return np.where(mass > 0, moment / np.where(mass > 0, mass, 1.0), centroids)


def assign(lattice: CodebookLattice, values: Floats, treatment: Treatment) -> tuple[Indices, npt.NDArray[np.uint16]]:
    """Quantise values: return their indices, and the bits of the protected elements in their order.

    Pruned values and values that are not finite take the level of 0, protected ones the last one, the others the
    nearest. The bits are bfloat16 for float32 elements, else of their own dtype, which is exact.
    """
    from ckstore.kernels import codebook as kernels

    indices = lattice.nearest(values)
    protected = lattice.levels - 1
    kernels.split_indices(*_pair(values, treatment.sensitivity), treatment.split[:], lattice.zero, protected, indices)
    aside = as_bits(values[indices == protected], "bfloat16" if lattice.dtype == "float32" else lattice.dtype)
    return indices, aside


def moment_sensitivity(values: Floats, second_moments: Floats) -> Floats:
    """Estimate the sensitivity |g·w| from the mean of squared gradients: ``sqrt(v) * abs(w)``, as float32."""
    with np.errstate(all="ignore"):
        return np.sqrt(np.abs(second_moments)) * np.abs(values)


def _quantile(counts: Counts, share: float) -> int:
    """Return the number of bins that best hold the share of the elements."""
    below = np.concatenate(([0], np.cumsum(counts)))
    return int(np.argmin(np.abs(below - share * below[-1])))


def _pair(values: Floats, sensitivity: Floats | None) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the words of values and of their sensitivity; values replace an unknown sensitivity."""
    words = float_words(values)
    if sensitivity is None:
        return words, words
    if values.size != sensitivity.size:
        raise UsageError(f"{values.size} values cannot have {sensitivity.size} sensitivities; give one for each.")
    return words, float_words(sensitivity)


def settings_of(quality: float, *, known: bool) -> DynaQuantSettings:
    """Return the setting of a quality, on the diagonal of the search space.

    `known` means that sensitivities are available for pruning.
    """
    place = min(max(round(quality) - 1, 0), len(LEVELS) - 1)
    protect, embedding_levels = (axis[place * len(axis) // len(LEVELS)] for axis in (PROTECT, EMBEDDING_LEVELS))
    metric = "sensitivity" if known else "magnitude"
    return DynaQuantSettings(LEVELS[place], PRUNE[place], protect, metric, int(embedding_levels))


def _treatment(layer: Layer) -> Treatment:
    known = layer.sensitivity is not None
    settings = settings_of(layer.quality, known=known) if layer.settings is None else layer.settings
    levels = settings.embedding_levels if layer.kind == "embedding" else settings.levels
    return Treatment(layer.statistics.split(settings, known=known), levels, layer.sensitivity)


def _codebook(layer: Layer) -> CodebookLattice:
    return level_codebook(layer.values, _treatment(layer), layer.dtype)


def _assign(lattice: CodebookLattice, layer: Layer) -> tuple[Indices, Bits]:
    return assign(lattice, layer.values, _treatment(layer))


SCHEME = Scheme("dynaquant", _codebook, _assign, statistics=RankStatistics)
