from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from ckstore.kernels.entropy import coder as entropy_coder
from ckstore.kernels.entropy import directory as entropy_directory
from ckstore.kernels.entropy import histograms as entropy_histograms
from ckstore.kernels.entropy import layout as entropy_layout
from ckstore.kernels.entropy import lengths as entropy_lengths
from ckstore.kernels.entropy import masks as entropy_masks
from ckstore.kernels.entropy import order as entropy_order
from ckstore.kernels.entropy import planes as entropy_planes
from ckstore.kernels.entropy import read_dense as entropy_read_dense
from ckstore.kernels.entropy import reference as entropy_reference
from ckstore.kernels.entropy import tables as entropy_tables
from ckstore.kernels.entropy import vectors as entropy_vectors
from ckstore.kernels.entropy.layout import FINEST, ROW, SYMBOLS
from ckstore.kernels.entropy.words import bit_length, low_bits, unzigzag, zigzag


def callable_from_python(kernel):
    """An inner kernel with the wrapper that it is compiled without."""
    return njit(error_model="numpy")(kernel.py_func)


code_lengths = callable_from_python(entropy_lengths.code_lengths)
canonical_codes = callable_from_python(entropy_lengths.canonical_codes)
choose_layout = callable_from_python(entropy_layout.choose_layout)
layout_tables = callable_from_python(entropy_layout.layout_tables)
symbol_leads = callable_from_python(entropy_layout.symbol_leads)
merge_counts = callable_from_python(entropy_layout.merge_counts)
log_geometry = callable_from_python(entropy_layout.log_geometry)
fine_size = callable_from_python(entropy_layout.fine_size)
fold = callable_from_python(entropy_layout.fold)
measure_octaves = callable_from_python(entropy_layout.measure_octaves)
pick_layout = callable_from_python(entropy_layout.pick_layout)
count_wide = callable_from_python(entropy_histograms.count_wide)
join_numbers = callable_from_python(entropy_histograms.join_numbers)
count_joined = callable_from_python(entropy_histograms.count_joined)
place_numbers = callable_from_python(entropy_read_dense.place_numbers)
store_plane = callable_from_python(entropy_planes.store_plane)
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


def geometry(exact, resolution):
    firsts, levels = np.zeros((2, ROW), np.int64)
    log_geometry(exact, resolution, firsts, levels)
    return firsts, levels


def histogram(numbers, firsts, levels):
    top = max(int(number).bit_length() for number in numbers)
    bins = np.full(fine_size(top, firsts, levels), 77, np.int64)
    count_wide(np.array(numbers, np.uint64), 0, len(numbers), top, firsts, levels, bins)
    return top, bins


def bin_of(number, exact, resolution):
    """Place of a number's bin: its octave's bins follow those of the octaves below."""
    octave = number.bit_length()
    if octave <= exact:
        return number
    lead = number >> octave - 1 - resolution & (1 << resolution) - 1
    return (1 << exact) + (octave - 1 - exact << resolution) + lead


GEOMETRIES = [(12, 7), (7, 7), (6, 5), (8, 3)]


@pytest.mark.parametrize(("exact", "resolution"), GEOMETRIES)
@given(numbers=st.lists(st.integers(0, 64).flatmap(lambda bits: st.integers(0, (1 << bits) - 1)), min_size=1))
def test_fine_histograms(exact, resolution, numbers):
    _, bins = histogram(numbers, *geometry(exact, resolution))
    expected = np.zeros_like(bins)
    for number in numbers:
        expected[bin_of(number, exact, resolution)] += 1
    assert (bins == expected).all()


