"""Kernels of the published schemes: histograms, levels, additive values, products of factors: `codebook.c`.

Every kernel works on one chunk. Floats are passed as the words (uint32) of float32 values. The exponent field alone
decides whether a value is normal, so that a process that flushes subnormals computes the same bits.
`tests/kernels/reference.py` has the same functions in NumPy.
"""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_nearest = function("nearest", "ppip")
_add = function("add", "pppp")
_add_products = function("add_products", "ppiiiip")
_difference = function("difference", "ppp")
_bucket_statistics = function("bucket_statistics", "pppi")
_rank_counts = function("rank_counts", "ppp")
_level_counts = function("level_counts", "ppiiiip")
_split_indices = function("split_indices", "ppiiiiiip")

#: Low bits that a histogram's bin drops from a word: sign, exponent and six bits of the mantissa are left.
BIN_SHIFT = 17

#: Bins of signed values; the lower half are those of magnitudes.
BINS = 1 << (32 - BIN_SHIFT)


def nearest(words: Array, midpoints: Array, zero: int, out: Array) -> None:
    """Write the index of each value's cell: the number of `midpoints` below the value.

    `midpoints` are at most 256 sorted float64 values that end with infinity. A value on a midpoint belongs to the lower
    cell. Subnormal values count as 0; a value that is not finite takes the index `zero`.
    """
    check(_nearest(id(words), id(midpoints), zero, id(out)))


def add(base: Array, indices: Array, centroids: Array, out: Array) -> None:
    """Write the words of ``base + centroids[indices]``: one float32 addition, rounded once.

    A base that is subnormal or not finite counts as 0. A sum below 2^-126 becomes +0, and a sum beyond the largest
    finite number becomes that number. Rounding the sum of two float32 numbers to float64 and then to float32 gives the
    sum rounded once, because 53 bits are more than twice 24 plus one.
    """
    check(_add(id(base), id(indices), id(centroids), id(out)))


def add_products(base: Array, numbers: Array, rank: int, width: int, step: int, start: int, out: Array) -> bool:
    """Write the words of ``base + 2**step * product``, with the rules of `add`, of whole rows from element `start` on.

    `numbers` (int32) are `rank` weights, rows of `rank` numbers, and `rank` rows of `width` numbers. Sums of products
    are integers, so their order does not matter. Return whether they fit 32 bits; otherwise nothing is written.
    """
    return check(_add_products(id(base), id(numbers), rank, width, step, start, id(out))) == 0


def difference(words: Array, base: Array, out: Array) -> None:
    """Write the words of ``value - base``, with the rules of `add`; NaN if the value is not finite."""
    check(_difference(id(words), id(base), id(out)))


def bucket_statistics(words: Array, counts: Array, sums: Array, shift: int) -> None:
    """Add each normal value to the count (int64) and the sum (float64) of its bucket: its word without `shift` bits."""
    check(_bucket_statistics(id(words), id(counts), id(sums), shift))


def rank_counts(words: Array, ranks: Array, counts: Array) -> None:
    """Count the finite values by the bins of their ranks (16,384 counts, int64)."""
    check(_rank_counts(id(words), id(ranks), id(counts)))


def level_counts(words: Array, sensitivities: Array, split: tuple[int, int, int, int], counts: Array) -> None:
    """Count the values that are neither pruned nor protected by their bins (32,768 counts, int64).

    `split` has the bins of magnitudes and sensitivities below which elements are pruned, and from which they are
    protected in any case. Values that are subnormal, 0 or not finite are pruned.
    """
    check(_level_counts(id(words), id(sensitivities), *split, id(counts)))


def split_indices(
    words: Array, sensitivities: Array, split: tuple[int, int, int, int], zero: int, aside: int, out: Array
) -> None:
    """Overwrite the indices of pruned elements with `zero`, and of protected elements with `aside`."""
    check(_split_indices(id(words), id(sensitivities), *split, zero, aside, id(out)))
