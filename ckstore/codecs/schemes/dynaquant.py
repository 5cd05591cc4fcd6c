"""Inshrinkerator, first called DynaQuant: prune some elements, protect some, and quantise the rest.

Agrawal et al., "Inshrinkerator: Compressing Deep Learning Training Checkpoints via Dynamic Quantization", SoCC 2024.
Elements are ranked by magnitude and by sensitivity. The lowest ranks by one of the two become 0, the highest by either
are kept aside in 16 bits, and the rest takes the levels of a weighted k-means over a histogram of relative accuracy.
Each step reads an object chunk by chunk: `RankStatistics`, merged over all layers of a type, says where to split,
`LevelStatistics` makes the codebook, `assign` the indices.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.codecs.codebook import CodebookLattice, Floats, Indices, as_bits, codebook, float_words
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

#: A bin's middle is nowhere further from its values than this part of them: DDSketch's relative accuracy is 1 %.
ACCURACY = 2.0**-7

#: How much a bin's share of the elements and its share of the magnitudes weigh in the k-means.
FREQUENCY_WEIGHT, MAGNITUDE_WEIGHT = 0.2, 0.8

#: k-means in one dimension settles within a few dozen rounds; this many bound it.
_ROUNDS = 200

#: Starts of the k-means, and points drawn for each centroid of a start: one of one is up to 28 % off the best.
_STARTS = _CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class DynaQuantSettings:
    """What the configuration search chooses for a version.

    Attributes
    ----------
    levels
        4 to 32 levels of the elements that are quantised.
    prune, protect
        Shares of the elements that become 0, and that are kept aside in 16 bits: the share to protect of the largest
        magnitudes, and as many again of the largest sensitivities, in so far as these are others.
    metric
        What is pruned by: `magnitude`, |w|, or `sensitivity`, |g·w|.
    embedding_levels
        The levels of embeddings, which quantising harms most.

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
    """The bins of ranks below which elements are pruned, and from which on they are protected whatever else holds."""

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
        """Add a chunk: its values, and their sensitivity where it is known; signs are ignored.

        A sensitivity that is not finite is above all others; values that are 0 or subnormal rank last, whatever it is.
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
        """Where the shares to prune and to protect are met most nearly; whole bins go to one side.

        Parameters
        ----------
        settings
        known
            Whether it is for elements whose sensitivity is known; others rank by magnitude alone.
        """
        by_sensitivity = known and settings.metric == "sensitivity"
        return Split(
            0 if by_sensitivity else _quantile(self.magnitudes, settings.prune),
            _quantile(self.sensitivities, settings.prune) if by_sensitivity else 0,
            _quantile(self.magnitudes, 1 - settings.protect),
            _quantile(self.sensitivities, 1 - settings.protect) if known else self.sensitivities.size,
        )


class LevelStatistics:
    """A histogram of the values that a split leaves to be quantised, gathered chunk by chunk.

    Attributes
    ----------
    split
        What is left out.
    counts : (32768,) int64
        By sign, exponent and six bits of the mantissa of float32.
    """

    def __init__(self, split: Split) -> None:
        from ckstore.kernels import codebook as kernels

        self.split = split
        self.counts: Counts = np.zeros(kernels.BINS, np.int64)

    def add(self, values: Floats, sensitivity: Floats | None) -> None:
        """Add a chunk: its values, and their sensitivity where it is known."""
        from ckstore.kernels import codebook as kernels

        kernels.level_counts(*_pair(values, sensitivity), *self.split, self.counts)

    def merge(self, other: LevelStatistics) -> None:
        """Add the chunks of other statistics of the same split."""
        self.counts += other.counts

    def codebook(self, levels: int, dtype: str = "float32") -> CodebookLattice:
        """The levels of a weighted k-means over the bins, the level 0 of what is pruned, and one for the protected.

        A bin weighs 0.2 times its share of the elements and 0.8 times its share of the sum of the bins' magnitudes.
        """
        from ckstore.kernels import codebook as kernels

        bins = np.flatnonzero(self.counts)
        if not bins.size:
            return codebook(np.empty(0), dtype, protected=True)
        middles = (bins << kernels.BIN_SHIFT) + (1 << (kernels.BIN_SHIFT - 1))
        points = middles.astype(np.uint32).view(np.float32).astype(np.float64)
        order = np.argsort(points)
        points, counts = points[order], self.counts[bins][order]
        magnitudes = np.abs(points)
        weights = FREQUENCY_WEIGHT * counts / counts.sum() + MAGNITUDE_WEIGHT * magnitudes / magnitudes.sum()
        return codebook(weighted_kmeans(points, weights, levels), dtype, protected=True)


def weighted_kmeans(points: Doubles, weights: Doubles, count: int) -> Doubles:
    """At most `count` centroids of weighted points in one dimension: Lloyd's rounds from starts of k-means++.

    The draws are always the same: the same values give the same centroids, and values that are nearly the same nearly
    the same ones, where draws of their own would let versions settle apart and every index change.

    Parameters
    ----------
    points : (n,) float64
        Ascending, each once.
    weights : (n,) float64
        Positive.
    count : int

    Returns
    -------
    (min(count, n),) float64, ascending
        Of a few starts those of the smallest weighted sum of squared distances.
    """
    if points.size <= count:
        return points
    shape = _STARTS, count, _CANDIDATES
    words = np.frombuffer(blake3(b"k-means++").digest(8 * prod(shape)), "<u8")
    draws = (words >> np.uint64(11)).reshape(shape) * 2.0**-53
    settled = [_settled(points, weights, kmeans_start(points, weights, one)) for one in draws]
    return min(settled, key=lambda centroids: float(weights @ _distances(points, centroids).min(axis=0)))


def kmeans_start(points: Doubles, weights: Doubles, draws: Doubles) -> Doubles:
    """Centroids to begin with by weighted k-means++ (Arthur and Vassilvitskii, SODA 2007).

    Each is a point, drawn in proportion to its weight and to its squared distance to the nearest centroid so far. As
    their section 7 proposes, several are drawn each time, and the one that lessens these distances most is taken.

    Parameters
    ----------
    points, weights
        As in `weighted_kmeans`; more points than draws.
    draws : (count, candidates) float64
        From 0 to before 1.

    Returns
    -------
    (count,) float64, ascending
    """
    nearest = np.full(points.size, np.inf)
    chances = weights
    centroids = []
    for draw in draws:
        mass = np.cumsum(chances)
        # A draw next to 1 is rounded up to the whole mass, which lies beyond the last point that has a chance.
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
    """Squares of the distances of each point (columns) to each centroid (rows)."""
    squares: Doubles = np.square(points - centroids[:, None])
    return squares


def kmeans_round(points: Doubles, weights: Doubles, centroids: Doubles) -> Doubles:
    """Lloyd's step: each centroid moves to the mean of the points nearest to it, or stays where it has none."""
    edges = np.searchsorted(points, (centroids[1:] + centroids[:-1]) / 2)
    owner = np.zeros(points.size, np.intp)
    np.add.at(owner, edges[edges < points.size], 1)
    owner = np.cumsum(owner)
    mass = np.bincount(owner, weights, centroids.size)
    moment = np.bincount(owner, weights * points, centroids.size)
    return np.where(mass > 0, moment / np.where(mass > 0, mass, 1.0), centroids)


