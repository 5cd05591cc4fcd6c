from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.kernels import entropy
from ckstore.kernels.entropy import SYMBOLS
from ckstore.kernels.native import check, function
from tests import payload_reader
from tests.kernels.inner import (
    LONGEST,
    OCTAVES,
    Bits,
    cell_of,
    choose_bins,
    code_lengths,
    list_bins,
    set_geometry,
    symbols_of_cells,
)

canonical_codes = function("canonical_codes", "pp")


def huffman_cost(counts):
    """Return the bits of an unlimited Huffman code, by the textbook's heap."""
    heap = [int(count) for count in counts if count]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        cost += joined
        heapq.heappush(heap, joined)
    return cost


def limited_cost(counts, longest):
    """Return the bits of the best code of limited length, by package-merge."""
    leaves = sorted((int(count), (symbol,)) for symbol, count in enumerate(counts) if count)
    packages = []
    for _ in range(longest):
        merged = sorted(leaves + packages)
        packages = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(merged[0::2], merged[1::2], strict=False)]
    return sum(weight for weight, _ in packages[: len(leaves) - 1])


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60))
def test_short_code_lengths_are_huffmans(counts):
    counts = np.array(counts, np.int64)
    lengths = np.zeros(counts.size, np.uint8)
    if np.count_nonzero(counts) < 2:
        return
    single, bits = code_lengths(counts, counts.size, lengths)
    assert single == -1
    assert bits == (counts * lengths).sum()
    assert ((lengths > 0) == (counts > 0)).all()
    assert sum(2.0 ** -int(length) for length in lengths if length) == 1
    if lengths.max() < LONGEST:
        assert bits == huffman_cost(counts)


@pytest.mark.parametrize("ratio", [1.5, 1.7, 2.0, 3.0])
def test_limited_code_lengths_are_near_the_best(ratio):
    counts = np.array([int(ratio**i) + 1 for i in range(30)], np.int64)
    lengths = np.zeros(counts.size, np.uint8)
    _, bits = code_lengths(counts, counts.size, lengths)
    assert lengths.max() == LONGEST
    assert sum(2.0 ** -int(length) for length in lengths) == 1
    assert bits <= 1.01 * limited_cost(counts, LONGEST)


def test_a_full_alphabet_gets_a_complete_code():
    counts = np.ones(SYMBOLS, np.int64)
    counts[0] = 1 << 40
    lengths = np.zeros(SYMBOLS, np.uint8)
    code_lengths(counts, SYMBOLS, lengths)
    assert set(lengths.tolist()) == {12}


def test_a_lone_symbol_is_named():
    lengths = np.full(5, 9, np.uint8)
    assert code_lengths(np.array([0, 0, 7, 0, 0]), 5, lengths) == (2, 0)
    assert not lengths.any()


@given(st.lists(st.integers(0, 13), min_size=1, max_size=40))
def test_canonical_codes_accept_complete_codes_only(lengths):
    array = np.array(lengths, np.uint8)
    codes = np.zeros(array.size, np.uint32)
    complete = max(lengths) <= 12 and sum(2 ** (12 - length) for length in lengths if length) == 4096
    assert canonical_codes(id(array), id(codes)) == (0 if complete else 1)
    if complete:
        expected = payload_reader.canonical_codes(lengths)
        for (length, code), symbol in expected.items():
            assert codes[symbol] >> 16 == length
            assert int(codes[symbol] & 0xFFFF) == int(format(code, f"0{length}b")[::-1], 2)


GEOMETRIES = [(12, 7), (6, 5), (8, 3), (15, 0)]


