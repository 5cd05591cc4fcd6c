"""Write symbols and raw bits into four streams, which items use in turn.

An item's code and raw bits are one *entry*: a word with its number of bits in the top byte. If symbols are numbers, a
whole entry comes from a table. Else the raw bits are the lowest bits of the number, and of the zero run of a pair.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.bins import SYMBOLS
from ckstore.kernels.entropy.lengths import canonical_codes
from ckstore.kernels.entropy.payload_directory import EQUAL, SPARSE
from ckstore.kernels.entropy.words import (
    Array,
    Group,
    Word,
    clear,
    inlined,
    int64,
    low_bits,
    spliced,
    store_word,
    uint64,
)

STREAMS = 4
_LOADABLE = int64(56)
# Not plain integers: numba would compile callees again for every literal.
_APPENDS, _MOST_APPENDED = int64(256), int64(4)
"""Appends of a block, and maximal items of an append."""
_SYMBOLS, _STREAMS = int64(SYMBOLS), int64(STREAMS)
_1, _2, _3, _7, _16, _24, _32, _HIGH = (uint64(bits) for bits in (1, 2, 3, 7, 16, 24, 32, 56))
_WORD = uint64((1 << 56) - 1)
_CODE, _BYTE = uint64(0xFFFF), uint64(255)


@inlined
def _append(buffer: Array, place: Word, kept: Word, entry: Word) -> tuple[Word, Word]:
    """Append an entry to a stream. Return its next bit's place, and the bits of the byte that contains it."""
    kept |= (entry & _WORD) << (place & _7)
    store_word(buffer, place >> _3, kept)
    bits = entry >> _HIGH
    return place + bits, kept >> (((place & _7) + bits) & _HIGH)


@spliced
def _fill_heads(group: Group, raws: Array, codes: Array, heads: Array) -> None:
    """Fill by symbol: code | its bits << 16 | raw bits of the run << 24 | those of the value << 32 | all bits << 56."""
    bins, stride = group.bins, group.run_bins
    symbol = uint64(0)
    for value in range(bins):
        for run in range(stride):
            run_raw = uint64(raws[bins + run]) if group.kind == SPARSE else uint64(0)
            code, raw = uint64(codes[symbol]), uint64(raws[value])
            bits = (code >> _16) + run_raw + raw
            heads[symbol] = code | (run_raw << _24) | (raw << _32) | (bits << _HIGH)
            symbol += _1


@spliced
def _fill_words(group: Group, lowers: Array, raws: Array, codes: Array, words: Array) -> None:
    """Fill a table of entries by number, from the smallest one on."""
    for symbol in range(uint64(group.bins)):
        at = uint64(lowers[symbol] + (int64(1) << group.top))
        code, length = uint64(codes[symbol]) & _CODE, uint64(codes[symbol]) >> _16
        raw = uint64(raws[symbol])
        code |= (length + raw) << _HIGH
        for low in range(_1 << raw):
            words[at + low] = code | (low << length)


@inlined
def _entry(at: Word, symbols: Array, runs: Array, values: Array, heads: Array) -> Word:
    """Return the entry of an item, a word of at most 56 bits."""
    head = heads[symbols[at]]
    run_raw = (head >> _24) & _BYTE
    raw = low_bits(uint64(runs[at]), int64(run_raw)) | (
        low_bits(uint64(values[at]), int64((head >> _32) & _BYTE)) << run_raw
    )
    return (head & _CODE) | (head >> _HIGH << _HIGH) | (raw << ((head >> _16) & _BYTE))


@spliced
def _look_up(
    exact: bool, first: int, appends: int, per: int, symbols: Array, runs: Array, values: Array, words: Array,
    heads: Array, entries: Array,
) -> None:  # fmt: skip
    """Fill entries[k, a], of item k of append a; the four streams take turns in appends as they do in items."""
    for k in range(per):
        row = entries[k]
        at = uint64(first + 4 * k)
        skip = uint64(4 * per)
        for a in range(uint64(0), uint64(appends), uint64(4)):
            for i in range(uint64(4)):
                if exact:
                    row[a + i] = words[symbols[at + i]]
                else:
                    row[a + i] = _entry(at + i, symbols, runs, values, heads)
            at += skip


@spliced
def _join(entries: Array, appends: int, words: Array, bits: Array) -> Word:
    """Join the entries of every append into one word and its number of bits. Return the largest of these numbers."""
    e0, e1, e2, e3 = entries[0], entries[1], entries[2], entries[3]
    for a in range(uint64(appends)):
        bits_0, bits_2 = e0[a] >> _HIGH, e2[a] >> _HIGH
        bits_01 = bits_0 + (e1[a] >> _HIGH)
        low = (e0[a] & _WORD) | ((e1[a] & _WORD) << bits_0)
        high = (e2[a] & _WORD) | ((e3[a] & _WORD) << bits_2)
        words[a] = low | (high << bits_01)
        bits[a] = bits_01 + bits_2 + (e3[a] >> _HIGH)
    largest = uint64(0)
    for a in range(uint64(appends)):
        largest = max(largest, bits[a])
    return largest


