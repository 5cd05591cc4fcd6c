"""FM-Delta (Ning et al., NeurIPS 2024): the differences of floats as ordered integers, coded without loss.

As in the paper and its public code: bits become unsigned integers of the floats' order; sign and bit length of each
difference are one symbol of a quasi-static model and a range coder; the bits below the leading one follow unmodelled.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tools.bench.pieces import Bytes

#: Total of a model's frequencies, and the most symbols between two of its updates.
_TOTAL, _PERIOD = 1 << 16, 1 << 10

#: The range coder: 32 bits, renormalised by bytes.
_TOP, _BOTTOM, _MASK = 1 << 24, 1 << 16, (1 << 32) - 1


def encode(data: Bytes, base: Bytes, item: int) -> bytes:
    """Return the coded difference of two equally long arrays of floats of `item` bytes."""
    symbols, rest = _differences(_ordered(data, item), _ordered(base, item), 8 * item)
    return bytes(_encode(symbols, rest, 8 * item))


def decode(payload: bytes, base: Bytes, item: int) -> Bytes:
    """Invert `encode`."""
    old = _ordered(base, item)
    new = _decode(np.frombuffer(payload, np.uint8), old, 8 * item)
    top = old.dtype.type(1 << (8 * item - 1))
    return np.where(new & top, new ^ top, ~new).astype(old.dtype).view(np.uint8)


def _ordered(data: Bytes, item: int) -> np.ndarray:
    """Return the bits of floats as unsigned integers in the floats' order."""
    bits = data.view(f"u{item}")
    top = bits.dtype.type(1 << (8 * item - 1))
    ordered: np.ndarray = np.where(bits & top, ~bits, bits | top)
    return ordered


@njit(cache=True)
def _differences(new: np.ndarray, old: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return symbols, `width` plus or minus the differences' bit lengths, and the differences."""
    symbols = np.empty(new.size, np.int64)
    rest = np.empty(new.size, np.uint64)
    for k in range(new.size):
        above = new[k] >= old[k]
        rest[k] = np.uint64(new[k]) - np.uint64(old[k]) if above else np.uint64(old[k]) - np.uint64(new[k])
        length = 0
        left = rest[k]
        while left:
            left >>= np.uint64(1)
            length += 1
        symbols[k] = width + length if above else width - length
    return symbols, rest


@njit(cache=True)
def _renewed(counts: np.ndarray, cumulative: np.ndarray) -> None:
    """Bring a model's frequencies up to date with its counts, and halve these."""
    known = counts.sum()
    at = 0
    for symbol in range(counts.size):
        cumulative[symbol] = at
        at += 1 + counts[symbol] * (_TOTAL - counts.size) // max(known, 1)
        counts[symbol] >>= 1
    cumulative[counts.size] = _TOTAL


@njit(cache=True)
def _encode(symbols: np.ndarray, rest: np.ndarray, width: int) -> np.ndarray:
    counts, cumulative = np.zeros(2 * width + 1, np.int64), np.empty(2 * width + 2, np.int64)
    _renewed(counts, cumulative)
    out = np.empty(16 + symbols.size * (4 + width // 4), np.uint8)
    low, span, size, period, left = 0, _MASK, 0, 16, 16
    for k in range(symbols.size):
        symbol = symbols[k]
        unmodelled = abs(symbol - width) - 1
        while True:
            if symbol >= 0:
                start, share, shift = cumulative[symbol], cumulative[symbol + 1] - cumulative[symbol], 16
            else:
                shift = min(unmodelled, 16)
                unmodelled -= shift
                start, share = np.int64((rest[k] >> np.uint64(unmodelled)) & np.uint64((1 << shift) - 1)), 1
            span >>= shift
            low = (low + start * span) & _MASK
            span *= share
            while (low ^ (low + span)) < _TOP or span < _BOTTOM:
                if (low ^ (low + span)) >= _TOP:
                    span = -low & (_BOTTOM - 1)
                out[size] = low >> 24
                size += 1
                low = (low << 8) & _MASK
                span <<= 8
            symbol = -1
            if unmodelled <= 0:
                break
        counts[symbols[k]] += 32
        left -= 1
        if left == 0:
            _renewed(counts, cumulative)
            period = min(2 * period, _PERIOD)
            left = period
    for _ in range(4):
        out[size] = low >> 24
        size += 1
        low = (low << 8) & _MASK
    return out[:size]


@njit(cache=True)
def _decode(data: np.ndarray, old: np.ndarray, width: int) -> np.ndarray:
    counts, cumulative = np.zeros(2 * width + 1, np.int64), np.empty(2 * width + 2, np.int64)
    _renewed(counts, cumulative)
    new = np.empty_like(old)
    low, span, period, left, size, code = 0, _MASK, 16, 16, 0, 0
    for _ in range(4):
        code = (code << 8) | data[size]
        size += 1
    for k in range(old.size):
        symbol, unmodelled, difference = -1, 0, np.uint64(0)
        while True:
            first = symbol < 0
            shift = 16 if first else min(unmodelled, 16)
            span >>= shift
            at = ((code - low) & _MASK) // span
            if first:
                symbol = int(np.searchsorted(cumulative, at, side="right")) - 1
                start, share = cumulative[symbol], cumulative[symbol + 1] - cumulative[symbol]
                unmodelled = abs(symbol - width) - 1
                difference = np.uint64(symbol != width)
            else:
                start, share = at, 1
                unmodelled -= shift
                difference = (difference << np.uint64(shift)) | np.uint64(at)
            low = (low + start * span) & _MASK
            span *= share
            while (low ^ (low + span)) < _TOP or span < _BOTTOM:
                if (low ^ (low + span)) >= _TOP:
                    span = -low & (_BOTTOM - 1)
                code = ((code << 8) & _MASK) | (data[size] if size < data.size else 0)
                size += 1
                low = (low << 8) & _MASK
                span <<= 8
            if unmodelled <= 0:
                break
        counts[symbol] += 32
        left -= 1
        if left == 0:
            _renewed(counts, cumulative)
            period = min(2 * period, _PERIOD)
            left = period
        new[k] = old[k] + difference if symbol >= width else old[k] - difference
    return new
