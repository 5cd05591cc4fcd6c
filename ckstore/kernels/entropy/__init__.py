"""The kernels of the entropy coder."""

from __future__ import annotations

import numpy as np

from ckstore.kernels.native import Array, check, function

_read_directory = function("read_directory", "piiiip")
_write_directory = function("write_directory", "piiip")
_group_classes = function("group_classes", "ppp")
_to_coded_order = function("to_coded_order", "pppp")
_to_natural_order = function("to_natural_order", "pppip")
_plan_payload = function("plan_payload", "piipp")
_write_payload = function("write_payload", "piippp")
_narrow = function("narrow", "pp")
_estimate_bits = function("estimate_bits", "ppipp")
_read_streams = function("read_streams", "pipip")
_widen = function("widen", "pp")
_accumulate = function("accumulate", "ppi")

# The directory of a payload: its groups, their bins and code lengths, as plain bits: `directory.c`.

SYMBOLS = 4096
"""The maximal number of symbols of a group."""

CLASSES = 64
"""The number of classes, and so the maximal number of groups."""

GROUP = np.dtype(
    [
        # Contents of the directory: class, first element, number of elements.
        ("label", np.int64), ("start", np.int64), ("count", np.int64),
        # Its kind, below; the value of all elements; bytes of each element that lie in a plane (0, 1, 2 or 4).
        ("kind", np.int64), ("constant", np.int64), ("plane", np.int64),
        # The number of pairs; bits of the numbers without their sign, and of the zero runs.
        ("pairs", np.int64), ("top", np.int64), ("run_top", np.int64),
        # The number of bins of both, 1 for the runs of a dense group; the only symbol that occurs, or -1.
        ("bins", np.int64), ("run_bins", np.int64), ("single", np.int64),
        # The encoder's plan: bits in the streams, maximal bits of an item, first pair; whether symbols are numbers, and
        # whether pairs are extracted. Before planning, `pairs` holds the non-zeros and `top` the bits of whole
        # elements.
        ("bits", np.int64), ("widest", np.int64), ("first_pair", np.int64), ("exact", np.int64), ("paired", np.int64),
        # Elements of each quarter of a sparse group of at least 4096 pairs.
        ("spans", np.int64, 4),
    ]
)  # fmt: skip
"""A group."""

DENSE, SPARSE, EQUAL = range(3)
"""Kinds of groups: a symbol for each element; one for each zero run and the value behind it; one value throughout."""

TABLE = SYMBOLS + 1
"""The maximal number of bins of values and runs together."""


def read_directory(payload: Array, begin: int, end: int, grouped: bool, count: int, directory: int) -> int:
    """Read the directory from bytes `begin` to `end` of a payload (uint8) of `count` elements.

    `grouped` is whether elements have classes; if not, there is one group. `directory` is the address of the result.
    Returns the number of groups, -1 for an impossible directory.
    """
    return check(_read_directory(id(payload), begin, end, grouped, count, directory))


def write_directory(buffer: Array, grouped: bool, count: int, number: int, directory: int) -> int:
    """Write the directory of `number` groups into a buffer (uint8); return its bytes, -1 if there is no room."""
    return check(_write_directory(id(buffer), grouped, count, number, directory))


# Context order: elements stably sorted by class, so that similar elements become neighbours, and back: `order.c`.

QUARTERS = 4
"""Stretches that are sorted in parallel."""


def group_classes(classes: Array, cursors: Array, directory: int) -> int:
    """Begin the table of groups, one per class that occurs, and find the place of each quarter's first element.

    Parameters
    ----------
    classes : (n,) uint8
    cursors : (QUARTERS, 256) int64
        Filled with the place in coded order of each quarter's first element of a class.
    directory : int
        Address of the directory; `label`, `start` and `count` of its groups are filled in.

    Returns
    -------
    int
        The number of groups, or -1 if a class is out of range.
    """
    return check(_group_classes(id(classes), id(cursors), directory))


def to_coded_order(values: Array, classes: Array, cursors: Array, coded: Array) -> None:
    """Write `values` into `coded` (same dtype), stably sorted by class; move the cursors of `group_classes`."""
    check(_to_coded_order(id(values), id(classes), id(cursors), id(coded)))


