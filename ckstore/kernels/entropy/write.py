"""Writing the four streams: tokens and raw bits of a payload's large groups.

Item i of a group, an element or a pair, lies in stream i mod 4: its code, lowest bit first, then its raw bits (sparse:
of the run, then of the value). Streams run on from group to group. The last bytes of a stream are stored eight at a
time, so its region needs room.

Items are written in blocks, and a block in steps, each of which is a simple loop: look the items' words up; join the
words of items that follow each other in a stream, as many as fit a load; find the bits' places; store. An *entry* is an
item's word with its number of bits in the top byte.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.directory import (
    BITS,
    COUNT,
    DENSE,
    DIRECT,
    FIRST_PAIR,
    FORM,
    JOINED,
    JOINT,
    KIND,
    LOOSE,
    OCTAVES,
    PAIRS,
    PLANE,
    RUN_BITS,
    SINGLE,
    SPARSE,
    START,
    SYMBOL_COUNT,
    WIDE,
    WIDEST,
)
from ckstore.kernels.entropy.layout import ROW, SYMBOLS, layout_tables, symbol_parts
from ckstore.kernels.entropy.lengths import canonical_codes
from ckstore.kernels.entropy.words import (
    Array,
    Word,
    bit_length,
    inlined,
    int64,
    load_word,
    low_bits,
    spliced,
    store_word,
    uint64,
)

STREAMS = 4
_PLACE, _KEPT = range(2)
"""Rows of the streams' state (uint64): the next bit's place in the buffer; the bits of the byte that it lies in."""
_LOADABLE = 56
# Not plain integers: numba would compile what takes them once more for every literal.
_APPENDS = int64(256)
"""Appends of a block."""
_MOST_APPENDED = int64(4)
"""Most items of an append."""
_2, _STREAMS, _ROW, _SYMBOLS = int64(2), int64(STREAMS), int64(ROW), int64(SYMBOLS)
_TOP = uint64(56)
_WORD = uint64((1 << 56) - 1)


@inlined
def _append(buffer: Array, state: Array, stream: int, word: Word, bits: Word) -> None:
    """Append at most 56 bits to a stream."""
    place = state[_PLACE, stream]
    kept = state[_KEPT, stream] | (word << (place & uint64(7)))
    store_word(buffer, int64(place >> uint64(3)), kept)
    state[_KEPT, stream] = kept >> (((place & uint64(7)) + bits) & uint64(56))
    state[_PLACE, stream] = place + bits


@spliced
def _wide_entry(number: Word, shifts: Array, offsets: Array, heads: Array, lengths: Array) -> Word:
    """The entry of a number of up to 64 bits, its word at most 56, from those of the symbols without raw bits."""
    octave = uint64(bit_length(number))
    shift = uint64(shifts[octave])
    symbol = uint64(offsets[octave]) + (number >> shift)
    return heads[symbol] | (low_bits(number, int64(shift)) << uint64(lengths[symbol]))


@inlined
def _pair_symbol(run: Word, value: Word, shifts: Array, offsets: Array, run_symbols: int) -> tuple[Word, Word, Word]:
    """(joint symbol, raw bits of the run, raw bits of the value)."""
    octave = uint64(bit_length(value))
    run_octave = uint64(bit_length(run))
    shift = uint64(shifts[0, octave])
    run_shift = uint64(shifts[1, run_octave])
    row = (uint64(offsets[0, octave]) + (value >> shift)) * uint64(run_symbols)
    return row + uint64(offsets[1, run_octave]) + (run >> run_shift), run_shift, shift


@spliced
def _pair_entry(
    run: Word, value: Word, shifts: Array, offsets: Array, run_symbols: int, heads: Array, lengths: Array
) -> Word:
    """The entry of a pair, its word at most 56 bits."""
    symbol, run_shift, shift = _pair_symbol(run, value, shifts, offsets, run_symbols)
    raw = low_bits(run, int64(run_shift)) | (low_bits(value, int64(shift)) << run_shift)
    return heads[symbol] | (raw << uint64(lengths[symbol]))


@spliced
def _fill_heads(raws: Array, values: int, runs: int, codes: Array, heads: Array) -> None:
    """Fill the entries of a group's symbols, which lack their raw bits."""
    symbol = uint64(0)
    for value in range(uint64(values)):
        for run in range(uint64(runs)):
            code = uint64(codes[symbol])
            bits = (code >> uint64(16)) + uint64(raws[0, value] + raws[1, run])
            heads[symbol] = (code & uint64(65535)) | (bits << _TOP)
            symbol += uint64(1)