@spliced
def _likely_items(widest: int, mean: float) -> int:
    """Return the number of items that most probably fit one append, by their mean bits; rare long items may not fit."""
    items = min(int64(_LOADABLE / (1.25 * mean + 2.0)), _MOST_APPENDED)
    # No shift of an item may reach 64 bits.
    while items > 1 and (items - 1) * widest >= 64:
        items -= 1
    return items


@spliced
def _store(words: Array, bits: Array, appends: int, at: Array, buffer: Array, places: Array, kept: Array) -> None:
    """Append a block's words to the four streams in turn."""
    for stream in range(uint64(4)):
        place = places[stream]
        for a in range(stream, uint64(appends), uint64(4)):
            at[a] = place
            place += bits[a]
        places[stream] = place
    # From here on `bits` are those of the whole bytes that an append fills, with the kept bits of the one before.
    for a in range(uint64(appends)):
        held = at[a] & _7
        words[a] <<= held
        bits[a] = (bits[a] + held) & _HIGH
        at[a] >>= _3
    k0, k1, k2, k3 = kept[0], kept[1], kept[2], kept[3]
    for a in range(uint64(0), uint64(appends), uint64(4)):
        k0 |= words[a]
        store_word(buffer, at[a], k0)
        k0 >>= bits[a]
        k1 |= words[a + _1]
        store_word(buffer, at[a + _1], k1)
        k1 >>= bits[a + _1]
        k2 |= words[a + _2]
        store_word(buffer, at[a + _2], k2)
        k2 >>= bits[a + _2]
        k3 |= words[a + _3]
        store_word(buffer, at[a + _3], k3)
        k3 >>= bits[a + _3]
    kept[0], kept[1], kept[2], kept[3] = k0, k1, k2, k3


@kernel
def write_streams(
    groups: Array, number: int, lowers: Array, raws: Array, lengths: Array, symbols: Array, numbers: Array, runs: Array,
    values: Array, joints: Array, words: Array, buffer: Array, room: int, ends: Array,
) -> None:  # fmt: skip
    """Write the groups that have symbols, stream j into `buffer` (uint8) from byte j * room on.

    Fills `ends` (int64, bytes).

    `words` (uint64) is room for a table by number, CELLS; the other parameters are those of `plan_groups`, as it left
    them.
    """
    heads = np.empty(_SYMBOLS, np.uint64)
    codes = np.empty(_SYMBOLS, np.uint32)
    entries = np.empty((_MOST_APPENDED, _APPENDS), np.uint64)
    appended = np.empty(_APPENDS, np.uint64)
    bits = np.empty(_APPENDS, np.uint64)
    starts = np.empty(_APPENDS, np.uint64)
    places = np.empty(_STREAMS, np.uint64)
    kept = np.empty(_STREAMS, np.uint64)
    for stream in range(STREAMS):
        places[stream] = stream * room * 8
        kept[stream] = 0
    for index in range(number):
        group = groups[index]
        if group.kind >= EQUAL or group.widest == 0:
            continue
        clear(codes, group.bins * group.run_bins)
        if group.single < 0:
            canonical_codes(lengths[index], group.bins * group.run_bins, codes)
        _fill_heads(group, raws[index], codes, heads)
        if group.kind == SPARSE:
            first, count = group.first_pair, group.pairs
            items, low, high = joints, runs, values
        else:
            first, count = group.start, group.count
            items, low, high = symbols, numbers, numbers
        exact = group.exact > 0
        if exact:
            _fill_words(group, lowers[index], raws[index], codes, words)
        safe = min(_LOADABLE // group.widest, _MOST_APPENDED)
        likely = max(_likely_items(group.widest, group.bits / count), safe)
        per = likely
        at = first
        items_end = first + count // 4 * 4
        while safe and at < items_end:
            if at + 4 * per > items_end:
                per = int64(1)
            appends = min((items_end - at) // (4 * per) * 4, _APPENDS)
            _look_up(exact, at, appends, per, items, low, high, words, heads, entries)
            for k in range(per, _MOST_APPENDED):
                clear(entries[k], appends)
            largest = _join(entries, appends, appended, bits)
            if per > safe and largest > uint64(_LOADABLE):
                per = safe
                continue
            _store(appended, bits, appends, starts, buffer, places, kept)
            at += appends * per
            per = likely
        # The remaining items, and items that are too long for a load: part for part.
        for i in range(uint64(at), uint64(first + count)):
            stream = (i - uint64(first)) & _3
            if exact:
                places[stream], kept[stream] = _append(buffer, places[stream], kept[stream], words[items[i]])
                continue
            head = heads[items[i]]
            for part in range(uint64(3)):
                # Code, run, value: their bits are eight bits apart.
                word = head & _CODE if part == 0 else uint64(low[i]) if part == 1 else uint64(high[i])
                size = (head >> (_16 + (part << _3))) & _BYTE
                for half in range(uint64(2)):
                    piece = min(size, _32) if half == 0 else size - min(size, _32)
                    entry = low_bits(word >> (_32 * half), int64(piece)) | (piece << _HIGH)
                    places[stream], kept[stream] = _append(buffer, places[stream], kept[stream], entry)
    for stream in range(STREAMS):
        ends[stream] = int64((places[stream] + _7) >> _3)
