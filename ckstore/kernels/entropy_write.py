"""Writing the four streams: tokens and raw bits of a payload's large groups.

Element (or pair) i of a group lies in stream i mod 4: its code, lowest bit first, then its raw bits (sparse: of the
run, then of the value). Streams run on from group to group. The last bytes of a stream are stored eight at a time, so
its region needs room.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_directory import (
    COUNT,
    DENSE,
    FIRST_PAIR,
    KIND,
    PAIRS,
    RUN_SYMBOLS,
    SINGLE,
    SPARSE,
    START,
    SYMBOL_COUNT,
    WIDEST,
)
from ckstore.kernels.entropy_layout import ROW, layout_tables
from ckstore.kernels.entropy_lengths import canonical_codes
from ckstore.kernels.entropy_words import (
    Array,
    Word,
    bit_length,
    inner,
    int64,
    kernel,
    low_bits,
    store_word,
    uint64,
    zigzag,
)

STREAMS = 4
AT, HELD, BITS_HELD = range(3)
"""Columns of a stream's state (int64): next byte, number of bits held back (below 8), those bits."""
_TABLE_OCTAVES = 12
_LOADABLE = 56
_HALF = int64(28)


@inner
def _append(buffer: Array, at: int, held: int, kept: Word, word: Word, bits: int) -> tuple[int, int, Word]:
    """Append at most 56 bits to a stream's (at, held, kept); returns them anew."""
    kept |= word << uint64(held)
    store_word(buffer, at, kept)
    held += bits
    return at + (held >> 3), held & 7, kept >> uint64(held & 56)


@inner
def _append_long(buffer: Array, state: Array, stream: int, word: Word, bits: int) -> None:
    """Append up to 64 bits to a stream."""
    at, held, kept = state[stream, AT], state[stream, HELD], uint64(state[stream, BITS_HELD])
    low = min(bits, 32)
    at, held, kept = _append(buffer, at, held, kept, low_bits(word, low), low)
    if bits > 32:
        at, held, kept = _append(buffer, at, held, kept, low_bits(word >> uint64(32), bits - 32), bits - 32)
    state[stream, AT], state[stream, HELD], state[stream, BITS_HELD] = at, held, int64(kept)


@inner
def _element_word(number: Word, shifts: Array, offsets: Array, codes: Array) -> tuple[Word, int]:
    """(code and raw bits, their number) of one zigzag number, together at most 56 bits."""
    octave = bit_length(number)
    shift = shifts[octave]
    code = uint64(codes[offsets[octave] + int64(number >> uint64(shift))])
    length = code >> uint64(16)
    return (code & uint64(65535)) | (low_bits(number, shift) << length), int64(length) + shift


@inner
def _write_long_elements(
    coded: Array,
    start: int,
    first: int,
    count: int,
    shifts: Array,
    offsets: Array,
    codes: Array,
    buffer: Array,
    state: Array,
) -> None:
    for i in range(first, count):
        number = zigzag(coded[start + i])
        octave = bit_length(number)
        code = codes[offsets[octave] + int64(number >> uint64(shifts[octave]))]
        _append_long(buffer, state, i & 3, uint64(code & 65535), int64(code >> 16))
        _append_long(buffer, state, i & 3, number, shifts[octave])


@inner
def _write_elements(
    coded: Array, start: int, count: int, shifts: Array, offsets: Array, codes: Array, buffer: Array, state: Array
) -> int:
    """Write elements of at most 56 bits, four at a time. Returns how many."""
    a0, h0, k0 = state[0, AT], state[0, HELD], uint64(state[0, BITS_HELD])
    a1, h1, k1 = state[1, AT], state[1, HELD], uint64(state[1, BITS_HELD])
    a2, h2, k2 = state[2, AT], state[2, HELD], uint64(state[2, BITS_HELD])
    a3, h3, k3 = state[3, AT], state[3, HELD], uint64(state[3, BITS_HELD])
    for i in range(uint64(start), uint64(start + (count & -4)), uint64(4)):
        w0, b0 = _element_word(zigzag(coded[i]), shifts, offsets, codes)
        w1, b1 = _element_word(zigzag(coded[i + uint64(1)]), shifts, offsets, codes)
        w2, b2 = _element_word(zigzag(coded[i + uint64(2)]), shifts, offsets, codes)
        w3, b3 = _element_word(zigzag(coded[i + uint64(3)]), shifts, offsets, codes)
        a0, h0, k0 = _append(buffer, a0, h0, k0, w0, b0)
        a1, h1, k1 = _append(buffer, a1, h1, k1, w1, b1)
        a2, h2, k2 = _append(buffer, a2, h2, k2, w2, b2)
        a3, h3, k3 = _append(buffer, a3, h3, k3, w3, b3)
    state[0, AT], state[0, HELD], state[0, BITS_HELD] = a0, h0, int64(k0)
    state[1, AT], state[1, HELD], state[1, BITS_HELD] = a1, h1, int64(k1)
    state[2, AT], state[2, HELD], state[2, BITS_HELD] = a2, h2, int64(k2)
    state[3, AT], state[3, HELD], state[3, BITS_HELD] = a3, h3, int64(k3)
    return count & -4