@spliced
def _fill_words(
    leads: Array, raws: Array, values: int, runs: int, run_bits: int, heads: Array, lengths: Array, words: Array
) -> None:
    """Fill a table of entries by number, of a joint number if there is more than one value."""
    symbol = uint64(0)
    for value_symbol in range(uint64(values)):
        raw = uint64(raws[0, value_symbol])
        first = uint64(leads[0, value_symbol]) << raw
        for run_symbol in range(uint64(runs)):
            length = uint64(lengths[symbol])
            run_raw = uint64(raws[1, run_symbol])
            run_first = uint64(leads[1, run_symbol]) << run_raw
            for value in range(uint64(1) << raw):
                number = ((first + value) << uint64(run_bits)) | run_first
                entry = heads[symbol] | (value << (length + run_raw))
                for run in range(uint64(1) << run_raw):
                    words[number + run] = entry | (run << length)
            symbol += uint64(1)


@spliced
def _join_words(words: Array, first: int, bits: int) -> int:
    """Fill a table of pairs of numbers of `bits` bits, behind that of the numbers at `first`. Returns its place."""
    size = uint64(1) << uint64(bits)
    low_words = words[first : first + int64(size)]
    for high in range(size):
        high_word = low_words[high] & _WORD
        high_bits = low_words[high] & ~_WORD
        row = words[first + int64(size * (high + uint64(1))) : first + int64(size * (high + uint64(2)))]
        for low in range(size):
            row[low] = (low_words[low] + high_bits) | (high_word << (low_words[low] >> _TOP))
    return int64(first + size)


@spliced
def _look_up_direct(numbers: Array, first: int, appends: int, per: int, words: Array, entries: Array) -> None:
    """Fill entries[k, a], of item k of append a; four streams take turns in appends as they do in items."""
    mask = uint64(65535)
    for k in range(per):
        row = entries[k]
        at = first + 4 * k
        for a in range(uint64(0), uint64(appends), uint64(4)):
            four = load_word(numbers, at)
            at += 4 * per
            row[a] = words[four & mask]
            row[a + uint64(1)] = words[(four >> uint64(16)) & mask]
            row[a + uint64(2)] = words[(four >> uint64(32)) & mask]
            row[a + uint64(3)] = words[four >> uint64(48)]


@spliced
def _look_up_wide(
    numbers: Array, first: int, appends: int, per: int, shifts: Array, offsets: Array, heads: Array, lengths: Array,
    entries: Array,
) -> None:  # fmt: skip
    """The same for wide numbers."""
    for k in range(per):
        row = entries[k]
        at = uint64(first + 4 * k)
        skip = uint64(4 * per)
        for a in range(uint64(0), uint64(appends), uint64(4)):
            for i in range(uint64(4)):
                row[a + i] = _wide_entry(numbers[at + i], shifts, offsets, heads, lengths)
            at += skip


@spliced
def _look_up_pairs(
    runs: Array, values: Array, first: int, appends: int, per: int, shifts: Array, offsets: Array, run_symbols: int,
    heads: Array, lengths: Array, entries: Array,
) -> None:  # fmt: skip
    """The same for pairs."""
    for k in range(per):
        row = entries[k]
        at = uint64(first + 4 * k)
        skip = uint64(4 * per)
        for a in range(uint64(0), uint64(appends), uint64(4)):
            for i in range(uint64(4)):
                row[a + i] = _pair_entry(runs[at + i], values[at + i], shifts, offsets, run_symbols, heads, lengths)
            at += skip