@pytest.mark.parametrize(("exact", "fine"), GEOMETRIES)
@given(top=st.integers(0, 63), data=st.data())
def test_cells_cut_all_numbers_in_ascending_order(exact, fine, top, data):
    top = min(top, 15) if fine == 0 else top
    geometry = np.zeros((6, OCTAVES), np.int64)
    cells = set_geometry(top, exact, fine, geometry)
    limits = st.integers(-(1 << top), (1 << top) - 1)
    numbers = sorted({*data.draw(st.lists(limits, max_size=20)), -(1 << top), -1, 0, (1 << top) - 1})
    found = [cell_of(np.int64(number), geometry) for number in numbers]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, cells - 1)
    for number, cell in zip(numbers, found, strict=True):
        octave = (number if number >= 0 else -number - 1).bit_length()
        size = 1 if octave <= exact or octave - 1 <= fine else 1 << octave - 1 - fine
        first = number // size * size
        same = {cell_of(np.int64(first), geometry), cell_of(np.int64(first + size - 1), geometry)}
        assert same == {cell}
        if first > -(1 << top):
            assert cell_of(np.int64(first - 1), geometry) == cell - 1


def bins_of(numbers, top, deepest, price, geometry_of=(12, 7), all_occur=False, most=SYMBOLS):
    """(cost, losses, lowers, raws, counts) of the best bins of some numbers."""
    geometry = np.zeros((6, OCTAVES), np.int64)
    cells = np.zeros(set_geometry(top, *geometry_of, geometry), np.int64)
    for number in numbers:
        cells[cell_of(np.int64(number), geometry)] += 1
    splits = np.zeros(2 * cells.size, np.uint8)
    floors, losses = np.zeros(2, np.int64), np.zeros(8)
    lowers, raws, counts = np.zeros(most, np.int64), np.zeros(most, np.uint8), np.zeros(most, np.int64)
    cost = choose_bins(cells, geometry, top, deepest, price, 0.0, splits, floors, losses)
    bins = list_bins(cells, geometry, top, deepest, all_occur, splits, floors, lowers, raws, counts, most)
    table = np.full(cells.size, 9999, np.uint16)
    symbols_of_cells(geometry, lowers, raws, min(bins, most), table)
    for number in numbers if bins <= most else ():
        symbol = table[cell_of(np.int64(number), geometry)]
        assert 0 <= int(number) - int(lowers[symbol]) < 1 << int(raws[symbol])
    return cost, losses, lowers[:bins], raws[:bins], counts[:bins]


@pytest.mark.parametrize("scale", [0.5, 3, 100, 1e4, 1e7, 1e12])
@pytest.mark.parametrize("deepest", [11, 3])
def test_bins_hold_every_number_once_at_the_stated_cost(scale, deepest):
    rng = np.random.default_rng(5)
    numbers = (rng.standard_normal(3000) * scale).astype(np.int64)
    top = int(np.abs(numbers).max()).bit_length()
    cost, _, lowers, raws, counts = bins_of(numbers, top, deepest, 8.0)
    assert (np.diff(lowers) >= 1 << raws[:-1].astype(np.int64)).all()
    assert (lowers % (1 << raws.astype(np.int64)) == 0).all()
    expected = np.bincount(np.searchsorted(lowers, numbers, side="right") - 1, minlength=lowers.size)
    assert (counts == expected).all()
    bits = (counts * (raws + np.log2(numbers.size / counts))).sum()
    assert cost == pytest.approx(bits + 8 * counts.size)


def best_cost(numbers, price):
    """Return the cost of the best bins of the numbers below 8, of either sign, by exhaustive search."""

    def cost(low, raw):
        count = sum(low <= number < low + (1 << raw) for number in numbers)
        whole = count * (raw - np.log2(count)) + price if count else 0.0
        return min(whole, cost(low, raw - 1) + cost(low + (1 << raw - 1), raw - 1)) if raw else whole

    return cost(-8, 3) + cost(0, 3) + len(numbers) * np.log2(len(numbers))


@given(st.lists(st.integers(-8, 7), min_size=1, max_size=60), st.floats(0, 20))
def test_no_bins_are_better(numbers, price):
    assert bins_of(numbers, 3, 11, price)[0] == pytest.approx(best_cost(numbers, price))


