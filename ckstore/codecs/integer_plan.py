"""The encoder's plan for one payload: its elements in coded order, and the groups, codes and planes to write."""

from __future__ import annotations

from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.errors import UsageError
from ckstore.runtime.blocks import aligned, empty

Array = npt.NDArray[Any]

#: Elements up to which a thread keeps its arrays: longer payloads are rare, and dominated by other work.
_KEPT = 1 << 19

_held = local()


class Workspace:
    """The kernels, imported at first use, and the arrays that they share; `ckstore.kernels.entropy` describes these."""

    def __init__(self) -> None:
        from ckstore.kernels.entropy import order, payload_directory, read

        self.directory, self.order, self.read = payload_directory, order, read
        most = payload_directory.CLASSES
        self.groups = np.zeros(most, payload_directory.GROUP)
        self.lowers = np.empty((most, payload_directory.TABLE), np.int64)
        self.raws = np.empty((most, payload_directory.TABLE), np.uint8)
        self.lengths = np.empty((most, payload_directory.SYMBOLS), np.uint8)
        self.ends = np.empty(4, np.int64)
        self._tables = (
            self.groups,
            self.lowers,
            self.raws,
            self.lengths,
            self.ends,
            np.empty(read.READER >> 3, np.int64),
        )
        self._addresses = np.array([array.ctypes.data for array in self._tables], np.uint64)
        self.tables = self._addresses.ctypes.data
        self.cursors = np.empty((order.QUARTERS, 256), np.int64)
        self.costs = np.empty((most, 2))
        self._capacity = 0

    def reserve(self, size: int) -> None:
        """Get the encoder's kernels, and arrays for a payload of `size` elements."""
        if self._capacity > 0 and size <= self._capacity <= max(size, _KEPT):
            return
        from ckstore.kernels.entropy import plan, survey, write

        self.plan, self.survey, self.write = plan, survey, write
        self._capacity = capacity = 1 << size.bit_length()
        self._encoder: tuple[Array, ...] = (
            *(np.empty(capacity, np.uint16) for _ in range(3)),
            *(np.empty(capacity, np.int64) for _ in range(3)),
            np.empty(plan.CELLS, np.int64),
            np.empty(2 * plan.CELLS, np.uint8),
            self.costs,
        )
        self._encoder_addresses = np.array([*(array.ctypes.data for array in self._encoder), capacity], np.uint64)
        self.encoder = self._encoder_addresses.ctypes.data


def workspace() -> Workspace:
    """Return this thread's workspace."""
    held: Workspace | None = getattr(_held, "workspace", None)
    if held is None:
        held = _held.workspace = Workspace()
    return held


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
        The output of the kernels, valid until this thread encodes or decodes again.
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
    """Plan the payload of some integers; see `encode_integers`."""
    check_arrays(values, classes)
    room = workspace()
    room.reserve(values.size)
    survey, plan, groups = room.survey, room.plan, room.groups
    signed = aligned(values.view(f"i{values.itemsize}"))
    groups.view(np.uint8).fill(0)
    if classes is None:
        coded, number = signed, int(signed.size > 0)
        groups["count"][0] = signed.size
    else:
        coded, number = sort_elements(signed, classes, room)
    planned = room.tables, number, room.encoder
    bits = survey.survey_groups(coded, *planned)
    planes = empty(plan.choose_planes(*planned), np.uint8)
    survey.take_numbers(coded, *planned, planes)
    if plan.plan_dense(*planned):
        survey.extract_pairs(coded, *planned)
        plan.plan_pairs(*planned)
    narrow = 1 if bits <= 7 else 2 if bits <= 15 else 4 if bits <= 31 else 8
    return Plan(coded, narrow, number, planes, room)


def sort_elements(signed: Array, classes: Array, room: Workspace) -> tuple[Array, int]:
    """Return the elements sorted by class, and the number of their groups."""
    classes = aligned(classes)
    number = room.order.group_classes(classes, room.cursors, room.tables)
    if number < 0:
        raise UsageError("Classes must lie between 0 and 63.")
    coded = empty(signed.size, signed.dtype)
    room.order.to_coded_order(signed, classes, room.cursors, coded)
    return aligned(coded), number