@spliced
def _join(entries: Array, appends: int, words: Array, bits: Array) -> None:
    """Join the entries of every append into one word and its number of bits."""
    e0, e1, e2, e3 = entries[0], entries[1], entries[2], entries[3]
    for a in range(uint64(appends)):
        bits_0, bits_2 = e0[a] >> _TOP, e2[a] >> _TOP
        bits_01 = bits_0 + (e1[a] >> _TOP)
        low = (e0[a] & _WORD) | ((e1[a] & _WORD) << bits_0)
        high = (e2[a] & _WORD) | ((e3[a] & _WORD) << bits_2)
        words[a] = low | (high << bits_01)
        bits[a] = bits_01 + bits_2 + (e3[a] >> _TOP)


@spliced
def _likely_items(widest: int, mean: float) -> int:
    """How many items of so many bits most probably fit one append; more than fit for sure, but for rare long ones."""
    items = min(int64(_LOADABLE / (1.25 * mean + 2.0)), _MOST_APPENDED)
    # No shift of an item may reach 64 bits.
    while items > 1 and (items - 1) * widest >= 64:
        items -= 1
    return items


@spliced
def _largest(bits: Array, appends: int) -> Word:
    largest = uint64(0)
    for a in range(uint64(appends)):
        largest = max(largest, bits[a])
    return largest


@spliced
def _store(words: Array, bits: Array, appends: int, places: Array, buffer: Array, state: Array) -> None:
    """Append a block's words to the four streams in turn."""
    p0, p1, p2, p3 = state[_PLACE, 0], state[_PLACE, 1], state[_PLACE, 2], state[_PLACE, 3]
    for a in range(uint64(0), uint64(appends), uint64(4)):
        places[a] = p0
        places[a + uint64(1)] = p1
        places[a + uint64(2)] = p2
        places[a + uint64(3)] = p3
        p0 += bits[a]
        p1 += bits[a + uint64(1)]
        p2 += bits[a + uint64(2)]
        p3 += bits[a + uint64(3)]
    state[_PLACE, 0], state[_PLACE, 1], state[_PLACE, 2], state[_PLACE, 3] = p0, p1, p2, p3
    # From here on `bits` are those of the whole bytes that an append fills, with what was kept of the one before.
    for a in range(uint64(appends)):
        held = places[a] & uint64(7)
        words[a] <<= held
        bits[a] = (bits[a] + held) & uint64(56)
        places[a] >>= uint64(3)
    k0, k1, k2, k3 = state[_KEPT, 0], state[_KEPT, 1], state[_KEPT, 2], state[_KEPT, 3]
    for a in range(uint64(0), uint64(appends), uint64(4)):
        k0 |= words[a]
        store_word(buffer, int64(places[a]), k0)
        k0 >>= bits[a]
        k1 |= words[a + uint64(1)]
        store_word(buffer, int64(places[a + uint64(1)]), k1)
        k1 >>= bits[a + uint64(1)]
        k2 |= words[a + uint64(2)]
        store_word(buffer, int64(places[a + uint64(2)]), k2)
        k2 >>= bits[a + uint64(2)]
        k3 |= words[a + uint64(3)]
        store_word(buffer, int64(places[a + uint64(3)]), k3)
        k3 >>= bits[a + uint64(3)]
    state[_KEPT, 0], state[_KEPT, 1], state[_KEPT, 2], state[_KEPT, 3] = k0, k1, k2, k3


