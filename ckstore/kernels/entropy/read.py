"""Reading the four streams, and the groups that have none, into elements in coded order.

Every load is checked against the end of the payload before it is made (many loads at once), every write against
the end of its group; code and raw bits of a damaged payload are nonsense but harmless, and the streams' ends and the
checksums tell.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.bytes import store_element
from ckstore.kernels.entropy.directory import (
    ADAPTIVE,
    CONSTANT,
    COUNT,
    DENSE,
    EQUAL,
    FIRST_PAIR,
    KIND,
    PAIRS,
    PLANE,
    RUN_SYMBOLS,
    SINGLE,
    START,
    SYMBOL_COUNT,
)
from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.read_dense import PLACED, read_dense
from ckstore.kernels.entropy.read_pairs import place_pairs, read_sparse
from ckstore.kernels.entropy.read_strings import LARGE, STRIDE
from ckstore.kernels.entropy.tables import COLUMNS, STRINGS, fill_symbols
from ckstore.kernels.entropy.words import Array, int64, uint64, unzigzag

_SIZES = (1 << LONGEST, 1 << LONGEST, max(STRINGS, LARGE), STRIDE // 2, PLACED // 2)
_ENDS = np.cumsum(np.array(_SIZES))
WORK = sum(_SIZES)
"""Size of the scratch array (uint64)."""
_LONGEST_RUN = 44
"""Most bits of a zero run: the sum of four does not overflow."""


@kernel
def read_streams(
    buffer: Array,
    plane: int,
    positions: Array,
    ends: Array,
    groups: Array,
    number: int,
    rows: Array,
    lengths: Array,
    runs: Array,
    values: Array,
    work: Array,
    coded: Array,
    size: int,
) -> int:
    """Decode all groups of a directory into `coded`.

    Parameters
    ----------
    buffer : uint8
        The payload, with eight readable bytes behind the last stream.
    plane : int
        First byte of the planes, which end where stream 0 begins.
    positions, ends : int64, (4,)
        The first bit and the last byte (exclusive) of each stream; `positions` is moved.
    groups, number, rows, lengths, runs, values
        As `code_directory` read them.
    work : uint64, (WORK,)
        Scratch.
    coded : uint8
        Filled with signed integers, of the least width that holds all of them. Given as bytes, so that all this is
        compiled once.
    size
        Bytes of each of them.

    Returns 0, or 1 where streams and directory disagree.
    """
    limit = (buffer.size - 8) << 3
    plane_bytes = int64(0)
    for index in range(number):
        if groups[index, PLANE] > size:
            return 1
        plane_bytes += groups[index, COUNT] * groups[index, PLANE]
    if plane_bytes != (positions[0] >> 3) - plane:
        return 1
    codes = work[: _ENDS[0]]
    table = work[_ENDS[0] : _ENDS[1]]
    strings = work[_ENDS[1] : _ENDS[2]]
    scratch = work[_ENDS[2] : _ENDS[3]].view(np.uint8)
    numbers = work[_ENDS[3] :].view(np.uint32)
    narrow = table.view(np.uint32)
    for index in range(number):
        group = groups[index]
        start = group[START]
        count = group[COUNT]
        kind = group[KIND]
        if kind != DENSE:
            coded[size * start : size * (start + count)] = 0
        if kind == EQUAL:
            constant = uint64(unzigzag(uint64(group[CONSTANT])))
            if constant:
                for i in range(uint64(start), uint64(start + count)):
                    store_element(coded, size, i, constant)
            continue
        if kind == ADAPTIVE:
            place_pairs(runs, values, group[FIRST_PAIR], group[PAIRS], coded, size, start)
            continue
        if limit < 0:
            return 1
        symbols = np.empty((group[SYMBOL_COUNT], COLUMNS), np.int64)
        longest = fill_symbols(rows[index], group[RUN_SYMBOLS], lengths[index], group[SINGLE], symbols)
        if longest < 0:
            return 1
        if kind == DENSE:
            width = group[PLANE]
            bad = read_dense(
                buffer,
                positions,
                limit,
                rows[index, 0, 1],
                symbols,
                longest,
                codes,
                table,
                strings,
                scratch,
                numbers,
                plane,
                width,
                coded,
                size,
                start,
                count,
            )
            plane += width * count
        elif rows[index, 1, 1] > _LONGEST_RUN:
            bad = 1
        else:
            pairs = group[PAIRS]
            bad = read_sparse(
                buffer, positions, limit, symbols, longest, codes, narrow, coded, size, start, count, pairs
            )
        if bad:
            return 1
    for stream in range(4):
        if (positions[stream] + 7) >> 3 != ends[stream]:
            return 1
    return 0


ALL_BITS = 31
"""A shift that leaves nothing of sums."""


@kernel
def accumulate(narrow: Array, wide: Array, shift: int) -> None:
    """Add integers to those of a wider or the same dtype, which are shifted right first, rounding half up.

    By `ALL_BITS` nothing is left of what stood in `wide`: it may be uninitialised.
    """
    if shift >= ALL_BITS:
        for i in range(uint64(narrow.size)):
            wide[i] = narrow[i]
    else:
        right = np.int32(shift)
        half = np.int32((1 << right) >> 1)
        for i in range(uint64(narrow.size)):
            wide[i] = (np.int32(wide[i] + half) >> right) + narrow[i]