def test_losses_are_the_cost_of_whole_bytes_of_raw_bits():
    rng = np.random.default_rng(6)
    smooth = (rng.standard_normal(20_000) * (1 << 13)).astype(np.int64)
    assert bins_of(smooth, 16, 7, 20.0)[1][1] < 1e-4 * 15 * smooth.size
    steps = smooth >> 6 << 6
    assert bins_of(steps, 16, 9, 20.0, (10, 9))[1][1] > 1.5 * smooth.size


def test_bins_beyond_the_capacity_are_counted():
    numbers = np.arange(-300, 300)
    assert bins_of(numbers, 9, 11, 0.0, most=100)[2].size <= 600
    assert bins_of(np.repeat(np.arange(0, 600, 2), 9), 10, 11, 0.0, most=100)[0] > 0


def test_bins_without_numbers_are_listed_where_they_may_occur():
    _, _, lowers, raws, counts = bins_of([5] * 100, 4, 11, 1.0, all_occur=True)
    assert counts.sum() == 100 + counts.size
    sizes = 1 << raws.astype(np.int64)
    assert lowers[0] == -16
    assert (lowers[1:] == lowers[:-1] + sizes[:-1]).all()
    assert lowers[-1] + sizes[-1] == 16


@given(st.lists(st.tuples(st.sampled_from(["bits", "number"]), st.integers(0, 2**64 - 1)), max_size=40), st.data())
def test_bits_and_numbers_come_back(items, data):
    shift = data.draw(st.integers(0, 63))
    items = [(kind, value >> (max(shift, 7) if kind == "bits" else shift)) for kind, value in items]
    buffer = np.zeros(4096, np.uint8)
    written = Bits(buffer, True)
    for kind, value in items:
        if kind == "bits":
            written.code_bits(value.bit_length(), value)
        else:
            written.code_number(value)
    data = buffer[: written.position + 7 >> 3].copy()
    read = Bits(data, False)
    reference = payload_reader.BitReader(data.tobytes())
    for kind, value in items:
        if kind == "bits":
            assert read.code_bits(value.bit_length()) == reference.raw(value.bit_length()) == value
        else:
            assert read.code_number() == reference.number() == value
    assert read.position == written.position
    # Zeros follow the last byte; nothing is written there.
    assert read.code_bits(57) == 0
    around = np.zeros(9, np.uint8)
    Bits(around[1:1], True).code_bits(57, (1 << 57) - 1)
    assert not around.any()


@given(st.integers(0, 63), st.integers(0, 2**32 - 1))
def test_tables_of_bins_come_back(top, seed):
    rng = np.random.default_rng(seed)
    lowers, raws = [], []
    nodes = [(0, top), (-1 << top, top)]
    while nodes:
        lower, raw = nodes.pop()
        if raw and rng.random() < 0.8 and len(nodes) + len(lowers) < 300:
            nodes += [(lower + (1 << raw - 1), raw - 1), (lower, raw - 1)]
        elif rng.random() < 0.6:
            lowers.append(lower)
            raws.append(raw)
    buffer = np.zeros(4096, np.uint8)
    number = len(lowers)
    tables = np.array(lowers, np.int64), np.array(raws, np.uint8)
    assert Bits(buffer, True).code_bins(top, number, *tables) == (top, number)
    found, found_raws = np.zeros(400, np.int64), np.zeros(400, np.uint8)
    assert Bits(buffer, False).code_bins(0, 0, found, found_raws) == (top, number)
    assert found[:number].tolist() == lowers
    assert found_raws[:number].tolist() == raws
    bins = payload_reader.read_bins(payload_reader.BitReader(buffer.tobytes()))
    assert bins == list(zip(lowers, raws, strict=True))
    # No room for all of them.
    if number:
        assert Bits(buffer, False).code_bins(0, 0, found[: number - 1], found_raws[: number - 1])[1] == 0