@kernel
def write_streams(
    groups: Array,
    number: int,
    rows: Array,
    lengths: Array,
    numbers: Array,
    wide: Array,
    runs: Array,
    values: Array,
    joints: Array,
    words: Array,
    buffer: Array,
    room: int,
    ends: Array,
) -> None:
    """Write the groups that have tokens, stream j into `buffer` (uint8) from byte j * room on.

    Fills `ends` (int64, bytes).

    `words` (uint64) is room for a table by number, 2^TABLE_BITS; the other parameters are those of `plan_dense` and
    `plan_pairs`, as these left them.
    """
    state = np.empty((_2, _STREAMS), np.uint64)
    for stream in range(STREAMS):
        state[_PLACE, stream] = stream * room * 8
        state[_KEPT, stream] = 0
    shifts = np.empty((_2, _ROW), np.int64)
    offsets = np.empty((_2, _ROW), np.int64)
    leads = np.empty((_2, _SYMBOLS), np.int64)
    raws = np.empty((_2, _SYMBOLS), np.int64)
    heads = np.empty(_SYMBOLS, np.uint64)
    codes = np.empty(_SYMBOLS, np.uint32)
    entries = np.empty((_MOST_APPENDED, _APPENDS), np.uint64)
    appended = np.empty(_APPENDS, np.uint64)
    bits = np.empty(_APPENDS, np.uint64)
    places = np.empty(_APPENDS, np.uint64)
    for index in range(number):
        group = groups[index]
        kind = group[KIND]
        if (kind != DENSE and kind != SPARSE) or group[WIDEST] == 0:
            continue
        form = group[FORM]
        is_pair = kind == SPARSE
        first = group[FIRST_PAIR] if is_pair else group[START]
        end = first + (group[PAIRS] if is_pair else group[COUNT])
        small = joints if is_pair else numbers
        large = runs if is_pair else wide
        code_bits = lengths[index]
        for symbol in range(uint64(group[SYMBOL_COUNT])):
            codes[symbol] = 0
        if group[SINGLE] < 0:
            canonical_codes(code_bits, group[SYMBOL_COUNT], codes)
        value_symbols, run_symbols = symbol_parts(rows[index], is_pair, leads, raws)
        _fill_heads(raws, value_symbols, run_symbols, codes, heads)
        layout_tables(rows[index, 1 if is_pair else 0], shifts[1], offsets[1])
        shifts[0, 0] = 0
        offsets[0, 0] = 0
        if is_pair:
            layout_tables(rows[index, 0], shifts[0], offsets[0])
        joined = int64(1)
        table = int64(0)
        if form in (DIRECT, JOINT):
            _fill_words(leads, raws, value_symbols, run_symbols, group[RUN_BITS], heads, code_bits, words)
            while joined < group[JOINED]:
                table = _join_words(words, table, joined * (group[OCTAVES] - 8 * group[PLANE]))
                joined *= 2
        safe = min(_LOADABLE // (joined * group[WIDEST]), _MOST_APPENDED)
        likely = max(_likely_items(joined * group[WIDEST], joined * group[BITS] / (end - first)), safe)
        per = likely
        at = first
        items_end = first + (end - first) // (4 * joined) * 4
        while safe and at < items_end:
            if at + 4 * per > items_end:
                per = int64(1)
            appends = min((items_end - at) // (4 * per) * 4, _APPENDS)
            if form == WIDE:
                _look_up_wide(wide, at, appends, per, shifts[1], offsets[1], heads, code_bits, entries)
            elif form == LOOSE:
                _look_up_pairs(runs, values, at, appends, per, shifts, offsets, run_symbols, heads, code_bits, entries)
            else:
                _look_up_direct(small, at, appends, per, words[table:], entries)
            for k in range(per, _MOST_APPENDED):
                for a in range(uint64(appends)):
                    entries[k, a] = 0
            _join(entries, appends, appended, bits)
            if per > safe and _largest(bits, appends) > uint64(_LOADABLE):
                per = safe
                continue
            _store(appended, bits, appends, places, buffer, state)
            at += appends * per
            per = likely
        # What is left over, or too long for a load: item for item.
        for i in range(uint64(first + joined * (at - first)), uint64(end)):
            stream = int64(i - uint64(first)) & 3
            if form in (DIRECT, JOINT):
                entry = words[small[i]]
                _append(buffer, state, stream, entry & _WORD, entry >> _TOP)
                continue
            run = large[i]
            value = values[i] if is_pair else uint64(0)
            symbol, run_shift, shift = _pair_symbol(run, value, shifts, offsets, run_symbols)
            for part in range(3):
                word, size = uint64(codes[symbol] & 65535), uint64(code_bits[symbol])
                if part:
                    word, size = (run, run_shift) if part == 1 else (value, shift)
                low = min(int64(size), 32)
                _append(buffer, state, stream, low_bits(word, low), uint64(low))
                high = int64(size) - low
                if high:
                    _append(buffer, state, stream, low_bits(word >> uint64(32), high), uint64(high))
    for stream in range(STREAMS):
        ends[stream] = int64((state[_PLACE, stream] + uint64(7)) >> uint64(3))
