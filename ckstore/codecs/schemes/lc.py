"""LC-Checkpoint (Chen, Liu, Ren and Jin, "On Efficient Constructions of Checkpoints", ICML 2020).

A version is its decoded predecessor plus changes δ, which are quantised by their sign and exponent. Of the resulting
buckets, the ones of largest exponent are kept, each with its mean as value, and the rest becomes 0 (priority
promotion). δ is taken against the decoded predecessor rather than the original, so that errors do not add up.

A bucket's mean deviates by a fifth of the change. The next version corrects that. A version that is stored in full, or
as one change in place of a whole chain, would lose a fifth of its weights, or of the total change. There, buckets are
split by leading bits of the mantissa too; each bit halves the error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import Bits, CodebookLattice, Floats, Indices, codebook, differences, float_words
from ckstore.errors import UsageError

#: Leading bits of the mantissa that split buckets of whole values and of merged changes, so that such a version loses
#: no more than others (`docs/decisions.md`).
SPLIT = 2


class BucketStatistics:
    """Counts and sums of the changes of an object by sign and exponent, gathered chunk by chunk.

    Parameters
    ----------
    split : int
        Leading bits of the mantissa that also belong to a bucket; 0, as in the paper, or more.

    Attributes
    ----------
    counts : (512 · 2^split,) int64
        By the leading bits of float32; without zeros, subnormals and values that are not finite.
    sums : (512 · 2^split,) float64
    """

    def __init__(self, split: int = 0) -> None:
        self.split = split
        self.counts: npt.NDArray[np.int64] = np.zeros(512 << split, np.int64)
        self.sums: npt.NDArray[np.float64] = np.zeros(512 << split)

    def add(self, changes: Floats) -> None:
        """Add a chunk of changes."""
        from ckstore.kernels import codebook as kernels

        kernels.bucket_statistics(float_words(changes), self.counts, self.sums, 23 - self.split)

    def merge(self, other: BucketStatistics) -> None:
        """Add the chunks of other statistics. Sums are rounded: merge in a fixed order to compare results."""
        self.counts += other.counts
        self.sums += other.sums

    def codebook(self, bits: int, dtype: str = "float32") -> CodebookLattice:
        """Return the means of the ``2**bits - 1`` occupied buckets of largest exponent, and 0: priority promotion.

        Of two buckets with the smallest exponent kept, the fuller one is kept; split buckets of one exponent are
        ordered by the mantissa.

        Raises
        ------
        UsageError
            If `bits` does not lie between 1 and 8.
        """
        if not 1 <= bits <= 8:
            raise UsageError(f"LC-Checkpoint quantises to 1 to 8 bits, not {bits}.")
        buckets = np.flatnonzero(self.counts)
        magnitudes = buckets & ((256 << self.split) - 1)
        order = np.lexsort((buckets, -self.counts[buckets], -magnitudes))
        kept = buckets[order][: (1 << bits) - 1]
        # Sums are rounded: a mean must not leave its bucket, by which `assign` identifies it.
        shift = 23 - self.split
        edges = np.stack((kept << shift, ((kept + 1) << shift) - 1)).astype(np.uint32).view(np.float32)
        means = np.clip(self.sums[kept] / self.counts[kept], edges.min(axis=0), edges.max(axis=0))
        return codebook(means, dtype)


def assign(lattice: CodebookLattice, changes: Floats, split: int = 0) -> Indices:
    """Return the index of each change of a chunk: the centroid of its bucket, or the one of 0.

    `split` is that of the statistics of the codebook.
    """
    shift = np.uint32(23 - split)
    table = np.full(512 << split, lattice.zero, np.uint8)
    buckets = lattice.centroids.view(np.uint32) >> shift
    table[buckets] = np.arange(lattice.centroids.size, dtype=np.uint8)
    indices: Indices = np.take(table, float_words(changes) >> shift)
    return indices


def lc_quantise(changes: Floats, bits: int, dtype: str = "float32", split: int = 0) -> tuple[CodebookLattice, Indices]:
    """Quantise changes of one chunk.

    Parameters
    ----------
    changes : (n,) float32
        Differences to the decoded previous state (`ckstore.codecs.codebook.differences`); the values themselves for
        a version without parent. Values that are not finite become 0.
    bits : int
        1 to 8: at most ``2**bits`` levels.
    dtype : str
        Of the elements that the changes are added to.
    split : int
        Leading bits of the mantissa that split each bucket.

    Returns
    -------
    lattice, indices
        The new state is ``lattice.add(base, indices)``.

    Examples
    --------
    >>> import numpy as np
    >>> lattice, indices = lc_quantise(np.array([4.0, 5.0, -1.5, 0.001], "float32"), bits=2)
    >>> lattice.centroids[indices].tolist()
    [4.5, 4.5, -1.5, 0.0010000000474974513]
    >>> lattice, indices = lc_quantise(np.array([4.0, 5.0, -1.5, 0.001], "float32"), bits=1)
    >>> lattice.centroids[indices].tolist()
    [4.5, 4.5, 0.0, 0.0]
    """
    statistics = BucketStatistics(split)
    statistics.add(changes)
    lattice = statistics.codebook(bits, dtype)
    return lattice, assign(lattice, changes, split)


def merged_changes(start: Bits, previous: Bits, change: tuple[CodebookLattice, Indices]) -> Floats:
    """Return all changes since an earlier state in one: the decoded sum that the paper's merging quantises again.

    Parameters
    ----------
    start : (n,) uint16 or uint32
        Bits of the decoded state before the merged change.
    previous : (n,) uint16 or uint32
        Bits of the decoded state before the last change.
    change
        The last change, as quantised against `previous`.

    Returns
    -------
    (n,) float32
        From `start` to the decoded last state, not to the exact one: without kept changes there is nothing to merge.
    """
    lattice, indices = change
    return differences(lattice.add(previous, indices), start, lattice.dtype)
