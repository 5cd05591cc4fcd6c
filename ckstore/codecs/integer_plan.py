"""The encoder's plan for one payload: its elements in coded order, and the groups, codes and planes to write."""

from __future__ import annotations

from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.runtime.blocks import fixed
from ckstore.runtime.scratch import scratch

Array = npt.NDArray[Any]

#: Elements up to which a thread keeps its arrays: longer payloads are rare, and dominated by other work.
_KEPT = 1 << 19

_held = local()


class Workspace:
    """The encoder's kernels and their shared arrays; `ckstore.kernels.entropy.plan` describes the arrays.

    Parameters
    ----------
    capacity
        Maximal number of elements of a payload.
    """

    def __init__(self, capacity: int) -> None:
        from ckstore.kernels.entropy import directory, order, plan, survey, write
        from ckstore.kernels.entropy.bins import SYMBOLS

        self.survey = survey
        self.plan = plan
        self.order = order
        self.directory = directory
        self.write = write
        most = directory.CLASSES
        self.capacity = capacity
        self.cursors = np.empty((order.QUARTERS, 256), np.int64)
        self.groups = np.zeros(most, directory.GROUP)
        self.costs = np.empty((most, 2))
        self.lowers = np.empty((most, directory.TABLE), np.int64)
        self.raws = scratch("entropy-raws", most * directory.TABLE, np.uint8).reshape(most, directory.TABLE)
        self.lengths = scratch("entropy-lengths", most * SYMBOLS, np.uint8).reshape(most, SYMBOLS)
        self.cells = scratch("entropy-cells", plan.CELLS, np.int64)
        self.splits = scratch("entropy-splits", 2 * plan.CELLS, np.uint8)
        self.symbols = scratch("entropy-symbols", capacity, np.uint16)
        self.numbers = scratch("entropy-numbers", capacity, np.int64)
        self.runs = scratch("entropy-runs", capacity, np.int64)
        self.values = scratch("entropy-values", capacity, np.int64)
        self.joints = scratch("entropy-joints", capacity, np.uint16)
        self.run_cells = scratch("entropy-run-cells", capacity, np.uint16)
        self.coder = np.empty(5, np.int64)
        self.odds = np.empty((directory.CONTEXTS, 2), np.int32)
        self.ends = np.empty(4, np.int64)


@dataclass(slots=True)
class Plan:
    """The planned contents of a payload.

    Attributes
    ----------
    coded
        The elements in coded order, as signed integers of their own width.
    narrow
        Bytes that hold each of them: 1, 2, 4 or 8.
    number
        Number of groups.
    planes
        The groups' planes, one after the other.
    room
        The output of the kernels. Like the other arrays it is valid until the thread makes its next plan.
    """

    coded: Array
    narrow: int
    number: int
    planes: Array
    room: Workspace


def check_arrays(values: Array, classes: Array | None) -> None:
    """Raise `UsageError` if the arrays' dtype or shape cannot be coded."""
    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.flags.c_contiguous or not values.dtype.isnative:
        raise UsageError("Integers to code must be a one-dimensional, contiguous integer array in native byte order.")
    if classes is not None and (classes.dtype != np.uint8 or classes.shape != values.shape):
        raise UsageError("Classes must be an array of uint8 with one entry for each integer.")


def make_plan(values: Array, classes: Array | None) -> Plan:
    """Plan the payload of some integers.

    Parameters
    ----------
    values, classes
        As for `encode_integers`.
    """
    check_arrays(values, classes)
    room = _workspace(values.size)
    survey, plan, groups = room.survey, room.plan, room.groups
    signed = fixed(values.view(f"i{values.itemsize}"))
    groups.view(np.uint8).fill(0)
    if classes is None:
        coded, number = signed, int(signed.size > 0)
        groups["count"][0] = signed.size
    else:
        coded, number = sort_elements(signed, classes, room)
    bits = survey.survey_groups(coded, groups, number, room.numbers)
    shared = (
        groups, number, room.symbols, room.numbers, room.runs, room.values, room.joints, room.run_cells, room.cells,
        room.splits, room.lowers, room.raws, room.lengths, room.costs,
    )  # fmt: skip
    planes = scratch("entropy-planes", plan.plan_groups(plan.CHOOSE_PLANES, *shared), np.uint8)
    survey.take_numbers(coded, groups, number, room.symbols, room.numbers, planes)
    if plan.plan_groups(plan.PLAN_DENSE, *shared):
        survey.extract_pairs(coded, groups, number, room.runs, room.values)
        plan.plan_groups(plan.PLAN_PAIRS, *shared)
    narrow = 1 if bits <= 7 else 2 if bits <= 15 else 4 if bits <= 31 else 8
    return Plan(coded, narrow, number, planes, room)


def _workspace(size: int) -> Workspace:
    held: Workspace | None = getattr(_held, "workspace", None)
    if held is None or held.capacity < size:
        held = Workspace(size)
        if size <= _KEPT:
            _held.workspace = held
    return held


def sort_elements(signed: Array, classes: Array, room: Workspace) -> tuple[Array, int]:
    """Return the elements sorted by class, and the number of their groups."""
    classes = fixed(classes)
    number = room.order.group_classes(classes, room.cursors, room.groups)
    if number < 0:
        raise UsageError("Classes must lie between 0 and 63.")
    coded = scratch("entropy-coded", signed.size, signed.dtype)
    room.order.to_coded_order(signed, classes, room.cursors, coded)
    return fixed(coded), number
