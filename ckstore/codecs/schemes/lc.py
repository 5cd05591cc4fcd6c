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

from ckstore.codecs.codebook import Bits, CodebookLattice, Floats, Indices, codebook, float_words
from ckstore.codecs.scheme import Layer, Scheme
from ckstore.errors import UsageError

#: Leading bits of the mantissa that split buckets of whole values and of merged changes, so that such a version loses
#: no more than others (`docs/decisions.md`).
SPLIT = 2

#: Bits of a codebook for such values: every bucket is kept.
WHOLE_BITS = 8


def bucket_codebook(changes: Floats, bits: int, dtype: str = "float32", split: int = 0) -> CodebookLattice:
    """Return the means of the ``2**bits - 1`` occupied buckets of largest exponent, and 0: priority promotion.

    `split` leading bits of the mantissa also belong to a bucket; 0, as in the paper, or more. Zeros, subnormals and
    values that are not finite belong to none. Raise `UsageError` unless `bits` lies between 1 and 8.
    """
    from ckstore.kernels import codebook as kernels

    counts, sums = np.zeros(512 << split, np.int64), np.zeros(512 << split)
    kernels.bucket_statistics(float_words(changes), counts, sums, 23 - split)
    return promoted(counts, sums, bits, dtype, split)


def promoted(
    counts: npt.NDArray[np.int64], sums: npt.NDArray[np.float64], bits: int, dtype: str, split: int
) -> CodebookLattice:
    """Return the codebook of buckets, given by the leading bits of float32.

    Of two buckets with the smallest exponent kept, the fuller one is kept; split buckets of one exponent are ordered by
    the mantissa.
    """
    if not 1 <= bits <= 8:
        raise UsageError(f"LC-Checkpoint quantises to 1 to 8 bits, not {bits}.")
    buckets = np.flatnonzero(counts)
    magnitudes = buckets & ((256 << split) - 1)
    order = np.lexsort((buckets, -counts[buckets], -magnitudes))
    kept = buckets[order][: (1 << bits) - 1]
    # Sums are rounded: a mean must not leave its bucket, by which `assign` identifies it.
    shift = 23 - split
    edges = np.stack((kept << shift, ((kept + 1) << shift) - 1)).astype(np.uint32).view(np.float32)
    return codebook(np.clip(sums[kept] / counts[kept], edges.min(axis=0), edges.max(axis=0)), dtype)


def assign(lattice: CodebookLattice, changes: Floats, split: int = 0) -> Indices:
    """Return the index of each change: the centroid of its bucket, or the one of 0; `split` as for the codebook."""
    shift = np.uint32(23 - split)
    table = np.full(512 << split, lattice.zero, np.uint8)
    buckets = lattice.centroids.view(np.uint32) >> shift
    table[buckets] = np.arange(lattice.centroids.size, dtype=np.uint8)
    indices: Indices = np.take(table, float_words(changes) >> shift)
    return indices


def bits_of(quality: float) -> int:
    """Return the bits of a codebook: 3, as in the paper, at the default quality."""
    return min(max(round(4.5 - quality), 1), 8)


def _codebook(layer: Layer) -> CodebookLattice:
    if layer.is_whole:
        return bucket_codebook(layer.values, WHOLE_BITS, layer.dtype, SPLIT)
    return bucket_codebook(layer.values, bits_of(layer.quality), layer.dtype)


def _assign(lattice: CodebookLattice, layer: Layer) -> tuple[Indices, Bits]:
    return assign(lattice, layer.values, SPLIT if layer.is_whole else 0), np.empty(0, np.uint16)


#: Its qualities are those for 4 bits down to 1 bit.
SCHEME = Scheme("lc", _codebook, _assign, of_changes=True, qualities=(0.5, 1.5, 2.5, 3.5))
