"""LC-Checkpoint (Chen, Liu, Ren and Jin, "On Efficient Constructions of Checkpoints", ICML 2020).

A version is its decoded predecessor plus changes δ that are quantised by their sign and exponent: of the buckets that
these make, the ones of largest exponent are kept, each with its mean as value, and the rest becomes 0 (priority
promotion). δ is taken against what decodes, never against the original, so that errors do not add up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckstore.codecs.codebook import CodebookLattice, Floats, Indices, codebook, float_words
from ckstore.errors import UsageError


class BucketStatistics:
    """Counts and sums of the changes of an object by sign and exponent, gathered chunk by chunk.

    Attributes
    ----------
    counts : (512,) int64
        By sign bit and exponent field of float32; zeros, subnormals and what is not finite are left out.
    sums : (512,) float64
    """

    def __init__(self) -> None:
        from ckstore.kernels import codebook as kernels

        self.counts: npt.NDArray[np.int64] = np.zeros(kernels.BUCKETS, np.int64)
        self.sums: npt.NDArray[np.float64] = np.zeros(kernels.BUCKETS)

    def add(self, changes: Floats) -> None:
        """Add a chunk of changes."""
        from ckstore.kernels import codebook as kernels

        kernels.bucket_statistics(float_words(changes), self.counts, self.sums)

    def merge(self, other: BucketStatistics) -> None:
        """Add the chunks of other statistics. Sums are rounded: merge in one order where results are compared."""
        self.counts += other.counts
        self.sums += other.sums

    def codebook(self, bits: int, dtype: str = "float32") -> CodebookLattice:
        """The means of the ``2**bits - 1`` occupied buckets of largest exponent, and 0: the paper's priority promotion.

        Of two buckets with the last exponent that is kept, the fuller one is.

        Raises
        ------
        UsageError
            If `bits` does not lie between 1 and 8.
        """
        if not 1 <= bits <= 8:
            raise UsageError(f"LC-Checkpoint quantises to 1 to 8 bits, not {bits}.")
        buckets = np.flatnonzero(self.counts)
        order = np.lexsort((buckets, -self.counts[buckets], -(buckets & 255)))
        kept = buckets[order][: (1 << bits) - 1]
        # Sums are rounded: a mean must not leave its bucket, by which `assign` knows it.
        edges = np.stack((kept << 23, (kept << 23) | 0x7FFFFF)).astype(np.uint32).view(np.float32)
        means = np.clip(self.sums[kept] / self.counts[kept], edges.min(axis=0), edges.max(axis=0))
        return codebook(means, dtype)


def assign(lattice: CodebookLattice, changes: Floats) -> Indices:
    """Index of each change of a chunk: the centroid that lies in its bucket, or the one that is 0."""
    from ckstore.kernels import codebook as kernels

    table = np.full(kernels.BUCKETS, lattice.zero, np.uint8)
    buckets = lattice.centroids.view(np.uint32) >> np.uint32(23)
    table[buckets] = np.arange(lattice.centroids.size, dtype=np.uint8)
    out = np.empty(changes.size, np.uint8)
    kernels.bucket_indices(float_words(changes), table, out)
    return out


def lc_quantise(changes: Floats, bits: int, dtype: str = "float32") -> tuple[CodebookLattice, Indices]:
    """Quantise changes that are one chunk.

    Parameters
    ----------
    changes : (n,) float32
        Differences to the decoded previous state (`ckstore.codecs.codebook.differences`); the values themselves for
        a version without parent. What is not finite becomes 0.
    bits : int
        1 to 8: at most ``2**bits`` levels.
    dtype : str
        Of the elements that the changes are added to.

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
    statistics = BucketStatistics()
    statistics.add(changes)
    lattice = statistics.codebook(bits, dtype)
    return lattice, assign(lattice, changes)


def merge_changes(
    first: tuple[CodebookLattice, Indices], second: tuple[CodebookLattice, Indices], bits: int
) -> tuple[CodebookLattice, Indices]:
    """One change instead of two in a row: their decoded sum, quantised again: the paper's merging."""
    words = CodebookLattice("float32", first[0].centroids).values(first[1])
    changes = CodebookLattice("float32", second[0].centroids).add(words, second[1]).view(np.float32)
    return lc_quantise(changes, bits, second[0].dtype)