@given(st.sampled_from(GEOMETRIES), st.integers(0, 11), st.integers(0, 2**32 - 1))
def test_a_folded_histogram_is_that_of_a_coarser_geometry(kind, most, seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 1 << rng.integers(1, 63, 200)).astype(np.uint64)
    firsts, levels = geometry(*kind)
    top, bins = histogram(numbers, firsts, levels)
    fold(bins, firsts, levels, top, most)
    coarser = np.minimum(levels, most)
    starts = np.cumsum(np.append(1, 1 << coarser[1 : top + 1]))
    assert (levels[1 : top + 1] == coarser[1 : top + 1]).all()
    assert (firsts[1 : top + 1] == starts[:-1]).all()
    expected = np.zeros(starts[-1], np.int64)
    for number in numbers.tolist():
        octave = number.bit_length()
        level = int(coarser[octave])
        place = starts[octave - 1] + (number - (1 << octave - 1) >> octave - 1 - level) if octave else 0
        expected[place] += 1
    assert (bins[: expected.size] == expected).all()


@pytest.mark.parametrize("scale", [0.5, 3, 100, 1e4, 1e7])
@pytest.mark.parametrize("limit", [SYMBOLS, 80])
def test_a_chosen_layout_covers_every_number_once(scale, limit):
    rng = np.random.default_rng(5)
    numbers = np.abs(rng.standard_normal(5000) * scale).astype(np.uint64)
    firsts, levels = geometry(12, 7)
    top, bins = histogram(numbers, firsts, levels)
    row = np.zeros(ROW, np.uint8)
    bits = choose_layout(bins, firsts, levels, top, 8.0, limit, row)
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
    assert merge_counts(bins, firsts, levels, row, merged) == (symbols, raw_bits)
    assert (merged[:symbols] == counts[:symbols]).all()
    used = counts[counts > 0]
    assert bits == pytest.approx(raw_bits + (used * np.log2(numbers.size / used)).sum())


@pytest.mark.parametrize("scale", [200, 1e4, 1e7, 1e15])
def test_a_layout_with_raw_bits_enough_is_the_cheapest_of_its_kind(scale):
    rng = np.random.default_rng(6)
    numbers = np.abs(rng.laplace(size=4000) * scale).astype(np.uint64)
    firsts, levels = geometry(12, 7)
    top, bins = histogram(numbers, firsts, levels)
    costs, data = np.zeros((2, ROW, FINEST + 1))
    totals = np.zeros(ROW, np.int64)
    measure_octaves(bins, firsts, levels, top, 5.0, costs, data, totals)
    row = np.zeros(ROW, np.uint8)
    before = 0.0
    for least in range(top + 1):
        cost, bits = pick_layout(costs, data, totals, levels, top, least, 5.0, SYMBOLS, row)
        leads, raws = np.zeros((2, SYMBOLS), np.int64)
        symbols = symbol_leads(row, leads, raws)
        assert raws[:symbols].min() >= least
        assert before - 1e-6 <= cost
        assert numbers.size * least <= bits <= cost
        before = cost


@given(st.integers(1, 7), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_joined_numbers_follow_each_other_in_a_stream(bits, surplus, seed):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 1 << bits, (1 << 15) + surplus).astype(np.uint16)
    work = numbers.copy()
    joined = join_numbers(work, 0, work.size, bits)
    assert joined * bits <= 14
    assert joined == 4 or 2 * joined * bits > 14 or work.size >> 2 * joined * bits < 4
    items = work.size // (4 * joined) * 4
    blocks = numbers[: items * joined].reshape(-1, joined, 4).astype(np.int64)
    expected = (blocks << bits * np.arange(joined)[:, None]).sum(axis=1).ravel()
    assert (work[:items] == expected).all()
    assert (work[items * joined :] == numbers[items * joined :]).all()
    bins = np.full(1 << entropy_histograms.TABLE_BITS, 77, np.int64)
    count_joined(work, 0, work.size, joined, bits, 1, bins)
    assert (bins[: 1 << bits] == np.bincount(numbers, minlength=1 << bits)).all()