@inner
def _write_small_elements(coded: Array, start: int, count: int, words: Array, buffer: Array, state: Array) -> int:
    """Write numbers below 2^12, of at most 28 bits, through a table of word | bits << 56. Returns how many."""
    a0, h0, k0 = state[0, AT], state[0, HELD], uint64(state[0, BITS_HELD])
    a1, h1, k1 = state[1, AT], state[1, HELD], uint64(state[1, BITS_HELD])
    a2, h2, k2 = state[2, AT], state[2, HELD], uint64(state[2, BITS_HELD])
    a3, h3, k3 = state[3, AT], state[3, HELD], uint64(state[3, BITS_HELD])
    eight = uint64(56)
    for i in range(uint64(start), uint64(start + (count & -8)), uint64(8)):
        w0 = words[zigzag(coded[i])]
        w1 = words[zigzag(coded[i + uint64(1)])]
        w2 = words[zigzag(coded[i + uint64(2)])]
        w3 = words[zigzag(coded[i + uint64(3)])]
        v0 = words[zigzag(coded[i + uint64(4)])]
        v1 = words[zigzag(coded[i + uint64(5)])]
        v2 = words[zigzag(coded[i + uint64(6)])]
        v3 = words[zigzag(coded[i + uint64(7)])]
        # The number of bits stands in the top byte: two words join by a shift, and their numbers by one addition.
        b0, b1, b2, b3 = w0 >> eight, w1 >> eight, w2 >> eight, w3 >> eight
        c0, c1, c2, c3 = v0 >> eight, v1 >> eight, v2 >> eight, v3 >> eight
        w0 = low_bits(w0, _HALF) | (low_bits(v0, _HALF) << b0)
        w1 = low_bits(w1, _HALF) | (low_bits(v1, _HALF) << b1)
        w2 = low_bits(w2, _HALF) | (low_bits(v2, _HALF) << b2)
        w3 = low_bits(w3, _HALF) | (low_bits(v3, _HALF) << b3)
        a0, h0, k0 = _append(buffer, a0, h0, k0, w0, int64(b0 + c0))
        a1, h1, k1 = _append(buffer, a1, h1, k1, w1, int64(b1 + c1))
        a2, h2, k2 = _append(buffer, a2, h2, k2, w2, int64(b2 + c2))
        a3, h3, k3 = _append(buffer, a3, h3, k3, w3, int64(b3 + c3))
    state[0, AT], state[0, HELD], state[0, BITS_HELD] = a0, h0, int64(k0)
    state[1, AT], state[1, HELD], state[1, BITS_HELD] = a1, h1, int64(k1)
    state[2, AT], state[2, HELD], state[2, BITS_HELD] = a2, h2, int64(k2)
    state[3, AT], state[3, HELD], state[3, BITS_HELD] = a3, h3, int64(k3)
    return count & -8


@inner
def _write_dense(coded: Array, group: Array, row: Array, codes: Array, buffer: Array, state: Array) -> None:
    shifts = np.empty(ROW, np.int64)
    offsets = np.empty(ROW, np.int64)
    layout_tables(row, shifts, offsets)
    start = group[START]
    count = group[COUNT]
    top = int64(row[1])
    done = int64(0)
    if top <= _TABLE_OCTAVES and group[WIDEST] <= _LOADABLE // 2:
        words = np.empty(1 << top, np.uint64)
        for number in range(1 << top):
            word, bits = _element_word(uint64(number), shifts, offsets, codes)
            words[number] = word | (uint64(bits) << uint64(56))
        done = _write_small_elements(coded, start, count, words, buffer, state)
    elif group[WIDEST] <= _LOADABLE:
        done = _write_elements(coded, start, count, shifts, offsets, codes, buffer, state)
    _write_long_elements(coded, start, done, count, shifts, offsets, codes, buffer, state)


