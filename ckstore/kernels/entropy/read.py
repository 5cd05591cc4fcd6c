"""Decode planes, streams, and groups without streams into elements in coded order.

Every load is checked against the end of the payload before it is made (many loads at once), and every write against the
end of its group. Code and raw bits of a damaged payload decode to harmless nonsense; the streams' ends and the checksum
reveal it.
"""

from __future__ import annotations

import numpy as np

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.lengths import LONGEST
from ckstore.kernels.entropy.payload_directory import DENSE, EQUAL, LONGEST_RUN
from ckstore.kernels.entropy.read_dense import PLACED, read_dense
from ckstore.kernels.entropy.read_pairs import are_short, read_any, read_pairs
from ckstore.kernels.entropy.tables import LOOK, SYMBOL, SYMBOLS, fill_symbols, fill_table
from ckstore.kernels.entropy.words import Array, clear, int64, store_element

_CODES = 1 << LONGEST
WORK = _CODES + max(1 << LOOK, 2 * PLACED)
"""Size of the scratch array (uint64)."""
_ANY = int64(31)
"""Bits of a number without its sign from which no table holds all of it."""


@kernel
def read_streams(
    buffer: Array, plane: int, ends: Array, groups: Array, number: int, lowers: Array, raws: Array, lengths: Array,
    work: Array, coded: Array, size: int,
) -> int:  # fmt: skip
    """Decode all groups of a directory into `coded`.

    Parameters
    ----------
    buffer : uint8
        The payload, with eight readable bytes behind the last stream.
    plane : int
        First byte of the planes; stream 0 follows them.
    ends : int64, (4,)
        Bytes of streams 0 to 2, and the last byte (exclusive) of the last one, 0 without streams. Overwritten.
    groups, number, lowers, raws, lengths
        As `code_directory` read them.
    work : uint64, (WORK,)
        Scratch.
    coded : uint8
        Filled with signed integers of the smallest width that holds all of them. Passed as bytes, so that one
        compilation serves all widths.
    size
        Bytes of each integer.

    Returns 0, or 1 if streams and directory disagree.
    """
    limit = (ends[3] << 3) if ends[3] else int64(-1)
    positions = np.empty(4, np.int64)
    place = plane
    for index in range(number):
        if groups[index].plane > size:
            return 1
        place += groups[index].count * groups[index].plane
    for stream in range(4):
        if place > ends[3]:
            return 1
        positions[stream] = place << 3
        if stream < 3:
            place += ends[stream]
            ends[stream] = place
    table = work[_CODES : _CODES + (1 << LOOK)]
    for index in range(number):
        group = groups[index]
        start = group.start
        count = group.count
        kind = group.kind
        if kind != DENSE:
            clear(coded[size * start :], size * count)
        if kind == EQUAL:
            if group.constant:
                for i in range(start, start + count):
                    store_element(coded, size, i, group.constant)
            continue
        if limit < 0:
            return 1
        symbols = np.empty(group.bins * group.run_bins, SYMBOLS)
        longest = fill_symbols(group, lowers[index], raws[index], lengths[index], symbols)
        if longest < 0 or (kind != DENSE and group.run_top > LONGEST_RUN):
            return 1
        codes = work[: 1 << longest]
        items = count if kind == DENSE else group.pairs
        short = group.plane == 0 and are_short(symbols, items)
        if kind == DENSE and group.top <= _ANY and not short:
            bad = read_dense(buffer, positions, limit, group, symbols, longest, work, plane, coded, size)
        else:
            fill_table(codes, longest, SYMBOL, symbols)
            done = int64(0)
            at = start
            if kind != DENSE or short:
                done, at = read_pairs(
                    buffer, positions, limit, short, symbols, codes, table, coded, size, at, start + count, items
                )
            bad = done < 0 or read_any(
                buffer, positions, limit, codes, symbols, plane, group.plane, coded, size, done, items, at,
                start + count,
            )  # fmt: skip
        if bad:
            return 1
        plane += group.plane * count
    for stream in range(4):
        if (positions[stream] + 7) >> 3 != ends[stream]:
            return 1
    return 0


ALL_BITS = 31
"""A shift that clears the previous values."""


@kernel
def accumulate(narrow: Array, wide: Array, shift: int) -> None:
    """Add integers to those of a wider or the same dtype, which are shifted right first, rounding half up.

    A shift by `ALL_BITS` clears `wide`, which may then be uninitialised.
    """
    if shift >= ALL_BITS:
        for i in range(narrow.size):
            wide[i] = narrow[i]
    else:
        right = np.int32(shift)
        half = np.int32((1 << right) >> 1)
        for i in range(narrow.size):
            wide[i] = (np.int32(wide[i] + half) >> right) + narrow[i]