@given(st.sampled_from(["i1", "i2", "i4", "i8", "u1"]), st.integers(0, 2**32 - 1))
def test_masks_are_comparisons(dtype, seed):
    rng = np.random.default_rng(seed)
    elements = (rng.integers(-3, 4, 80) * rng.choice([1, 1 << 8 * (np.dtype(dtype).itemsize - 1)], 80)).astype(dtype)
    offset = np.uint64(rng.integers(0, 17))
    value = rng.choice(elements)
    part = elements[int(offset) : int(offset) + 64]
    weights = np.uint64(1) << np.arange(64, dtype=np.uint64)
    unequal, equal = masks_of(elements, offset, value)
    assert unequal == weights[part != 0].sum()
    assert equal == weights[part == value].sum()


@njit
def masks_of(elements, offset, value):
    return entropy_masks.non_zeros(elements, offset), entropy_masks.equals(elements, offset, value)


@njit
def bit_facts(word):
    return entropy_masks.first_bit(word), entropy_masks.count_bits(word)


@given(st.integers(0, 2**64 - 1))
def test_bits_are_found_and_counted(word):
    lowest = (word & -word).bit_length() - 1 if word else 64
    assert bit_facts(np.uint64(word)) == (lowest, word.bit_count())


@pytest.mark.parametrize("dtype", ["i2", "i4", "i8"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_planes_hold_the_low_bytes(dtype, width):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(width)
    values = rng.integers(info.min, info.max, 1000, dtype, endpoint=True)
    values[:6] = [info.min, info.max, 0, -1, 1, info.min + 1]
    numbers = [int(zigzag_facts(np.int64(value))[0]) for value in values]
    planes = np.full(3 + values.size * width, 77, np.uint8)
    store_plane(values, 0, values.size, width, planes, 3)
    low = np.frombuffer(planes[3:].tobytes(), f"<u{width}")
    assert (planes[:3] == 77).all()
    assert low.tolist() == [number & (1 << 8 * width) - 1 for number in numbers]


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


@pytest.fixture(scope="module", params=["vectors", "elements"])
def orders(request):
    """The kernels that sort by class and back, as compiled for this processor, and for one without such vectors."""
    if request.param == "vectors":
        if not entropy_vectors.has_vectors():
            pytest.skip("the processor has no such vectors")
        yield entropy_order.to_coded_order, entropy_order.to_natural_order
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy_vectors, "has_vectors", lambda: False)
        yield tuple(
            callable_from_python(kernel) for kernel in (entropy_order.to_coded_order, entropy_order.to_natural_order)
        )


def natural_order(kernel, coded, kinds, counts, back):
    """Elements from coded into natural order, for a table of groups of so many elements of each class."""
    present = np.flatnonzero(counts)
    groups = np.zeros((64, entropy_directory.COLUMNS), np.int64)
    groups[: present.size, entropy_directory.CLASS] = present
    groups[: present.size, entropy_directory.COUNT] = counts[present]
    groups[: present.size, entropy_directory.START] = np.cumsum(counts[present]) - counts[present]
    margin = kinds.size // 2 + 1
    padded = np.full(coded.size + 2 * margin, 77, coded.dtype)
    padded[margin : margin + coded.size] = coded
    return kernel(padded, margin, kinds, groups, present.size, back)


@given(
    st.sampled_from([0, 1, 30, 64, 300, 16_383, 16_384, 33_001]),
    st.integers(1, 64),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from(["int8", "int16", "int32", "int64"]),
    st.integers(0, 2**32 - 1),
)
def test_coded_order_is_a_stable_sort(orders, size, classes, common, dtype, seed):
    to_coded_order, to_natural_order = orders
    rng = np.random.default_rng(seed)
    values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, size, endpoint=True).astype(dtype)
    kinds = rng.integers(0, classes, size).astype(np.uint8)
    # So many elements are of few classes, and these come in turns or in runs.
    few = rng.integers(0, classes, rng.integers(1, 5))
    chosen = rng.random(size) < common
    kinds[chosen] = few[(np.arange(size) // rng.choice([1, 50, 500]))[chosen] % few.size]
    counts = np.zeros(64, np.int64)
    cursors = np.empty((4, 64), np.int64)
    assert entropy_order.class_counts(kinds, counts, cursors) == 0
    assert (counts == np.bincount(kinds, minlength=64)).all()
    around = np.full(size + 200, 77, dtype)
    coded = around[100 : 100 + size]
    to_coded_order(values, kinds, cursors, coded)
    assert (coded == values[np.argsort(kinds, kind="stable")]).all()
    assert (around[:100] == 77).all()
    assert (around[100 + size :] == 77).all()
    back = around[50 : 50 + size].copy()
    assert natural_order(to_natural_order, coded, kinds, counts, back) == 0
    assert (back == values).all()


@given(st.integers(1, 1000), st.integers(0, 2**32 - 1), st.booleans())
def test_classes_that_do_not_fit_the_groups_are_told(orders, size, seed, few):
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 3 if few else rng.integers(1, 256), size, endpoint=True).astype(np.uint8)
    counts = np.bincount(kinds % 64, minlength=64)
    # Move some elements into another class, all of them at worst.
    moved = rng.integers(1, counts.max(), endpoint=True)
    counts[counts.argmax()] -= moved
    counts[rng.choice(np.flatnonzero(np.arange(64) != counts.argmax()))] += moved
    fits = kinds.max() < 64 and (counts == np.bincount(kinds, minlength=64)).all()
    coded = np.arange(size, dtype=np.int32)
    assert natural_order(orders[1], coded, kinds, counts, np.empty_like(coded)) == int(not fits)


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


fill_table = callable_from_python(entropy_tables.fill_table)
fill_strings = callable_from_python(entropy_tables.fill_strings)


@st.composite
def symbol_tables(draw):
    """A complete code whose symbols stand for whatever numbers and runs."""
    counts = np.array(draw(st.lists(st.integers(0, 500), min_size=1, max_size=40)), np.int64)
    counts[draw(st.integers(0, counts.size - 1))] += 1
    lengths = np.zeros(counts.size, np.uint8)
    single, _ = code_lengths(counts, counts.size, lengths)
    codes = np.zeros(counts.size, np.uint32)
    if single < 0:
        assert canonical_codes(lengths, counts.size, codes) == 0
    occurs = (lengths > 0) | (np.arange(counts.size) == single)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    symbols = np.zeros((counts.size, entropy_tables.COLUMNS), np.int64)
    symbols[:, entropy_tables.CODE] = codes & 65535
    symbols[:, entropy_tables.LENGTH] = np.where(occurs, lengths.astype(np.int64), -1)
    for number, raw in ((entropy_tables.NUMBER, entropy_tables.RAW), (entropy_tables.RUN, entropy_tables.RUN_RAW)):
        symbols[:, raw] = rng.integers(0, draw(st.integers(1, 20)), counts.size)
        symbols[:, number] = rng.integers(0, 1 << draw(st.integers(0, 30)), counts.size) << symbols[:, raw]
    return symbols


def symbol_at(symbols, bits, known):
    """The symbol whose code is the lowest of `known` bits, or None where these are too few to tell."""
    for symbol in np.flatnonzero(symbols[:, entropy_tables.LENGTH] >= 0).tolist():
        code, length = symbols[symbol, :2].tolist()
        if length <= known and bits & ((1 << length) - 1) == code:
            return symbol
    return None


SLOTS = st.lists(st.integers(0, (1 << 13) - 1), min_size=1, max_size=30)


@given(symbol_tables(), SLOTS)
def test_tables_of_codes(symbols, slots):
    symbols[:, entropy_tables.RUN :] = 0
    longest = int(symbols[:, entropy_tables.LENGTH].max())
    by_symbol, by_code = np.full((2, 1 << longest), 77, np.uint64)
    fill_table(by_symbol, longest, entropy_tables.SYMBOL, symbols)
    fill_table(by_code, longest, entropy_tables.BY_CODE, symbols)
    for slot in slots:
        slot &= (1 << longest) - 1
        symbol = symbol_at(symbols, slot, longest)
        _, length, number, raw, _, _ = symbols[symbol].tolist()
        assert by_symbol[slot] == length | symbol << 8
        assert by_code[slot] == length + raw | length << 8 | (number & 0xFFFFFFFF) << 32


@given(symbol_tables(), st.integers(1, 13), SLOTS)
def test_tables_of_whole_numbers(symbols, bits, slots):
    symbols[:, entropy_tables.RUN :] = 0
    table = np.full(1 << bits, 77, np.uint32)
    fill_table(table, bits, entropy_tables.ONE, symbols)
    for slot in slots:
        slot &= (1 << bits) - 1
        expected = entropy_tables.OVERLONG
        symbol = symbol_at(symbols, slot, bits)
        if symbol is not None:
            _, length, number, raw, _, _ = symbols[symbol].tolist()
            if length + raw <= bits and number + (1 << raw) <= 1 << 24:
                expected = length + raw | number + (slot >> length & ((1 << raw) - 1)) << 8
        assert table[slot] == expected


@given(symbol_tables(), st.integers(1, 13), SLOTS)
def test_tables_of_pairs(symbols, bits, slots):
    table = np.full(1 << bits, 77, np.uint32)
    fill_table(table, bits, entropy_tables.PAIR, symbols)
    for slot in slots:
        slot &= (1 << bits) - 1
        expected = entropy_tables.UNRESOLVED
        symbol = symbol_at(symbols, slot, bits)
        if symbol is not None:
            _, length, number, raw, run, run_raw = symbols[symbol].tolist()
            total = length + run_raw + raw
            if total <= bits and run + (1 << run_raw) < 1 << 16 and number + (1 << raw) <= 255:
                run += slot >> length & ((1 << run_raw) - 1)
                value = entropy_reference.unzigzag(number + (slot >> length + run_raw & ((1 << raw) - 1)) + 1)
                expected = total | (value & 255) << 8 | run + 1 << 16
        assert table[slot] == expected


@given(symbol_tables(), st.integers(1, 13), SLOTS)
def test_tables_of_strings_hold_as_many_numbers_as_fit(symbols, bits, slots):
    symbols[:, entropy_tables.RUN :] = 0
    symbols[:, entropy_tables.RAW] %= 9
    symbols[:, entropy_tables.NUMBER] %= 400
    symbols[:, entropy_tables.NUMBER] &= -1 << symbols[:, entropy_tables.RAW]
    _, lengths, numbers, raws, _, _ = symbols.T
    small = (lengths >= 0) & (numbers + (1 << raws) <= 256)
    # As in a layout, where no number belongs to two symbols; a lone one without raw bits takes none.
    if (1 << raws[small]).sum() > 256 or (lengths + raws == 0)[lengths >= 0].any():
        return
    for most, shift, look, dtype in ((2, 30, bits, np.uint32), (4, 61, min(bits, 12), np.uint64)):
        table = np.full(1 << look, 77, dtype)
        fill_strings(table, look, symbols, np.empty(entropy_tables.STRINGS, np.uint64))
        for slot in slots:
            slot &= (1 << look) - 1
            used, packed, count = 0, 0, 0
            while count < most:
                symbol = symbol_at(symbols, slot >> used, look - used)
                if symbol is None or not small[symbol] or lengths[symbol] + raws[symbol] > look - used:
                    break
                raw = slot >> used + int(lengths[symbol]) & ((1 << int(raws[symbol])) - 1)
                packed |= int(numbers[symbol]) + raw << 8 * count
                used += int(lengths[symbol] + raws[symbol])
                count += 1
            entry = int(table[slot])
            expected = (used, packed, count) if count else (entropy_tables.UNRESOLVED, 0, 0)
            assert (entry & 127, entry >> 8 & ((1 << 8 * most) - 1), entry >> shift & 7) == expected