@inner
def _pair_word(
    run: Word, value: Word, shifts: Array, offsets: Array, run_symbols: int, codes: Array
) -> tuple[Word, int, int]:
    """(code and raw bits of the run, their number, raw bits of the value) of one pair."""
    octave = bit_length(value)
    run_octave = bit_length(run)
    shift = shifts[1, run_octave]
    symbol = (offsets[0, octave] + int64(value >> uint64(shifts[0, octave]))) * run_symbols
    code = uint64(codes[symbol + offsets[1, run_octave] + int64(run >> uint64(shift))])
    length = code >> uint64(16)
    return (code & uint64(65535)) | (low_bits(run, shift) << length), int64(length) + shift, shifts[0, octave]


@inner
def _write_sparse(
    runs: Array, values: Array, group: Array, rows: Array, codes: Array, buffer: Array, state: Array
) -> None:
    shifts = np.empty((2, ROW), np.int64)
    offsets = np.empty((2, ROW), np.int64)
    layout_tables(rows[0], shifts[0], offsets[0])
    layout_tables(rows[1], shifts[1], offsets[1])
    first = group[FIRST_PAIR]
    pairs = group[PAIRS]
    run_symbols = group[RUN_SYMBOLS]
    if group[WIDEST] > _LOADABLE:
        for i in range(pairs):
            word, bits, shift = _pair_word(runs[first + i], values[first + i], shifts, offsets, run_symbols, codes)
            _append_long(buffer, state, i & 3, word, bits)
            _append_long(buffer, state, i & 3, values[first + i], shift)
        return
    a0, h0, k0 = state[0, AT], state[0, HELD], uint64(state[0, BITS_HELD])
    a1, h1, k1 = state[1, AT], state[1, HELD], uint64(state[1, BITS_HELD])
    a2, h2, k2 = state[2, AT], state[2, HELD], uint64(state[2, BITS_HELD])
    a3, h3, k3 = state[3, AT], state[3, HELD], uint64(state[3, BITS_HELD])
    for i in range(uint64(first), uint64(first + pairs)):
        word, bits, shift = _pair_word(runs[i], values[i], shifts, offsets, run_symbols, codes)
        word |= low_bits(values[i], shift) << uint64(bits)
        # The streams take turns by rotation: after four pairs each is in its place again.
        a, h, k = _append(buffer, a0, h0, k0, word, bits + shift)
        a0, h0, k0 = a1, h1, k1
        a1, h1, k1 = a2, h2, k2
        a2, h2, k2 = a3, h3, k3
        a3, h3, k3 = a, h, k
    turn = pairs & 3
    state[turn, AT], state[turn, HELD], state[turn, BITS_HELD] = a0, h0, int64(k0)
    turn = (pairs + 1) & 3
    state[turn, AT], state[turn, HELD], state[turn, BITS_HELD] = a1, h1, int64(k1)
    turn = (pairs + 2) & 3
    state[turn, AT], state[turn, HELD], state[turn, BITS_HELD] = a2, h2, int64(k2)
    turn = (pairs + 3) & 3
    state[turn, AT], state[turn, HELD], state[turn, BITS_HELD] = a3, h3, int64(k3)


@kernel
def write_streams(
    coded: Array,
    groups: Array,
    number: int,
    rows: Array,
    lengths: Array,
    runs: Array,
    values: Array,
    buffer: Array,
    starts: Array,
    ends: Array,
) -> None:
    """Write the groups that have tokens, stream j into `buffer` (uint8) from byte `starts[j]` on.

    Fills `ends` (int64, bytes).

    The other parameters are those of `plan_groups`, as it left them.
    """
    state = np.zeros((STREAMS, 3), np.int64)
    for stream in range(STREAMS):
        state[stream, AT] = starts[stream]
    for index in range(number):
        group = groups[index]
        kind = group[KIND]
        if kind != DENSE and kind != SPARSE:
            continue
        symbols = group[SYMBOL_COUNT]
        codes = np.zeros(symbols, np.uint32)
        if group[SINGLE] < 0:
            canonical_codes(lengths[index], symbols, codes)
        if kind == DENSE:
            _write_dense(coded, group, rows[index, 0], codes, buffer, state)
        else:
            _write_sparse(runs, values, group, rows[index], codes, buffer, state)
    for stream in range(STREAMS):
        ends[stream] = state[stream, AT] + (state[stream, HELD] > 0)
