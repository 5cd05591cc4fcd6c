"""Compiles kernels in a process of its own, while another one needs them: together they take half the time.

Both keep what they have compiled where the other one looks first. A command that stores begins with what estimates and
codes, so this process begins with what decodes. Once the command is done, its process takes the same steps from the
last one on, until both meet: what comes next finds everything that it takes. For a command that only reads, this
process compiles what comes after decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from ckstore.codecs.memory import fixed

#: The argument with which this process helps a command that only reads.
READS = "reads"

#: Seven integers, as `encode_integers` has written them since format 1.
_PLAIN = bytes.fromhex("010224facd7901073e97ec86b4")

_INTEGERS = fixed(np.arange(7, dtype=np.int32))
_BITS = fixed(np.zeros(7, np.uint32))
_CLASSES = fixed(np.array([0, 1, 0, 1, 0, 1, 0], np.uint8))


def steps() -> list[Callable[[], object]]:
    """What exact versions of float32 weights with Adam's moments take: what decodes, then lattices, then what codes."""
    return [_decode, _check, _reorder, _lattices, _differences, _write, _sort, _encode]


def _decode() -> None:
    from ckstore.codecs.integers import decode_integers

    decode_integers(_PLAIN, _INTEGERS.copy())


def _check() -> None:
    from ckstore.codecs.checksum import crc32c, use_kernel

    use_kernel()
    crc32c(bytes(1 << 16))


def _reorder() -> None:
    """Payloads that have classes, and whose integers are narrower than what they are decoded to."""
    from ckstore.kernels.entropy_directory import COLUMNS
    from ckstore.kernels.entropy_order import to_natural_order
    from ckstore.kernels.entropy_read import accumulate

    groups, wide = np.empty((1, COLUMNS), np.int64), np.zeros(1, np.int32)
    for dtype in (np.int8, np.int16, np.int32):
        narrow = np.zeros(1, dtype)
        to_natural_order(narrow, 0, _CLASSES[:0], groups, 0, narrow)
        accumulate(narrow, wide, 0)


def _lattices() -> None:
    from ckstore.codecs.lattice import LinearLattice, ordinal_classes, ordinal_correct, scaled

    lattice, finer = LinearLattice("float32", -4, 7), LinearLattice("float32", -5, 7)
    lattice.values(_INTEGERS, 0)
    ordinal_correct(_BITS, _INTEGERS, "float32")
    scaled(_BITS, "float32", 0.5)
    lattice.chained(_BITS, finer.project(lattice, _INTEGERS, 0), 0)
    ordinal_classes(_BITS, "float32")
    lattice.own(_INTEGERS, 0)


def _rounded() -> None:
    from ckstore.codecs.rounded import RoundedLattice

    RoundedLattice("float32", 24, 0, 7).values(_INTEGERS, 0)


def _differences() -> None:
    from ckstore.codecs.lattice import LinearLattice, ordinal_difference, statistics_of

    lattice = LinearLattice("float32", -4, 7)
    statistics_of(_BITS, "float32")
    lattice.distance(_BITS, _INTEGERS, 0)
    ordinal_difference(_BITS, _BITS, "float32")
    lattice.quantise(_BITS, 0, _INTEGERS)


def _write() -> None:
    from ckstore.codecs.integer_plan import Plan, Workspace
    from ckstore.codecs.integers import write_streams

    write_streams(Plan(_INTEGERS, 4, 0, _CLASSES, Workspace(7)), 32)


def _sort() -> None:
    from ckstore.codecs.integer_plan import Workspace, sort_elements

    sort_elements(_INTEGERS, _CLASSES, Workspace(7))


def _encode() -> None:
    from ckstore.codecs.integers import encode_integers

    encode_integers(_INTEGERS)


def main() -> None:
    """Take all steps, or those that a command which only reads comes to last."""
    for step in [_rounded, _lattices, _reorder] if sys.argv[1:] == [READS] else steps():
        step()


if __name__ == "__main__":
    main()
