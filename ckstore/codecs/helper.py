"""A process that helps another one to compile: two take half the time.

Both write compiled code into the shared cache. The helper begins with the kernels that the other process needs last,
continues with those of later programs, and ends with the other process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from select import select

import numpy as np

from ckstore.codecs.integer_plan import Plan, sort_elements, workspace
from ckstore.codecs.integers import decode_integers, write_directory, write_streams
from ckstore.codecs.lattice import LinearLattice, ordinal_classes, ordinal_correct, ordinal_difference
from ckstore.codecs.rounded import RoundedLattice
from ckstore.runtime.blocks import fixed
from ckstore.runtime.compiling import READS

#: Seven integers, encoded by `encode_integers`.
_PLAIN = bytes.fromhex("0122608a92bd010704010101ff357fe8202932030000000000000000")

_INTEGERS = fixed(np.arange(7, dtype=np.int32))
_BITS = fixed(np.zeros(7, np.uint32))
_CLASSES = fixed(np.array([0, 1, 0, 1, 0, 1, 0], np.uint8))


def _steps(helped: str) -> list[Callable[[], object]]:
    """Return the steps of exact versions of float32 weights with Adam's moments, the last steps of a verb first."""
    decoding: list[Callable[[], object]] = [
        partial(_reorder, 2),
        partial(_reorder, 4),
        lambda: ordinal_correct(_BITS, _INTEGERS, "float32"),
        lambda: ordinal_classes(_BITS, "float32"),
    ]
    if helped == READS:
        lattice, rounded = LinearLattice("float32", -5, 7), RoundedLattice("float32", 24, 0, 7)
        return [
            lambda: lattice.values(_INTEGERS, 0),
            lambda: rounded.values(_INTEGERS, 0),
            lambda: lattice.project(LinearLattice("float32", -4, 7), _INTEGERS, 0),
            *decoding,
        ]
    return [
        _write,
        lambda: write_directory(_nothing(), 32, grouped=False),
        _sort,
        lambda: ordinal_difference(_BITS, _BITS, "float32"),
        lambda: decode_integers(_PLAIN, _INTEGERS.copy()),
        *decoding,
    ]


def _reorder(width: int) -> None:
    """Restore the order of integers of `width` bytes, and widen them."""
    room = workspace()
    narrow, wide = np.zeros(1, f"i{width}"), np.zeros(1, np.int32)
    room.order.to_natural_order(narrow, _CLASSES[:0], room.groups, 0, narrow)
    if narrow.dtype != wide.dtype:
        room.read.accumulate(narrow, wide, 0)


def _write() -> None:
    plan = _nothing()
    plan.room.plan.measure(plan.room.groups, 0)
    write_streams(plan, 32)


def _sort() -> None:
    room = _nothing().room
    coded, _ = sort_elements(_INTEGERS, _CLASSES, room)
    room.survey.take_numbers(coded, room.groups, 0, room.symbols, room.numbers, np.empty(0, np.uint8))


def _nothing() -> Plan:
    room = workspace()
    room.reserve(7)
    return Plan(_INTEGERS[:0], 4, 0, _CLASSES[:0], room)


def main() -> None:
    """Take the steps; stop once no process waits."""
    for step in _steps(sys.argv[1]):
        if _is_alone():
            break
        step()


def _is_alone() -> bool:
    """Return whether the other process is done or has ended: it writes nothing, so it closed the pipe."""
    return bool(select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
    os._exit(0)  # The other process waits, and there is nothing to clean up.