def assign(
    lattice: CodebookLattice, split: Split, values: Floats, sensitivity: Floats | None
) -> tuple[Indices, npt.NDArray[np.uint16]]:
    """Quantise a chunk.

    Returns
    -------
    indices : (n,) uint8
        The level of 0 for what is pruned and for what is not finite, the last one for what is protected, else the
        nearest.
    aside : (k,) uint16
        The bits of the protected elements in their order, for `CodebookLattice.values`: bfloat16 for float32
        elements, else their own, which are exact.
    """
    from ckstore.kernels import codebook as kernels

    indices = lattice.nearest(values)
    protected = lattice.levels - 1
    kernels.split_indices(*_pair(values, sensitivity), *split, lattice.zero, protected, indices)
    aside = as_bits(values[indices == protected], "bfloat16" if lattice.dtype == "float32" else lattice.dtype)
    return indices, aside


class Treatment(NamedTuple):
    """What becomes of an object: where its elements are split, to how many levels, and their sensitivity if known."""

    split: Split
    levels: int
    sensitivity: Floats | None


def treated(
    values: Floats, treatment: Treatment, dtype: str = "float32"
) -> tuple[CodebookLattice, Indices, npt.NDArray[np.uint16]]:
    """Quantise an object that is one chunk.

    Parameters
    ----------
    values : (n,) float32
        What is not finite becomes 0.
    treatment : Treatment
    dtype : str
        Of the elements.

    Returns
    -------
    lattice, indices, aside
        Decoded by ``lattice.values(indices, aside)``.
    """
    statistics = LevelStatistics(treatment.split)
    statistics.add(values, treatment.sensitivity)
    lattice = statistics.codebook(treatment.levels, dtype)
    return (lattice, *assign(lattice, treatment.split, values, treatment.sensitivity))


