"""The directory of a payload: its groups, their layouts and code lengths, and the whole content of small groups.

A table of forty code lengths must not cost more than a few bytes when the whole chunk takes six hundred, so everything
but the four streams goes through one adaptive binary coder. As there, the same functions write and read.
"""

from __future__ import annotations

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.coder import (
    LEAST,
    LOW,
    MODE,
    OFFSET,
    POSITION,
    REACH,
    State,
    code_bit,
    code_raw,
    code_tree,
    step,
    step_raw,
)
from ckstore.kernels.entropy.layout import SYMBOLS, WIDEST_FLOOR
from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.words import Array, Word, bit_length, inlined, inner, int64, spliced, uint64

CLASS, START, COUNT, KIND, PAIRS, FIRST_PAIR, SYMBOL_COUNT, RUN_SYMBOLS, SINGLE, CONSTANT, PLANE = range(11)
"""Columns of the table of groups (int64). PLANE: bytes of each element that lie in a plane (0, 1, 2 or 4)."""
OCTAVES, PAIRED, FORM, JOINED, RUN_BITS, BITS, WIDEST = range(11, 18)
"""Columns of the encoder's plan.

Bits of the largest number; whether pairs are extracted; the items' form; how many direct numbers are joined in one;
bits of a run in a joint number; bits of the group in the streams; most bits of an item.
"""
COLUMNS = 18

DIRECT, WIDE, JOINT, LOOSE = range(4)
"""Forms of a group, for the encoder's kernels.

Zigzag numbers of at most 16 bits, and of up to 64; pairs joined into one number of at most 16 bits, value above run;
other pairs.
"""

DENSE, SPARSE, EQUAL, ADAPTIVE = range(4)
"""Kinds of groups: tokens; joint tokens of zero run and value; one value throughout; pairs within the directory."""

MOST_ADAPTIVE = 4096
"""Most pairs that an adaptive group may have: bounds the time that a crafted directory can take."""

# Contexts. Not plain integers: numba would compile what takes them once more for every literal.
_KIND = int64(0)
_PRESENT = _KIND + 4
_NUMBER = _PRESENT + 2
_LAYOUT = _NUMBER + 3 * 64
_FLOOR = _LAYOUT + 2 * 16
_TOP = _FLOOR + 2 * 64
_SINGLE = _TOP + 2 * 64
_ZERO = _SINGLE + 2
_SAME = _ZERO + 8
_SIGN = _SAME + 6
_MORE = _SIGN + 6
_RUN = _MORE + 2 * 16
_RUN_LEAD = _RUN + 66
_VALUE = _RUN_LEAD + 66 * 4
_VALUE_LEAD = _VALUE + 66
_VALUE_SIGN = _VALUE_LEAD + 66 * 4
_PLANE = _VALUE_SIGN + 2
CONTEXTS = int(_PLANE) + 4

_0, _1, _2 = int64(0), int64(1), int64(2)

_CONFIDENCE = 64
MOSTLY = uint64(5 << 29)
"""Chance, of 2^32, from which something is mostly so: beyond it the next larger bit length is nearer to one half."""


@inner
def code_number(coder: Array, buffer: Array, odds: Array, which: int, value: Word) -> Word:
    """Code an unsigned word: bit length in a tree of contexts, then raw bits."""
    octave = code_tree(coder, buffer, odds, _NUMBER + 64 * which, int64(7), bit_length(value))
    if octave > 64:
        return uint64(0)
    if octave < 2:
        return uint64(octave)
    top = uint64(1) << uint64(octave - 1)
    return top | code_raw(coder, buffer, octave - 1, value)


@inner
def _code_layout(coder: Array, buffer: Array, odds: Array, which: int, row: Array) -> int:
    """Code a layout row. Returns its alphabet, or -1 where it is impossible."""
    row[0] = code_tree(coder, buffer, odds, _FLOOR + 64 * which, int64(7), int64(row[0]))
    row[1] = code_tree(coder, buffer, odds, _TOP + 64 * which, int64(7), int64(row[1]))
    if row[1] > 64 or row[0] > min(row[1], WIDEST_FLOOR):
        return -1
    symbols = 1
    before = int64(-1)
    exact = 1
    for octave in range(int64(row[0]) + 1, int64(row[1]) + 1):
        difference = int64(row[1 + octave]) - before - exact
        coded = 2 * difference if difference >= 0 else -2 * difference - 1
        rank = 0
        while rank < 28 and code_bit(coder, buffer, odds, _LAYOUT + 16 * exact + min(rank, 15), int64(coded > rank)):
            rank += 1
        difference = rank >> 1 if rank & 1 == 0 else -((rank + 1) >> 1)
        before = before + exact + difference
        if before < 0 or before > octave - 1 or before > 11:
            return -1
        row[1 + octave] = before
        exact = int64(before == octave - 1)
        symbols += 1 << before
    if symbols > SYMBOLS:
        return -1
    return symbols


