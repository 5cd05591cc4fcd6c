from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from ckstore.kernels import (
    entropy_coder,
    entropy_directory,
    entropy_layout,
    entropy_lengths,
    entropy_order,
    entropy_reference,
)
from ckstore.kernels.entropy_layout import ROW, SYMBOLS
from ckstore.kernels.entropy_words import bit_length, low_bits, unzigzag, zigzag


def callable_from_python(kernel):
    """An inner kernel with the wrapper that it is compiled without."""
    return njit(error_model="numpy")(kernel.py_func)


code_lengths = callable_from_python(entropy_lengths.code_lengths)
canonical_codes = callable_from_python(entropy_lengths.canonical_codes)
choose_layout = callable_from_python(entropy_layout.choose_layout)
layout_tables = callable_from_python(entropy_layout.layout_tables)
symbol_leads = callable_from_python(entropy_layout.symbol_leads)
merge_counts = callable_from_python(entropy_layout.merge_counts)
widest_raw = callable_from_python(entropy_layout.widest_raw)
fine_bin = callable_from_python(entropy_layout.fine_bin)
fine_size = callable_from_python(entropy_layout.fine_size)
octave_bins = callable_from_python(entropy_layout.octave_bins)
code_raw = callable_from_python(entropy_coder.code_raw)
code_number = callable_from_python(entropy_directory.code_number)


@njit
def zigzag_facts(value):
    number = zigzag(value)
    return number, unzigzag(number), bit_length(number), low_bits(number, 20)


def huffman_cost(counts):
    """Bits of an unlimited Huffman code, by the textbook's heap."""
    heap = [int(count) for count in counts if count]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        cost += joined
        heapq.heappush(heap, joined)
    return cost


def limited_cost(counts, longest):
    """Bits of the best code of limited length, by package-merge."""
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
    if lengths.max() < entropy_lengths.LONGEST:
        assert bits == huffman_cost(counts)


@pytest.mark.parametrize("ratio", [1.5, 1.7, 2.0, 3.0])
def test_limited_code_lengths_are_near_the_best(ratio):
    counts = np.array([int(ratio**i) + 1 for i in range(30)], np.int64)
    lengths = np.zeros(counts.size, np.uint8)
    _, bits = code_lengths(counts, counts.size, lengths)
    assert lengths.max() == entropy_lengths.LONGEST
    assert sum(2.0 ** -int(length) for length in lengths) == 1
    assert bits <= 1.01 * limited_cost(counts, entropy_lengths.LONGEST)


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
    assert canonical_codes(array, array.size, codes) == (0 if complete else 1)
    if complete:
        expected = entropy_reference.canonical_codes(lengths)
        for (length, code), symbol in expected.items():
            assert codes[symbol] >> 16 == length
            assert int(codes[symbol] & 0xFFFF) == int(format(code, f"0{length}b")[::-1], 2)


@given(st.integers(-(2**63), 2**63 - 1))
def test_zigzag_is_undone(value):
    number, back, length, low = zigzag_facts(np.int64(value))
    assert number == (2 * value if value >= 0 else -2 * value - 1)
    assert back == value
    assert entropy_reference.unzigzag(int(number)) == value
    assert length == int(number).bit_length()
    assert low == int(number) & 0xFFFFF


def test_fine_bins_are_monotonous_and_within_their_octave():
    for resolution in (7, 11):
        numbers = [n for octave in range(1, 41) for n in (1 << octave - 1, (1 << octave) - 1, 5 << octave >> 3)]
        bins = [int(fine_bin(np.uint64(n), resolution)) for n in sorted(numbers)]
        assert bins == sorted(bins)
        for n in numbers:
            first, level = octave_bins(n.bit_length(), resolution)
            assert first <= fine_bin(np.uint64(n), resolution) < first + (1 << level)
        assert fine_bin(np.uint64((1 << 40) - 1), resolution) == fine_size(40, resolution) - 1