def dynaquant_quantise(
    values: Floats, settings: DynaQuantSettings, sensitivity: Floats | None = None, dtype: str = "float32"
) -> tuple[CodebookLattice, Indices, npt.NDArray[np.uint16]]:
    """Quantise one layer that is all of its type: the paper's one-shot compression, which needs no parent.

    Parameters
    ----------
    values : (n,) float32
        What is not finite becomes 0.
    settings : DynaQuantSettings
    sensitivity : (n,) float32, optional
        Not negative; elements rank by magnitude alone without it.
    dtype : str
        Of the elements.

    Returns
    -------
    lattice, indices, aside
        Decoded by ``lattice.values(indices, aside)``.
    """
    ranks = RankStatistics()
    ranks.add(values, sensitivity)
    split = ranks.split(settings, known=sensitivity is not None)
    return treated(values, Treatment(split, settings.levels, sensitivity), dtype)


def moment_sensitivity(values: Floats, second_moments: Floats) -> Floats:
    """The sensitivity |g·w| where only the mean of squared gradients is known: ``sqrt(v) * abs(w)``, as float32."""
    with np.errstate(all="ignore"):
        return np.sqrt(np.abs(second_moments)) * np.abs(values)


class CodedBits(NamedTuple):
    """Bits of the differences between two versions' indices in the three codings of the paper's ablation."""

    huffman: int
    run_lengths: int
    rearranged: int


def coded_bits(indices: Indices, base: Indices, levels: int) -> CodedBits:
    """Size of ``(base - n) mod levels`` as the paper codes it, code tables included.

    Plain Huffman codes; Huffman codes of run lengths (`run_lengths`); and the same with the elements rearranged by
    their level in the base, each group with runs and a table of its own. A measure for comparison: ckstore's own
    entropy coder takes the levels as classes.
    """
    changes = np.remainder(base.astype(np.int64) - indices, levels)
    order = np.argsort(base, kind="stable")
    groups = np.split(changes[order], np.flatnonzero(np.diff(base[order])) + 1)
    return CodedBits(
        huffman_bits(changes),
        huffman_bits(run_lengths(changes)),
        sum(huffman_bits(run_lengths(group)) for group in groups),
    )


def run_lengths(values: Array) -> Counts:
    """Runs in the paper's form: each value negated, a run of more than one as its positive length before it.

    Examples
    --------
    >>> import numpy as np
    >>> run_lengths(np.array([0, 0, 0, 5, 2, 2])).tolist()
    [3, 0, -5, 2, -2]
    """
    if not values.size:
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    lengths = np.diff(np.append(starts, values.size))
    pairs = np.stack((lengths, -values[starts].astype(np.int64)), axis=1)
    written: Counts = pairs[np.stack((lengths > 1, np.ones(starts.size, bool)), axis=1)]
    return written


def huffman_bits(symbols: Array) -> int:
    """Bits of the symbols in a Huffman code of their own, and of its table.

    A table's entry is a code length in 5 bits and the distance to the symbol before it in Elias' gamma code.
    """
    values, counts = np.unique(symbols, return_counts=True)
    if not values.size:
        return 0
    distances = np.diff(values, prepend=values[0] - 1 - abs(int(values[0])))
    table = int((5 + 2 * np.floor(np.log2(distances)) + 1).sum())
    heap = counts.tolist()
    if len(heap) == 1:
        return table + int(heap[0])
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return table + total


def _quantile(counts: Counts, share: float) -> int:
    """How many bins hold the share of the elements most nearly."""
    below = np.concatenate(([0], np.cumsum(counts)))
    return int(np.argmin(np.abs(below - share * below[-1])))


def _pair(values: Floats, sensitivity: Floats | None) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Words of values and of their sensitivity; where it is not known, the values stand in for it."""
    words = float_words(values)
    if sensitivity is None:
        return words, words
    if values.size != sensitivity.size:
        raise UsageError(f"{values.size} values cannot have {sensitivity.size} sensitivities; give one for each.")
    return words, float_words(sensitivity)
