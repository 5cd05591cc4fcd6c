"""Reading zero runs and values: the joint tokens of sparse groups, and the pairs of adaptive ones."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_layout import symbol_leads
from ckstore.kernels.entropy_words import Array, Word, inner, int64, load_word, low_bits, read_bits, uint64, unzigzag

_LOADABLE = 56
_ONE = uint64(1)
_BYTE = uint64(255)


@inner
def _read_pairs(
    buffer: Array,
    positions: Array,
    limit: int,
    slots: Array,
    parts: Array,
    coded: Array,
    start: int,
    first: int,
    pairs: int,
    at: int,
    end: int,
) -> int:
    """Read joint tokens one by one, of any width. Returns 0 or 1."""
    mask = uint64(slots.size - 1)
    for i in range(first, pairs):
        position = positions[i & 3]
        if position > limit:
            return 1
        word = load_word(buffer, position >> 3) >> uint64(position & 7)
        entry = slots[word & mask]
        symbol = int64(entry >> 8)
        run_raw = int64(parts[symbol, 0] & _BYTE)
        raw = int64(parts[symbol, 2])
        position += int64(entry & 255)
        run = int64(parts[symbol, 0] >> uint64(8)) + int64(read_bits(buffer, position, limit, run_raw))
        position += run_raw
        number = parts[symbol, 1] | read_bits(buffer, position, limit, raw)
        positions[i & 3] = position + raw
        if run < 0 or run >= end - at - 1:
            return 1
        at += run + 1
        coded[at] = unzigzag(number + _ONE)
    return 0


@inner
def _take_pair(word: Word, slots: Array, mask: Word, parts: Array) -> tuple[int, int, int]:
    """(run plus one, value, bits) of the pair at the low end of `word`."""
    entry = slots[word & mask]
    symbol = entry >> 8
    length = int64(entry & 255)
    head = parts[symbol, 0]
    run_raw = int64(head & _BYTE)
    raw = int64(parts[symbol, 2])
    word >>= uint64(length)
    run = int64((head >> uint64(8)) + low_bits(word, run_raw))
    number = parts[symbol, 1] | low_bits(word >> uint64(run_raw), raw)
    return run + 1, unzigzag(number + _ONE), length + run_raw + raw


@inner
def read_sparse(
    buffer: Array,
    positions: Array,
    limit: int,
    widest: int,
    slots: Array,
    parts: Array,
    coded: Array,
    start: int,
    count: int,
    pairs: int,
) -> int:
    """Read joint tokens into the zeroed elements of a group; `parts` is what `pair_parts` made. Returns 0 or 1."""
    at = start - 1
    end = start + count
    done = int64(0)
    if widest <= _LOADABLE:
        mask = uint64(slots.size - 1)
        p0, p1, p2, p3 = positions[0], positions[1], positions[2], positions[3]
        while done + 4 <= pairs:
            if max(max(p0, p1), max(p2, p3)) > limit:
                return 1
            r0, v0, b0 = _take_pair(load_word(buffer, p0 >> 3) >> uint64(p0 & 7), slots, mask, parts)
            r1, v1, b1 = _take_pair(load_word(buffer, p1 >> 3) >> uint64(p1 & 7), slots, mask, parts)
            r2, v2, b2 = _take_pair(load_word(buffer, p2 >> 3) >> uint64(p2 & 7), slots, mask, parts)
            r3, v3, b3 = _take_pair(load_word(buffer, p3 >> 3) >> uint64(p3 & 7), slots, mask, parts)
            r0 += at
            r1 += r0
            r2 += r1
            r3 += r2
            # Runs are not negative and below 2^44: the last place bounds the others.
            if r3 >= end:
                return 1
            coded[uint64(r0)] = v0
            coded[uint64(r1)] = v1
            coded[uint64(r2)] = v2
            coded[uint64(r3)] = v3
            at = r3
            p0 += b0
            p1 += b1
            p2 += b2
            p3 += b3
            done += 4
        positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    return _read_pairs(buffer, positions, limit, slots, parts, coded, start, done, pairs, at, end)


@inner
def place_pairs(runs: Array, values: Array, first: int, pairs: int, coded: Array, start: int) -> None:
    """Write the pairs of an adaptive group into its zeroed elements; the directory has checked that they fit."""
    at = start - 1
    for i in range(first, first + pairs):
        at += int64(runs[i]) + 1
        coded[at] = unzigzag(values[i] + _ONE)


@inner
def pair_parts(rows: Array, symbols: int, run_symbols: int, leads: Array, raws: Array) -> Array:
    """For every joint symbol: leading part of the run << 8 | its raw bits; leading part of the value; its raw bits."""
    parts = np.empty((symbols, 3), np.uint64)
    run_leads = np.empty(run_symbols, np.int64)
    run_raws = np.empty(run_symbols, np.int64)
    symbol_leads(rows[1], run_leads, run_raws)
    for symbol in range(symbols):
        run_symbol = symbol % run_symbols
        value_symbol = symbol // run_symbols
        run = uint64(run_leads[run_symbol]) << uint64(run_raws[run_symbol])
        raw = uint64(raws[value_symbol])
        parts[symbol, 0] = (run << uint64(8)) | uint64(run_raws[run_symbol])
        parts[symbol, 1] = uint64(leads[value_symbol]) << raw
        parts[symbol, 2] = raw
    return parts