@pytest.mark.parametrize("scale", [0.5, 3, 100, 1e4, 1e7])
@pytest.mark.parametrize("limit", [SYMBOLS, 80])
def test_a_chosen_layout_covers_every_number_once(scale, limit):
    rng = np.random.default_rng(5)
    numbers = np.abs(rng.standard_normal(5000) * scale).astype(np.uint64)
    top = int(numbers.max()).bit_length()
    bins = np.zeros(fine_size(top, 7), np.int64)
    for number in numbers:
        bins[fine_bin(number, 7)] += 1
    row = np.zeros(ROW, np.uint8)
    bits = choose_layout(bins, top, 7, 8.0, limit, row)
    shifts, offsets = np.zeros((2, ROW), np.int64)
    symbols = layout_tables(row, shifts, offsets)
    assert symbols <= limit
    leads, raws = np.zeros((2, symbols), np.int64)
    assert symbol_leads(row, leads, raws) == symbols
    counts = np.zeros(SYMBOLS, np.int64)
    raw_bits = 0
    for number in numbers.tolist():
        octave = number.bit_length()
        symbol = offsets[octave] + (number >> shifts[octave])
        assert shifts[octave] == raws[symbol]
        assert leads[symbol] << raws[symbol] == number >> raws[symbol] << raws[symbol]
        counts[symbol] += 1
        raw_bits += raws[symbol]
    merged = np.zeros(SYMBOLS, np.int64)
    assert merge_counts(bins, row, 7, merged) == (symbols, raw_bits)
    assert (merged[:symbols] == counts[:symbols]).all()
    used = counts[counts > 0]
    assert bits == pytest.approx(raw_bits + (used * np.log2(numbers.size / used)).sum())
    assert widest_raw(row) == raws.max()


@given(st.lists(st.tuples(st.sampled_from(["raw", "number"]), st.integers(0, 2**64 - 1)), max_size=40), st.data())
def test_the_binary_coder_gives_back_what_it_took(items, data):
    shift = data.draw(st.integers(0, 63))
    items = [(kind, value >> shift) for kind, value in items]
    buffer = np.empty(4096, np.uint8)
    coder = np.zeros(5, np.int64)
    odds = np.empty((entropy_directory.CONTEXTS, 2), np.int32)
    entropy_coder.start_coder(coder, buffer, odds, 1)
    for kind, value in items:
        if kind == "raw":
            code_raw(coder, buffer, value.bit_length(), np.uint64(value))
        else:
            code_number(coder, buffer, odds, 1, np.uint64(value))
    size = entropy_coder.finish_writing(coder, buffer)
    written = buffer[:size].copy()
    entropy_coder.start_coder(coder, written, odds, 0)
    reference = entropy_reference.BinaryDecoder(written.tobytes())
    for kind, value in items:
        if kind == "raw":
            got = code_raw(coder, written, value.bit_length(), np.uint64(0))
            assert got == reference.raw(value.bit_length()) == value
        else:
            got = code_number(coder, written, odds, 1, np.uint64(0))
            assert got == reference.number("pairs") == value


@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_coded_order_is_a_stable_sort(size, classes, seed):
    rng = np.random.default_rng(seed)
    values = rng.integers(-1000, 1000, size).astype(np.int32)
    kinds = rng.integers(0, classes, size).astype(np.uint8)
    counts = np.zeros(64, np.int64)
    cursors = np.empty((4, 64), np.int64)
    assert entropy_order.class_counts(kinds, counts, cursors) == 0
    starts = cursors.copy()
    assert (counts == np.bincount(kinds, minlength=64)).all()
    coded = np.empty_like(values)
    entropy_order.to_coded_order(values, kinds, cursors, coded)
    assert (coded == values[np.argsort(kinds, kind="stable")]).all()
    back = np.empty_like(values)
    entropy_order.to_natural_order(coded, kinds, starts, back)
    assert (back == values).all()


@pytest.mark.parametrize("position", [0, 3, 4, 6])
def test_a_class_out_of_range_is_told(position):
    kinds = np.zeros(7, np.uint8)
    kinds[position] = 64
    assert entropy_order.class_counts(kinds, np.zeros(64, np.int64), np.empty((4, 64), np.int64)) == 1


def test_contexts_of_the_directory_do_not_overlap():
    others = {"_CONFIDENCE", "_SLOWEST", "_LEAST", "_SHARES"}
    names = {name for name in vars(entropy_directory) if name.startswith("_") and name[1:].isupper()}
    starts = sorted(getattr(entropy_directory, name) for name in names - others)
    assert all(a < b for a, b in itertools.pairwise(starts))
    assert starts[-1] < entropy_directory.CONTEXTS
