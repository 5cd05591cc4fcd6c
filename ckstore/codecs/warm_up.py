"""Compile kernels in a helper process: two processes take half the time.

Both write compiled code into the shared cache. The helper begins with the kernels that the main process needs last,
continues with those of later programs, and ends with the main process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from select import select
from typing import TYPE_CHECKING

import numpy as np

from ckstore.runtime.blocks import fixed
from ckstore.runtime.compiling import READS

if TYPE_CHECKING:
    from ckstore.codecs.integer_plan import Plan
    from ckstore.codecs.lattice import LinearLattice

#: Seven integers, encoded by `encode_integers`.
_PLAIN = bytes.fromhex("0122608a92bd010704010101ff357fe8202932030000000000000000")

_INTEGERS = fixed(np.arange(7, dtype=np.int32))
_BITS = fixed(np.zeros(7, np.uint32))
_CLASSES = fixed(np.array([0, 1, 0, 1, 0, 1, 0], np.uint8))


def _steps(helped: str) -> list[Callable[[], object]]:
    """Return the steps of exact versions of float32 weights with Adam's moments, the last steps of a verb first."""
    decoding: list[Callable[[], object]] = [*(partial(_reorder, width) for width in (2, 4)), _correct, _classes]
    if helped == READS:
        return [_coarse, _project, *decoding]
    return [_write, _directory, _sort, _differences, _decode, *decoding]


def _decode() -> None:
    from ckstore.codecs.integers import decode_integers

    decode_integers(_PLAIN, _INTEGERS.copy())


def _reorder(width: int) -> None:
    """Code payloads of integers of `width` bytes that have classes, and decode them to wider ones."""
    from ckstore.kernels.entropy.directory import GROUP
    from ckstore.kernels.entropy.order import to_natural_order
    from ckstore.kernels.entropy.read import accumulate

    groups, narrow, wide = np.zeros(1, GROUP), np.zeros(1, f"i{width}"), np.zeros(1, np.int32)
    to_natural_order(narrow, 0, _CLASSES[:0], groups, 0, narrow)
    if narrow.dtype != wide.dtype:
        accumulate(narrow, wide, 0)


def _correct() -> None:
    from ckstore.codecs.lattice import ordinal_correct

    ordinal_correct(_BITS, _INTEGERS, "float32")


def _project() -> None:
    _lattice().project(_lattice(-4), _INTEGERS, 0)


def _classes() -> None:
    from ckstore.codecs.lattice import ordinal_classes

    ordinal_classes(_BITS, "float32")


def _lattice(step: int = -5) -> LinearLattice:
    from ckstore.codecs.lattice import LinearLattice

    return LinearLattice("float32", step, 7)


def _coarse() -> None:
    from ckstore.codecs.rounded import RoundedLattice

    _lattice().values(_INTEGERS, 0)
    RoundedLattice("float32", 24, 0, 7).values(_INTEGERS, 0)


def _differences() -> None:
    from ckstore.codecs.lattice import ordinal_difference

    ordinal_difference(_BITS, _BITS, "float32")


def _write() -> None:
    from ckstore.codecs.integers import write_streams

    plan = _nothing()
    plan.room.plan.measure(plan.room.groups, 0)
    write_streams(plan, 32)


def _directory() -> None:
    from ckstore.codecs.integers import write_directory

    write_directory(_nothing(), 32, grouped=False)


def _sort() -> None:
    from ckstore.codecs.integer_plan import sort_elements

    room = _nothing().room
    coded, _ = sort_elements(_INTEGERS, _CLASSES, room)
    room.survey.take_numbers(coded, room.groups, 0, room.symbols, room.numbers, np.empty(0, np.uint8))


def _nothing() -> Plan:
    from ckstore.codecs.integer_plan import Plan, Workspace

    return Plan(_INTEGERS[:0], 4, 0, _CLASSES[:0], Workspace(7))


def main() -> None:
    """Take the steps; stop once no process waits."""
    for step in _steps(sys.argv[1]):
        if _is_alone():
            break
        step()


def _is_alone() -> bool:
    """Return whether the parent process is done or has ended: it writes nothing, so it closed the pipe."""
    return bool(select([sys.stdin], [], [], 0)[0])


if __name__ == "__main__":
    main()
    os._exit(0)  # The parent waits, and there is nothing to clean up.