def to_natural_order(coded: Array, classes: Array, directory: int, number: int, values: Array) -> int:
    """Undo `to_coded_order`.

    Parameters
    ----------
    coded : (n,)
        The elements in coded order.
    classes : (n,) uint8
    directory, number
        Address of the directory, and the number of its groups.
    values : (n,), of the dtype of `coded`
        Filled in.

    Returns
    -------
    int
        0, or 1 if the number of elements of a class differs from the groups.
    """
    return check(_to_natural_order(id(coded), id(classes), directory, number, id(values)))


# Elements in coded order as a payload: `encode.c`, with `survey.c`, `plan.c` and `write.c` for its steps.
# `directory` and `encoder` are addresses of a directory and of an encoder's arrays, as in `encoder.h`.

CELLS = 1 << 16
"""The maximal number of cells of a histogram."""

PLANE_BYTES, STREAM_BYTES = 4, 16
"""Bytes of an element's planes, and of its part of the streams, at most."""

STREAM_SPARE, DIRECTORY_BYTES = 1 << 16, 7 << 20
"""Bytes of the streams in addition, and of the directory, at most."""

FACTS = 7
"""The number of facts about a payload; the first is the bytes of the narrowest type of all elements, the second is 0 if
all are 0."""


def plan_payload(coded: Array, grouped: bool, number: int, directory: int, encoder: int) -> int:
    """Plan the payload of signed elements in the first `number` groups; return its bytes.

    Write its parts into the encoder's arrays, and its facts behind them.
    """
    return check(_plan_payload(id(coded), grouped, number, directory, encoder))


def write_payload(
    coded: Array, grouped: bool, classes_check: int, directory: int, encoder: int, payload: Array
) -> None:
    """Write the planned payload of these elements into `payload` (uint8), with 0 in place of its checksum."""
    check(_write_payload(id(coded), grouped, classes_check, directory, encoder, id(payload)))


def narrow(wide: Array, narrowed: Array) -> None:
    """Convert signed integers to a narrower dtype, which holds them."""
    check(_narrow(id(wide), id(narrowed)))


# The size of a payload, estimated from histograms of its elements: `histogram.c`.

ROWS = 65
"""The histograms of a call: of all elements, and of each class."""


def estimate_bits(values: Array, classes: Array | None, fine: int, counts: Array, bits: Array) -> None:
    """Estimate the bits of a payload's elements and of its tables.

    Parameters
    ----------
    values : (n,) signed integers
    classes : (n,) uint8, below ROWS - 1; or None
    fine
        Every octave of each sign has 2^fine cells.
    counts : int32
        Scratch: ROWS histograms (without classes one) of 2^fine cells for each bit of an element and each sign.
    bits : float64, (2, 2)
        Filled with the bits of elements and of tables, in natural order and, if there are classes, in groups.
    """
    check(_estimate_bits(id(values), None if classes is None else id(classes), fine, id(counts), id(bits)))


# Planes, streams, and groups without streams, decoded into elements in coded order: `read.c`.

READER = function("reader_bytes", "")()
"""Bytes of the decoder's scratch."""


def read_streams(payload: Array, planes: int, directory: int, number: int, coded: Array) -> int:
    """Decode all groups of a directory.

    Parameters
    ----------
    payload : uint8
        The payload, with eight bytes behind the last stream.
    planes : int
        First byte of the planes; 0 without streams.
    directory, number
        Address of the directory, and the number of its groups.
    coded : signed integers
        Filled in coded order.

    Returns 0, or 1 if the payload is damaged.
    """
    return check(_read_streams(id(payload), planes, directory, number, id(coded)))


def widen(narrow: Array, wide: Array) -> None:
    """Convert signed integers to a wider dtype."""
    check(_widen(id(narrow), id(wide)))


def accumulate(narrow: Array, sums: Array, shift: int) -> None:
    """Add signed integers of at most 32 bits to int32 sums, which are shifted right first, rounding half up."""
    check(_accumulate(id(narrow), id(sums), shift))
