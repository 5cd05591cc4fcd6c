"""Decode planes, streams, and groups without streams into elements in coded order: `read.c`."""

from __future__ import annotations

from ckstore.kernels.native import Array, check, function

_read_streams = function("read_streams", "pipip")
_widen = function("widen", "pp")
_accumulate = function("accumulate", "ppi")

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
