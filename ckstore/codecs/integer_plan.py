"""The encoder's plan for one payload: its elements in coded order, and what is to be written of them."""

from __future__ import annotations

from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.runtime.blocks import fixed
from ckstore.runtime.checksum import use_kernel
from ckstore.runtime.scratch import scratch

Array = npt.NDArray[Any]

#: Elements up to which a thread keeps its arrays: longer payloads are rare, and spend their time elsewhere.
_KEPT = 1 << 19

_held = local()


class Workspace:
    """The encoder's kernels, and the arrays that they share; see `ckstore.kernels.entropy.plan` for what these hold.

    Parameters
    ----------
    capacity
        Most elements of a payload.
    """

    def __init__(self, capacity: int) -> None:
        from ckstore.kernels.entropy import coder as entropy_coder
        from ckstore.kernels.entropy import directory as entropy_directory
        from ckstore.kernels.entropy import order as entropy_order
        from ckstore.kernels.entropy import plan as entropy_plan
        from ckstore.kernels.entropy import survey as entropy_survey
        from ckstore.kernels.entropy import write as entropy_write
        from ckstore.kernels.entropy.histograms import TABLE_BITS
        from ckstore.kernels.entropy.layout import ROW, SYMBOLS

        use_kernel()
        self.survey = entropy_survey
        self.plan = entropy_plan
        self.measure = entropy_plan.measure
        self.order = entropy_order
        self.start_coder = entropy_coder.start_coder
        self.finish_writing = entropy_coder.finish_writing
        self.directory = entropy_directory
        self.write_streams = entropy_write.write_streams
        most = entropy_order.CLASSES
        few = min(capacity, most * entropy_survey.SMALL_SPARSE)
        table = 1 << TABLE_BITS
        self.capacity = capacity
        self.class_counts = np.empty(most, np.int64)
        self.cursors = np.empty((entropy_order.QUARTERS, most), np.int64)
        self.groups = np.empty((most, entropy_directory.COLUMNS), np.int64)
        self.costs = np.empty((most, 2))
        self.rows = np.empty((most, 2, ROW), np.uint8)
        self.lengths = scratch("entropy-lengths", most * SYMBOLS, np.uint8).reshape(most, SYMBOLS)
        self.bins = scratch("entropy-bins", table, np.int64)
        self.words = scratch("entropy-words", table, np.uint64)
        self.numbers = scratch("entropy-numbers", capacity, np.uint16)
        self.wide = scratch("entropy-wide", capacity, np.uint64)
        self.few_runs = scratch("entropy-few-runs", few, np.uint64)
        self.few_values = scratch("entropy-few-values", few, np.uint64)
        self.runs = scratch("entropy-runs", capacity, np.uint64)
        self.values = scratch("entropy-values", capacity, np.uint64)
        self.joints = scratch("entropy-joints", capacity, np.uint16)
        self.coder = np.empty(5, np.int64)
        self.odds = np.empty((entropy_directory.CONTEXTS, 2), np.int32)
        self.ends = np.empty(4, np.int64)


@dataclass(slots=True)
class Plan:
    """What is to be written.

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
        What the kernels left. Like the other arrays it is valid until the thread makes its next plan.
    """

    coded: Array
    narrow: int
    number: int
    planes: Array
    room: Workspace


def check_arrays(values: Array, classes: Array | None) -> None:
    """`UsageError` where the arrays' dtype or shape is none that can be coded."""
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
    survey, plan_groups = room.survey, room.plan.plan_groups
    signed = fixed(values.view(f"i{values.itemsize}"))
    coded, number = (signed, _one_group(signed.size, room)) if classes is None else sort_elements(signed, classes, room)
    groups = room.groups
    octaves = survey.survey_groups(coded, groups, number, room.wide)
    shared = (
        groups, number, room.numbers, room.wide, room.few_values, room.runs, room.values, room.joints, room.bins,
        room.rows, room.lengths, room.costs,
    )  # fmt: skip
    planes = scratch("entropy-planes", plan_groups(room.plan.CHOOSE_PLANES, *shared), np.uint8)
    survey.take_numbers(coded, groups, number, room.numbers, room.wide, planes)
    if plan_groups(room.plan.PLAN_DENSE, *shared):
        survey.extract_pairs(coded, groups, number, room.few_runs, room.few_values, room.runs, room.values)
        plan_groups(room.plan.PLAN_PAIRS, *shared)
    narrow = 1 if octaves <= 8 else 2 if octaves <= 16 else 4 if octaves <= 32 else 8
    return Plan(coded, narrow, number, planes, room)


def _workspace(size: int) -> Workspace:
    held: Workspace | None = getattr(_held, "workspace", None)
    if held is None or held.capacity < size:
        held = Workspace(size)
        if size <= _KEPT:
            _held.workspace = held
    return held


def _one_group(size: int, room: Workspace) -> int:
    room.groups[0] = 0
    room.groups[0, room.directory.COUNT] = size
    return int(size > 0)


def sort_elements(signed: Array, classes: Array, room: Workspace) -> tuple[Array, int]:
    """The elements sorted by class, and the number of groups that they make."""
    order = room.order
    classes = fixed(classes)
    if order.class_counts(classes, room.class_counts, room.cursors):
        raise UsageError("Classes must lie between 0 and 63.")
    number = order.group_classes(room.class_counts, room.groups)
    coded = scratch("entropy-coded", signed.size, signed.dtype)
    order.to_coded_order(signed, classes, room.cursors, coded)
    return fixed(coded), number