@spliced
def _code_lengths(coder: Array, buffer: Array, odds: Array, lengths: Array, symbols: int, stride: int) -> int:
    """Code the lengths of an alphabet; with `stride`, of a product alphabet in rows of that. Returns 0 or 1."""
    joint = int64(stride > 0)
    last = int64(6)
    turn = 0
    for symbol in range(symbols):
        left = int64(0)
        above = int64(0)
        corner = int64(0)
        if not joint or symbol % stride:
            left = int64(lengths[symbol - 1]) if symbol else 0
        if joint and symbol >= stride:
            above = int64(lengths[symbol - stride])
            if symbol % stride:
                corner = int64(lengths[symbol - stride - 1])
        near = 2 * int64(left > 0) + int64(above > 0)
        if not code_bit(coder, buffer, odds, _ZERO + 4 * joint + near, int64(lengths[symbol] > 0)):
            lengths[symbol] = 0
            continue
        guess = last
        if left and above and corner:
            guess = left + above - corner
        elif left:
            guess = left
        elif above:
            guess = above + 1
        guess = min(max(guess, 1), LONGEST)
        difference = int64(lengths[symbol]) - guess
        if code_bit(coder, buffer, odds, _SAME + 3 * joint + turn, int64(difference != 0)):
            negative = code_bit(coder, buffer, odds, _SIGN + 3 * joint + turn, int64(difference < 0))
            size = abs(difference)
            steps = 1
            while steps < 12 and code_bit(coder, buffer, odds, _MORE + 16 * joint + steps, int64(size > steps)):
                steps += 1
            difference = -steps if negative else steps
            turn = 1 + negative
        else:
            difference = 0
            turn = 0
        length = guess + difference
        if length < 1 or length > LONGEST:
            return 1
        lengths[symbol] = length
        last = length
    return 0


@inner
def _set_odds(odds: Array, context: int, chance: int) -> None:
    odds[context, 0] = min(max(chance, LEAST), 65536 - LEAST)
    odds[context, 1] = _CONFIDENCE


