"""The kernels of lattices and codebooks in NumPy and Python integers: slow and obviously right."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def exponents(count: int, step: int, rows: Array, cols: Array, width: int, start: int) -> Array:
    """Return the binary exponent of the step of each of `count` elements from element `start` on."""
    position = np.arange(start, start + count)
    result = np.full(count, step, np.int64)
    if rows.size:
        result += rows[position // width]
    if cols.size:
        result += cols[position % width]
    return result


def linear_quantise(values: Array, exponent: Array) -> Array:
    """Return integers (int32): see `ckstore.kernels.lattice.linear_quantise`."""
    with np.errstate(all="ignore"):
        scaled = np.ldexp(values.astype(np.float64), -exponent)
    finite = np.isfinite(scaled)
    return np.where(finite, np.clip(np.rint(np.where(finite, scaled, 0.0)), -(1 << 24), 1 << 24), 0).astype(np.int32)


def linear_values(integers: Array, exponent: Array, dtype: str) -> Array:
    """Return lattice values as bits of `dtype` (float32 or float64)."""
    with np.errstate(over="ignore"):
        values = np.ldexp(integers.astype(np.float64), exponent).astype(dtype)
    return np.where(integers == 0, np.zeros((), dtype), values).view(f"u{values.itemsize}")


def linear_project(integers: Array, shift: Array) -> Array:
    """Shift each integer by its exponent, rounding half up; see `ckstore.kernels.lattice.linear_project`."""
    result = []
    for integer, bits in zip(integers.tolist(), shift.tolist(), strict=True):
        if bits > 0:
            result.append((integer + (1 << (min(bits, 40) - 1))) >> min(bits, 40))
        elif bits < 0:
            result.append(min(max(integer << min(-bits, 30), -(1 << 24)), 1 << 24))
        else:
            result.append(integer)
    return np.array(result, np.int32)


def ordinal(bits: Array) -> list[int]:
    """Return the order-preserving integers of float bits: -1 for -0.0, 0 for +0.0."""
    width = 8 * bits.itemsize
    sign = 1 << (width - 1)
    return [-1 - (value ^ sign) if value & sign else value for value in bits.tolist()]


def ordinal_difference(bits: Array, predicted: Array, *, is_mirrored: bool = False) -> Array:
    """Return the difference of ordinals modulo the width, as unsigned integers; from negative numbers upside down."""
    modulus = 1 << (8 * bits.itemsize)
    pairs = zip(ordinal(bits), ordinal(predicted), strict=True)
    signs = [-1 if is_mirrored and other < 0 else 1 for other in ordinal(predicted)]
    return np.array(
        [sign * (one - other) % modulus for sign, (one, other) in zip(signs, pairs, strict=True)], bits.dtype
    )


_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max


def _flushed(values: Array) -> Array:
    """Return float32 values with subnormal ones as +0."""
    return np.where(np.abs(values) < _TINY, np.float32(0), values)


def codebook_nearest(words: Array, centroids: Array, zero: int) -> Array:
    """Return indices (uint8): see `ckstore.kernels.codebook.nearest`; compares with every midpoint."""
    values = _flushed(words.view(np.float32))
    with np.errstate(invalid="ignore"):
        doubles = values.astype(np.float64)
    levels = centroids.astype(np.float64)
    below = doubles[:, None] > (levels[1:] + levels[:-1]) / 2
    return np.where(np.isfinite(doubles), below.sum(axis=1), zero).astype(np.uint8)


def codebook_add(base: Array, indices: Array, centroids: Array) -> Array:
    """Return words of ``base + centroids[indices]`` in float32 arithmetic: see `ckstore.kernels.codebook.add`."""
    floats = base.view(np.float32)
    with np.errstate(over="ignore"):
        sums = np.where(np.isfinite(floats), _flushed(floats), np.float32(0)) + centroids[indices]
    return _flushed(np.clip(sums, -_HUGE, _HUGE)).view(np.uint32)


def products_add(base: Array, numbers: Array, rank: int, width: int, step: int, start: int) -> Array:
    """Return words of ``base + 2**step * product`` in float64: see `ckstore.kernels.codebook.add_products`."""
    rows = numbers.size // rank - width - 1
    weights, left, right = np.split(numbers.astype(np.int64), [rank, rank * (1 + rows)])
    product = (left.reshape(rows, rank) * weights) @ right.reshape(rank, width)
    floats = base.view(np.float32)
    before = np.where(np.isfinite(floats), _flushed(floats), np.float32(0)).astype(np.float64)
    sums = np.clip(before + np.ldexp(product.ravel()[start : start + base.size].astype(float), step), -_HUGE, _HUGE)
    return np.where(np.abs(sums) < _TINY, 0, sums).astype(np.float32).view(np.uint32)


def codebook_difference(words: Array, base: Array) -> Array:
    """Return float32 values of ``value - base``: see `ckstore.kernels.codebook.difference`."""
    floats, bases = words.view(np.float32), base.view(np.float32)
    with np.errstate(all="ignore"):
        changes = _flushed(floats) - np.where(np.isfinite(bases), _flushed(bases), np.float32(0))
    return np.where(np.isfinite(floats), _flushed(np.clip(changes, -_HUGE, _HUGE)), np.float32(np.nan))


def bucket_statistics(words: Array, shift: int) -> tuple[Array, Array]:
    """Return counts and sums (2^(32 - shift) each) by bucket of normal values: their words without `shift` bits."""
    field = words >> 23 & 255
    normal = words[(field != 0) & (field != 255)]
    buckets, size = (normal >> shift).astype(np.intp), 1 << (32 - shift)
    return np.bincount(buckets, minlength=size), np.bincount(buckets, normal.view(np.float32), size)


def rank_bins(words: Array, ranks: Array) -> Array:
    """Return the bin of the rank of each value: 0 if the value is 0 or subnormal, -1 if it is not finite."""
    field = words >> 23 & 255
    bins = ((ranks & 0x7FFFFFFF) >> 17).astype(np.int64)
    return np.where(field == 255, -1, np.where(field == 0, 0, bins))


def sides(words: Array, sensitivities: Array, split: tuple[int, int, int, int]) -> Array:
    """Return 1 for each protected value, -1 for each pruned one: see `ckstore.kernels.codebook`.

    `split` has the bins of magnitudes and sensitivities: pruned below the first two, protected from the last two on.
    """
    magnitude, sensitivity, field = rank_bins(words, words), rank_bins(words, sensitivities), words >> 23 & 255
    protected = (magnitude >= split[2]) | (sensitivity >= split[3])
    pruned = (magnitude < split[0]) | (sensitivity < split[1])
    return np.where((field == 0) | (field == 255), -1, np.where(protected, 1, np.where(pruned, -1, 0)))


def level_counts(words: Array, sensitivities: Array, split: tuple[int, int, int, int]) -> Array:
    """Count the values that are neither pruned nor protected by their leading 15 bits (32,768 counts)."""
    kept = words[sides(words, sensitivities, split) == 0]
    return np.bincount((kept >> 17).astype(np.intp), minlength=1 << 15)


def split_indices(
    indices: Array, words: Array, sensitivities: Array, split: tuple[int, int, int, int], zero: int, aside: int
) -> Array:
    """Overwrite the indices of pruned and protected elements: see `ckstore.kernels.codebook.split_indices`."""
    side = sides(words, sensitivities, split)
    return np.where(side < 0, zero, np.where(side > 0, aside, indices)).astype(np.uint8)


def short_floats(words: Array, dtype: str) -> Array:
    """Return float16 or bfloat16 bits of finite float32 bits: see `to_float16` and `to_bfloat16`; keeps -0.0."""
    largest = {"float16": 0x7BFF, "bfloat16": 0x7F7F}[dtype]
    if dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            bits = words.view(np.float32).astype(np.float16).view(np.uint16)
    else:
        wide = words.astype(np.uint64)
        bits = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(bits & 0x7FFF > largest, bits & 0x8000 | largest, bits).astype(np.uint16)


def models(count: int, level: int, rows: Array, cols: Array, width: int, start: int, unit: int) -> list[int]:
    """Return the model that a rounded lattice subtracts from the ordinals of `count` elements from `start` on."""
    return [int(octaves) * unit for octaves in exponents(count, level, rows, cols, width, start)]


def rounded_quantise(bits: Array, shift: int, models: list[int]) -> Array:
    """Return integers (int32): see `ckstore.kernels.coarse.rounded_quantise`, with the model of each element."""
    sign = 1 << (8 * bits.itemsize - 1)
    result = []
    for word, model in zip(bits.tolist(), models, strict=True):
        rest = (-(word ^ sign) if word & sign else word) - model
        integer = (8 * rest + (5 << shift)) // (8 << shift)
        result.append(min(max(integer, -(1 << 24)), 1 << 24))
    return np.array(result, np.int32)


def rounded_values(integers: Array, shift: int, models: list[int], largest: int, dtype: npt.DTypeLike) -> Array:
    """Return bits: see `ckstore.kernels.coarse.rounded_values`, with the model of each element."""
    out = np.zeros(integers.size, dtype)
    sign = 1 << (8 * out.itemsize - 1)
    for k, (integer, model) in enumerate(zip(integers.tolist(), models, strict=True)):
        order = (integer << shift) + model
        if 8 * abs(order) > 5 << shift:
            out[k] = min(abs(order), largest) | (sign if order < 0 else 0)
    return out


def deviation(values: Array, others: Array) -> tuple[float, float, float, int]:
    """Return largest difference, sums of squares, number: see `ckstore.kernels.coarse.deviation`."""
    doubles = values.astype(np.float64)
    with np.errstate(all="ignore"):
        differences = np.abs(doubles - others.astype(np.float64))
        finite = np.isfinite(differences)
        squares, total = (differences[finite] ** 2).sum(), (doubles[finite] ** 2).sum()
    return float(differences[finite].max(initial=0.0)), float(squares), float(total), int(finite.sum())


def order_sums(bits: Array, width: int, ceiling: int, shift: int) -> tuple[Array, Array, Array]:
    """Return sums of ordinals of magnitudes by row and column, and their numbers: see `coarse.order_sums`."""
    magnitude = (bits & ((1 << (8 * bits.itemsize - 1)) - 1)).astype(np.int64)
    known = np.flatnonzero((magnitude > 0) & (magnitude <= ceiling))
    weights = (magnitude[known] >> shift).astype(np.float64)
    row, col, count = known // width, known % width, -(-bits.size // width)
    numbers = np.concatenate([np.bincount(row, minlength=count), np.bincount(col, minlength=width)])
    return np.bincount(row, weights, count), np.bincount(col, weights, width), numbers