def test_a_table_of_countless_bins_is_refused():
    for byte in range(256):
        data = np.full(100_000, byte, np.uint8)
        read = Bits(data, False)
        _, bins = read.code_bins(0, 0, np.zeros(SYMBOLS, np.int64), np.zeros(SYMBOLS, np.uint8))
        assert bins <= SYMBOLS
        assert read.position <= 3 * 4 * SYMBOLS + 200


def pointers(groups):
    """Return a directory as kernels take it, with groups alone."""
    return np.array([groups.ctypes.data, 0, 0, 0, 0, 0], np.uint64)


def natural_order(coded, kinds, counts, back):
    """Return elements in natural order from coded order, for a table of groups with these counts by class."""
    present = np.flatnonzero(counts)
    groups = np.zeros(64, entropy.GROUP)
    groups["label"][: present.size] = present
    groups["count"][: present.size] = counts[present]
    groups["start"][: present.size] = np.cumsum(counts[present]) - counts[present]
    directory = pointers(groups)
    return entropy.to_natural_order(coded, kinds, directory.ctypes.data, present.size, back)


@given(
    st.sampled_from([0, 1, 30, 64, 300, 16_383, 16_384, 33_001]),
    st.integers(1, 64),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from(["int8", "int16", "int32", "int64"]),
    st.integers(0, 2**32 - 1),
)
def test_coded_order_is_a_stable_sort(size, classes, common, dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, size, endpoint=True).astype(dtype)
    kinds = rng.integers(0, classes, size).astype(np.uint8)
    # Large arrays have few classes, which alternate or come in runs.
    few = rng.integers(0, classes, rng.integers(1, 5))
    chosen = rng.random(size) < common
    kinds[chosen] = few[(np.arange(size) // rng.choice([1, 50, 500]))[chosen] % few.size]
    cursors = np.empty((4, 256), np.int64)
    groups = np.zeros(64, entropy.GROUP)
    directory = pointers(groups)
    number = entropy.group_classes(kinds, cursors, directory.ctypes.data)
    counts = np.bincount(kinds, minlength=64)
    assert groups["label"][:number].tolist() == np.flatnonzero(counts).tolist()
    assert groups["count"][:number].tolist() == counts[counts > 0].tolist()
    assert not groups[number:].view(np.int64).any()
    around = np.full(size + 200, 77, dtype)
    coded = around[100 : 100 + size]
    entropy.to_coded_order(values, kinds, cursors, coded)
    assert (coded == values[np.argsort(kinds, kind="stable")]).all()
    assert (around[:100] == 77).all()
    assert (around[100 + size :] == 77).all()
    back = around[50 : 50 + size].copy()
    assert natural_order(coded, kinds, counts, back) == 0
    assert (back == values).all()


@given(st.integers(1, 1000), st.integers(0, 2**32 - 1), st.booleans())
def test_classes_that_do_not_fit_the_groups_are_reported(size, seed, few):
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3 if few else rng.integers(1, 256), size, endpoint=True).astype(np.uint8)
    counts = np.bincount(kinds % 64, minlength=64)
    # Move some elements into another class, all of them at worst.
    moved = rng.integers(1, counts.max(), endpoint=True)
    counts[counts.argmax()] -= moved
    counts[rng.choice(np.flatnonzero(np.arange(64) != counts.argmax()))] += moved
    fits = kinds.max() < 64 and (counts == np.bincount(kinds, minlength=64)).all()
    coded = np.arange(size, dtype=np.int32)
    assert natural_order(coded, kinds, counts, np.empty_like(coded)) == int(not fits)


@pytest.mark.parametrize("position", [0, 3, 4, 6])
def test_a_class_out_of_range_is_reported(position):
    kinds = np.zeros(7, np.uint8)
    kinds[position] = 64
    groups = np.empty(64, entropy.GROUP)
    directory = pointers(groups)
    assert entropy.group_classes(kinds, np.empty((4, 256), np.int64), directory.ctypes.data) == -1


#: As in `tables.h`: a symbol, kinds of entries, and an entry that is unresolved.
SYMBOL = np.dtype({
    "names": ["number", "run", "code", "length", "raw", "run_raw"],
    "formats": ["i8", "i8", "i2", "i2", "i2", "i2"],
})  # fmt: skip
BY_SYMBOL, BY_CODE, BY_PAIR = range(3)
UNRESOLVED = 64

_fill_table = function("fill_table", "piipi")


def fill_table(table, bits, tells, symbols):
    check(_fill_table(id(table), bits, tells, symbols.ctypes.data, symbols.size))


@st.composite
def symbol_tables(draw):
    """A complete code whose symbols mean arbitrary numbers and runs."""
    counts = np.array(draw(st.lists(st.integers(0, 500), min_size=1, max_size=40)), np.int64)
    counts[draw(st.integers(0, counts.size - 1))] += 1
    lengths = np.zeros(counts.size, np.uint8)
    single, _ = code_lengths(counts, counts.size, lengths)
    codes = np.zeros(counts.size, np.uint32)
    if single < 0:
        assert canonical_codes(id(lengths), id(codes)) == 0
    occurs = (lengths > 0) | (np.arange(counts.size) == single)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    symbols = np.zeros(counts.size, SYMBOL)
    symbols["code"] = codes & 65535
    symbols["length"] = np.where(occurs, lengths.astype(np.int64), -1)
    for number, raw in (("number", "raw"), ("run", "run_raw")):
        bits = rng.integers(0, draw(st.integers(1, 20)), counts.size)
        reach = 1 << draw(st.integers(0, 30)) >> bits
        symbols[raw], symbols[number] = bits, rng.integers(-reach, reach, endpoint=True) << bits
    return symbols


def symbol_at(symbols, bits, known):
    """The symbol whose code is the lowest of `known` bits, or None where these are too few to tell."""
    for symbol in np.flatnonzero(symbols["length"] >= 0).tolist():
        code, length = symbols[["code", "length"]][symbol].tolist()
        if length <= known and bits & ((1 << length) - 1) == code:
            return symbol
    return None


SLOTS = st.lists(st.integers(0, (1 << 13) - 1), min_size=1, max_size=30)


@given(symbol_tables(), SLOTS)
def test_tables_of_codes(symbols, slots):
    symbols["run"] = symbols["run_raw"] = 0
    longest = int(symbols["length"].max())
    by_symbol, by_code = np.full((2, 1 << longest), 77, np.uint64)
    fill_table(by_symbol[: 1 << longest], longest, BY_SYMBOL, symbols)
    fill_table(by_code[: 1 << longest], longest, BY_CODE, symbols)
    for slot in slots:
        slot &= (1 << longest) - 1
        symbol = symbol_at(symbols, slot, longest)
        number, _, _, length, raw, _ = symbols[symbol].tolist()
        assert by_symbol[slot] == length | symbol << 8
        assert by_code.view(np.int64)[slot] == length + raw | length << 8 | number << 12


@given(symbol_tables(), st.integers(1, 13), SLOTS)
def test_tables_of_pairs(symbols, bits, slots):
    table = np.full(1 << bits, 77, np.uint64)
    fill_table(table, bits, BY_PAIR, symbols)
    for slot in slots:
        slot &= (1 << bits) - 1
        expected = UNRESOLVED
        symbol = symbol_at(symbols, slot, bits)
        if symbol is not None:
            number, run, _, length, raw, run_raw = symbols[symbol].tolist()
            total = length + run_raw + raw
            if total <= bits and run >= 0 and run + (1 << run_raw) < 1 << 16:
                run += slot >> length & ((1 << run_raw) - 1)
                number += slot >> length + run_raw & ((1 << raw) - 1)
                expected = total | run + 1 << 8 | (number & 0xFFFFFFFF) << 32
        assert table[slot] == expected
