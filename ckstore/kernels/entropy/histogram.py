"""The size of a payload, estimated from histograms of its elements: one of all, and one of each class."""

from __future__ import annotations

from ckstore.kernels.compiled import kernel
from ckstore.kernels.entropy.bins import times_log
from ckstore.kernels.entropy.words import Array, bit_length, clear, int64, spliced, uint64

ROWS = 65
"""The histograms of a call: of all elements, and of each class."""

_TABLE_BITS, _BIN_BITS = 64.0, 3.5
"""Measured bits of a group in the directory, and of each cell; about half of them become bins."""
_LOST = 0.72
"""Bits by which a bin makes a sample's entropy too small: half a nat."""


@spliced
def _add_row(row: Array, fine: int, bits: Array) -> None:
    """Add the bits of one group's elements, and those of its table, to `bits`."""
    octaves = row.size >> (fine + 1)
    total = used = int64(0)
    growing = 0.0
    for octave in range(octaves):
        raw = max(octave - 1 - fine, 0)
        for sign in range(2):
            first = uint64((sign * octaves + octave) << fine)
            for cell in range(first, first + (uint64(1) << uint64(fine))):
                count = int64(row[cell])
                if count:
                    used += 1
                    total += count
                    growing += count * raw - times_log(count)
    if total:
        bits[0] += growing + times_log(total) + _LOST * (used - 1)
        bits[1] += _TABLE_BITS + _BIN_BITS * used


@kernel
def estimate_bits(values: Array, classes: Array, fine: int, counts: Array, bits: Array) -> None:
    """Estimate the bits of a payload's elements and of its tables.

    Parameters
    ----------
    values : (n,) signed integers
    classes : (n,) uint8, below ROWS - 1; or empty
    fine
        Every octave of each sign has 2^fine cells.
    counts : int32
        Scratch: ROWS histograms (without classes one) of 2^fine cells for each bit of an element and each sign.
    bits : float64, (2, 2)
        Filled with the bits of elements and of tables, in natural order and, if there are classes, in groups.
    """
    narrow = values.dtype.type
    first = values[0] if values.size else narrow(0)
    union = different = narrow(0)
    for i in range(uint64(values.size)):
        union = narrow(union | (values[i] ^ (values[i] >> 63)))
        different = narrow(different | (values[i] ^ first))
    for order in range(2):
        bits[order, 0], bits[order, 1] = 0.0, 0.0 if different else _TABLE_BITS
    if different == 0:
        return
    octaves = bit_length(uint64(union)) + 1
    cells = (2 * octaves) << fine
    groups = int64(0)
    for i in range(uint64(classes.size)):
        groups = max(groups, int64(classes[i]) + 1)
    groups = min(groups, int64(ROWS - 1))
    clear(counts, (groups + 1) * cells)
    mask = (uint64(1) << uint64(fine)) - uint64(1)
    for i in range(uint64(values.size)):
        value = int64(values[i])
        sign = value >> 63
        magnitude = uint64(value ^ sign)
        octave = int64(bit_length(magnitude))
        shift = max(octave - 1 - fine, 0)
        place = ((octave - sign * octaves) << fine) + int64((magnitude >> uint64(shift)) & mask)
        if groups:
            place += cells * (min(int64(classes[i]), groups - 1) + 1)
        counts[uint64(place)] += 1
    for group in range(1, groups + 1):
        for cell in range(uint64(cells)):
            counts[cell] += counts[uint64(group * cells) + cell]
    for group in range(groups + 1):
        _add_row(counts[group * cells : (group + 1) * cells], fine, bits[min(group, 1)])
