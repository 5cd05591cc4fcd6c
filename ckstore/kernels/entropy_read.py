"""Reading the four streams, and the groups that have none, into elements in coded order.

Every load is checked against the end of the payload before it is made (a block of loads at once), every write against
the end of its group; code and raw bits of a damaged payload are nonsense but harmless, and the streams' ends and the
checksums tell.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.entropy_directory import (
    ADAPTIVE,
    CONSTANT,
    COUNT,
    DENSE,
    EQUAL,
    FIRST_PAIR,
    KIND,
    PAIRS,
    RUN_SYMBOLS,
    SINGLE,
    START,
    SYMBOL_COUNT,
)
from ckstore.kernels.entropy_layout import symbol_leads, widest_raw
from ckstore.kernels.entropy_lengths import LONGEST, canonical_codes
from ckstore.kernels.entropy_read_pairs import pair_parts, place_pairs, read_sparse
from ckstore.kernels.entropy_words import (
    Array,
    Word,
    inner,
    int64,
    kernel,
    load_word,
    low_bits,
    read_bits,
    uint64,
    unzigzag,
)

_RESOLVED = 13
"""Codes and their raw bits up to so many bits together are decoded by one look into a table."""
_BYTE = uint64(255)


@inner
def _fill_slots(symbols: int, single: int, lengths: Array, codes: Array, bits: int, slots: Array) -> None:
    """Fill the 2^bits slots of a decoding table with code bits | symbol << 8."""
    if single >= 0:
        for slot in range(1 << bits):
            slots[slot] = np.uint32(single << 8)
        return
    for symbol in range(symbols):
        length = int64(lengths[symbol])
        if length:
            entry = np.uint32(length | (symbol << 8))
            for slot in range(int64(codes[symbol]) & 65535, 1 << bits, 1 << length):
                slots[slot] = entry


@inner
def _read_elements(
    buffer: Array,
    positions: Array,
    limit: int,
    slots: Array,
    leads: Array,
    raws: Array,
    coded: Array,
    start: int,
    first: int,
    count: int,
) -> int:
    """Read elements one by one, of any width. Returns 0 or 1."""
    mask = uint64(slots.size - 1)
    for i in range(first, count):
        position = positions[i & 3]
        if position > limit:
            return 1
        entry = slots[(load_word(buffer, position >> 3) >> uint64(position & 7)) & mask]
        symbol = int64(entry >> 8)
        raw = raws[symbol]
        position += int64(entry & 255)
        number = uint64(leads[symbol]) << uint64(raw)
        number |= read_bits(buffer, position, limit, raw)
        positions[i & 3] = position + raw
        coded[start + i] = unzigzag(number)
    return 0


@inner
def _resolve(word: Word, slots_mask: Word, slots: Array, leads: Array, raws: Array) -> tuple[int, int]:
    """(value, bits) of the element at the low end of `word`, by way of its symbol."""
    entry = slots[word & slots_mask]
    symbol = int64(entry >> 8)
    raw = raws[symbol]
    length = uint64(entry & 255)
    number = (uint64(leads[symbol]) << uint64(raw)) | low_bits(word >> length, raw)
    return unzigzag(number), int64(length) + raw


@inner
def _read_resolved(
    buffer: Array,
    positions: Array,
    limit: int,
    table: Array,
    mask: Word,
    slots: Array,
    leads: Array,
    raws: Array,
    coded: Array,
    start: int,
    count: int,
    per_load: int,
) -> int:
    """Read numbers below 2^16, `per_load` of which fit a load.

    `table` (int32, by the low bits of the stream) holds bits | 256 where raw bits remain | value << 16.
    Returns how many, or -1.
    """
    p0, p1, p2, p3 = positions[0], positions[1], positions[2], positions[3]
    slots_mask = uint64(slots.size - 1)
    block = uint64(4 * per_load)
    i = uint64(start)
    end = uint64(start + count)
    while i + block <= end:
        if max(max(p0, p1), max(p2, p3)) > limit:
            return -1
        w0 = load_word(buffer, p0 >> 3) >> uint64(p0 & 7)
        w1 = load_word(buffer, p1 >> 3) >> uint64(p1 & 7)
        w2 = load_word(buffer, p2 >> 3) >> uint64(p2 & 7)
        w3 = load_word(buffer, p3 >> 3) >> uint64(p3 & 7)
        for _ in range(per_load):
            e0 = int64(table[w0 & mask])
            e1 = int64(table[w1 & mask])
            e2 = int64(table[w2 & mask])
            e3 = int64(table[w3 & mask])
            if (e0 | e1 | e2 | e3) & 256:
                v0, b0 = _resolve(w0, slots_mask, slots, leads, raws)
                v1, b1 = _resolve(w1, slots_mask, slots, leads, raws)
                v2, b2 = _resolve(w2, slots_mask, slots, leads, raws)
                v3, b3 = _resolve(w3, slots_mask, slots, leads, raws)
            else:
                v0, b0 = e0 >> 16, e0 & 255
                v1, b1 = e1 >> 16, e1 & 255
                v2, b2 = e2 >> 16, e2 & 255
                v3, b3 = e3 >> 16, e3 & 255
            coded[i] = v0
            coded[i + uint64(1)] = v1
            coded[i + uint64(2)] = v2
            coded[i + uint64(3)] = v3
            w0 >>= uint64(b0)
            w1 >>= uint64(b1)
            w2 >>= uint64(b2)
            w3 >>= uint64(b3)
            p0 += b0
            p1 += b1
            p2 += b2
            p3 += b3
            i += uint64(4)
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    return int64(i) - start


@inner
def _read_split(
    buffer: Array, positions: Array, limit: int, table: Array, mask: Word, coded: Array, start: int, count: int
) -> int:
    """Read numbers below 2^32 as a table entry and raw bits.

    An entry is bits | code bits << 8 | raw bits << 16 | leading bits << 32. Returns how many, or -1.
    """
    p0, p1, p2, p3 = positions[0], positions[1], positions[2], positions[3]
    for i in range(uint64(start), uint64(start + (count & -4)), uint64(4)):
        if max(max(p0, p1), max(p2, p3)) > limit:
            return -1
        w0 = load_word(buffer, p0 >> 3) >> uint64(p0 & 7)
        w1 = load_word(buffer, p1 >> 3) >> uint64(p1 & 7)
        w2 = load_word(buffer, p2 >> 3) >> uint64(p2 & 7)
        w3 = load_word(buffer, p3 >> 3) >> uint64(p3 & 7)
        e0 = table[w0 & mask]
        e1 = table[w1 & mask]
        e2 = table[w2 & mask]
        e3 = table[w3 & mask]
        coded[i] = _join(w0, e0)
        coded[i + uint64(1)] = _join(w1, e1)
        coded[i + uint64(2)] = _join(w2, e2)
        coded[i + uint64(3)] = _join(w3, e3)
        p0 += int64(e0 & _BYTE)
        p1 += int64(e1 & _BYTE)
        p2 += int64(e2 & _BYTE)
        p3 += int64(e3 & _BYTE)
    positions[0], positions[1], positions[2], positions[3] = p0, p1, p2, p3
    return count & -4


@inner
def _join(word: Word, entry: Word) -> int:
    raw = low_bits(word >> ((entry >> uint64(8)) & uint64(63)), int64((entry >> uint64(16)) & _BYTE))
    return unzigzag((entry >> uint64(32)) | raw)


@inner
def _read_dense(
    buffer: Array,
    positions: Array,
    limit: int,
    top: int,
    widest: int,
    symbols: int,
    lengths: Array,
    slots: Array,
    leads: Array,
    raws: Array,
    coded: Array,
    start: int,
    count: int,
) -> int:
    """Read a group of tokens. Returns 0 or 1."""
    done = int64(0)
    unresolved = 0
    bits = min(widest, _RESOLVED) if slots.size > 1 else 0
    if slots.size > 1:
        for symbol in range(symbols):
            if lengths[symbol] > 0 and lengths[symbol] + raws[symbol] > bits:
                unresolved += 1 << (LONGEST - lengths[symbol])
    if top <= 16 and slots.size > 1 and unresolved <= 1 << (LONGEST - 6) and count >= 1024:
        table = np.empty(1 << bits, np.int32)
        for slot in range(1 << bits):
            value, used = _resolve(uint64(slot), uint64(slots.size - 1), slots, leads, raws)
            table[slot] = np.int32(256) if used > bits else np.int32((value << 16) | used)
        mask = uint64((1 << bits) - 1)
        per_load = 4 if widest <= 14 else 2
        done = _read_resolved(buffer, positions, limit, table, mask, slots, leads, raws, coded, start, count, per_load)
    elif top <= 32:
        split = np.empty(slots.size, np.uint64)
        for slot in range(slots.size):
            length = uint64(slots[slot] & 255)
            symbol = int64(slots[slot] >> 8)
            raw = uint64(raws[symbol])
            lead = uint64(leads[symbol]) << raw
            split[slot] = (length + raw) | (length << uint64(8)) | (raw << uint64(16)) | (lead << uint64(32))
        done = _read_split(buffer, positions, limit, split, uint64(slots.size - 1), coded, start, count)
    if done < 0:
        return 1
    return _read_elements(buffer, positions, limit, slots, leads, raws, coded, start, done, count)


@kernel
def read_streams(
    buffer: Array,
    positions: Array,
    ends: Array,
    groups: Array,
    number: int,
    rows: Array,
    lengths: Array,
    runs: Array,
    values: Array,
    coded: Array,
) -> int:
    """Decode all groups of a directory into `coded` (int32 or int64).

    `buffer` (uint8) is the payload with eight readable bytes behind the last stream; `positions` and `ends` (int64,
    4) are the first bit and the last byte (exclusive) of each stream; `positions` is moved. Returns 0, or 1 where
    streams and directory disagree.
    """
    limit = (buffer.size - 8) << 3
    for index in range(number):
        group = groups[index]
        start = group[START]
        count = group[COUNT]
        kind = group[KIND]
        if kind != DENSE:
            fill = unzigzag(uint64(group[CONSTANT])) if kind == EQUAL else int64(0)
            for i in range(start, start + count):
                coded[i] = fill
            if kind == EQUAL:
                continue
        if kind == ADAPTIVE:
            place_pairs(runs, values, group[FIRST_PAIR], group[PAIRS], coded, start)
            continue
        if limit < 0:
            return 1
        symbols = group[SYMBOL_COUNT]
        single = group[SINGLE]
        codes = np.empty(symbols, np.uint32)
        bits = int64(0)
        if single < 0:
            if canonical_codes(lengths[index], symbols, codes):
                return 1
            for symbol in range(symbols):
                bits = max(bits, int64(lengths[index, symbol]))
        slots = np.empty(1 << bits, np.uint32)
        _fill_slots(symbols, single, lengths[index], codes, bits, slots)
        leads = np.empty(symbols, np.int64)
        raws = np.empty(symbols, np.int64)
        symbol_leads(rows[index, 0], leads, raws)
        widest = bits + widest_raw(rows[index, 0])
        if kind == DENSE:
            top = int64(rows[index, 0, 1])
            bad = _read_dense(
                buffer, positions, limit, top, widest, symbols, lengths[index], slots, leads, raws, coded, start, count
            )
        else:
            if rows[index, 1, 1] > 44:
                return 1
            widest += widest_raw(rows[index, 1])
            parts = pair_parts(rows[index], symbols, group[RUN_SYMBOLS], leads, raws)
            bad = read_sparse(buffer, positions, limit, widest, slots, parts, coded, start, count, group[PAIRS])
        if bad:
            return 1
    for stream in range(4):
        if (positions[stream] + 7) >> 3 != ends[stream]:
            return 1
    return 0