@spliced
def _expect_geometric(odds: Array, count: int, pairs: int, outward: bool) -> int:
    """Set the odds of the run contexts to those of independent non-zeros: P(run >= x) = (1 - pairs / count)^x.

    Returns the bit length that runs are compared with first: 0, or if `outward` the first that is not mostly exceeded.
    """
    while count >= 1 << 31:
        count >>= 1
        pairs >>= 1
    power = uint64(((count - pairs) << 32) // count)
    if power >= uint64(1 << 32):
        power = uint64((1 << 32) - 1)
    middle = int64(0)
    for octave in range(1, 65):
        # power is q^(2^(octave - 1)), the chance of more than octave - 1 bits.
        _set_odds(odds, _RUN + octave, int64(power >> uint64(16)))
        half = int64((power << uint64(16)) // (power + uint64(1 << 32)))
        if middle == octave - 1:
            below = outward and power > MOSTLY
            _set_odds(odds, _RUN + middle, half if below else int64(power >> uint64(16)))
            middle += int64(below)
        if octave + 1 <= 64:
            _set_odds(odds, _RUN_LEAD + 4 * (octave + 1) + 1, half)
        if octave + 2 <= 64:
            _set_odds(odds, _RUN_LEAD + 4 * (octave + 2) + 2, half)
            _set_odds(odds, _RUN_LEAD + 4 * (octave + 2) + 3, half)
        power = (power * power) >> uint64(32)
    return middle


@inlined
def _step_magnitude(
    state: State, mode: int, buffer: Array, odds: Array, unary: int, lead: int, middle: int, value: Word
) -> tuple[State, Word]:
    """Code an unsigned word: bit length in unary, the two bits after the leading one in a tree, the others raw.

    The bit length is compared with `middle`, and from there on with larger or with smaller ones.
    """
    octaves = bit_length(value)
    octave = middle
    state, more = step(state, mode, buffer, odds, unary + octave, int64(octaves > octave))
    if more:
        octave += 1
        while octave < 64:
            state, more = step(state, mode, buffer, odds, unary + octave, int64(octaves > octave))
            if not more:
                break
            octave += 1
    else:
        while octave > 0:
            state, more = step(state, mode, buffer, odds, unary + octave - 1, int64(octaves >= octave))
            if more:
                break
            octave -= 1
    if octave < 2:
        return state, uint64(octave)
    result = uint64(1)
    node = int64(1)
    left = octave - 1
    while left > max(octave - 3, 0):
        left -= 1
        state, bit = step(
            state, mode, buffer, odds, lead + 4 * octave + node, int64((value >> uint64(left)) & uint64(1))
        )
        result = (result << uint64(1)) | uint64(bit)
        node = 2 * node + bit
    state, rest = step_raw(state, mode, buffer, left, value)
    return state, (result << uint64(left)) | rest


@spliced
def _code_pairs(
    coder: Array, buffer: Array, odds: Array, count: int, pairs: int, runs: Array, values: Array, outward: bool
) -> int:
    """Code an adaptive group: `pairs` zero runs and values less one. Returns 0, or 1 where they run beyond `count`."""
    middle = _expect_geometric(odds, count, pairs, outward)
    state = (coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION])
    mode = coder[MODE]
    left = count - pairs
    for i in range(pairs):
        state, run = _step_magnitude(state, mode, buffer, odds, _RUN, _RUN_LEAD, middle, runs[i])
        if run > uint64(left):
            return 1
        left -= int64(run)
        runs[i] = run
        value = values[i]
        state, size = _step_magnitude(state, mode, buffer, odds, _VALUE, _VALUE_LEAD, _0, value >> uint64(1))
        state, sign = step(state, mode, buffer, odds, _VALUE_SIGN + int64(size > uint64(0)), int64(value & uint64(1)))
        values[i] = (size << uint64(1)) | uint64(sign)
    coder[LOW], coder[REACH], coder[OFFSET], coder[POSITION] = state
    return 0


@kernel
def code_directory(
    coder: Array,
    buffer: Array,
    odds: Array,
    grouped: bool,
    planed: bool,
    outward: bool,
    count: int,
    groups: Array,
    rows: Array,
    lengths: Array,
    runs: Array,
    values: Array,
) -> int:
    """Write or read the directory.

    Parameters
    ----------
    coder, buffer, odds
        State of the coder (int64, 5), its bytes, its contexts (int32, CONTEXTS x 2); started.
    grouped : bool
        Whether elements have classes; if not, there is one group of `count` elements.
    planed : bool
        Whether the directory says of dense groups how wide their planes are; if not, they have none.
    outward : bool
        Whether zero runs of adaptive groups are compared with the bit length to be expected first, not with 0.
    groups : int64, (64, COLUMNS)
        The groups in the order of their classes. Reading fills CLASS, START, COUNT, KIND, PAIRS, FIRST_PAIR (adaptive
        groups only), SYMBOL_COUNT, RUN_SYMBOLS, SINGLE, CONSTANT and PLANE.
    rows : uint8, (64, 2, ROW)
        Layouts: of values or (sparse) of values less one; of runs.
    lengths : uint8, (64, SYMBOLS)
        Code lengths.
    runs, values : uint64
        Pairs of adaptive groups.

    Returns the number of groups, or -1 where the directory is impossible.
    """
    number = 0
    start = 0
    pairs_end = 0
    before = 0
    for group_class in range(64):
        if grouped:
            here = int64(groups[number, CLASS] == group_class and groups[number, COUNT] > 0) if coder[MODE] else 0
            before = code_bit(coder, buffer, odds, _PRESENT + before, here)
            if not before:
                continue
        elif group_class:
            break
        group = groups[number]
        size = count
        if grouped:
            size = int64(code_number(coder, buffer, odds, _0, uint64(group[COUNT])))
        if size < 0 or size > count - start:
            return -1
        group[CLASS] = group_class
        group[START] = start
        group[COUNT] = size
        start += size
        kind = code_tree(coder, buffer, odds, _KIND, _2, group[KIND])
        group[KIND] = kind
        if kind == EQUAL:
            group[CONSTANT] = int64(code_number(coder, buffer, odds, _2, uint64(group[CONSTANT])))
        elif kind == ADAPTIVE:
            pairs = int64(code_number(coder, buffer, odds, _1, uint64(group[PAIRS])))
            if pairs < 0 or pairs > min(size, MOST_ADAPTIVE) or size == 0:
                return -1
            first = group[FIRST_PAIR] if coder[MODE] else pairs_end
            if first + pairs > runs.size:
                return -1
            group[PAIRS] = pairs
            group[FIRST_PAIR] = first
            pairs_end = first + pairs
            if _code_pairs(coder, buffer, odds, size, pairs, runs[first:pairs_end], values[first:pairs_end], outward):
                return -1
        else:
            if planed and kind == DENSE:
                width = code_tree(coder, buffer, odds, _PLANE, _2, bit_length(uint64(group[PLANE])))
                group[PLANE] = (1 << width) >> 1
            symbols = _code_layout(coder, buffer, odds, _0, rows[number, 0])
            stride = 0
            if symbols > 0 and kind == SPARSE:
                group[PAIRS] = int64(code_number(coder, buffer, odds, _1, uint64(group[PAIRS])))
                stride = _code_layout(coder, buffer, odds, _1, rows[number, 1])
                symbols *= stride
                if group[PAIRS] < 0 or group[PAIRS] > size:
                    return -1
            if symbols <= 0 or stride < 0 or symbols > SYMBOLS:
                return -1
            group[SYMBOL_COUNT] = symbols
            group[RUN_SYMBOLS] = stride
            single = code_bit(coder, buffer, odds, _SINGLE, int64(group[SINGLE] >= 0))
            if single:
                group[SINGLE] = int64(code_raw(coder, buffer, int64(12), uint64(group[SINGLE])))
                if group[SINGLE] >= symbols:
                    return -1
            else:
                group[SINGLE] = -1
                if _code_lengths(coder, buffer, odds, lengths[number], symbols, stride):
                    return -1
        number += 1
    if start != count:
        return -1
    return number
