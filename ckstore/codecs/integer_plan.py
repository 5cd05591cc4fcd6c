"""The encoder's plan for one payload: its elements in coded order, and the groups, codes and planes to write."""

from __future__ import annotations

from threading import local
from typing import Any, NamedTuple

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
        from ckstore.kernels import entropy

        self.kernels = entropy
        most = entropy.CLASSES
        self.groups = np.zeros(most, entropy.GROUP)
        self.lowers = np.empty((most, entropy.TABLE), np.int64)
        self.raws = np.empty((most, entropy.TABLE), np.uint8)
        self.lengths = np.empty((most, entropy.SYMBOLS), np.uint8)
        self.ends = np.empty(4, np.int64)
        self._tables = (
            self.groups,
            self.lowers,
            self.raws,
            self.lengths,
            self.ends,
            np.empty(entropy.READER >> 3, np.int64),
        )
        self._addresses = np.array([array.ctypes.data for array in self._tables], np.uint64)
        self.tables = self._addresses.ctypes.data
        self.cursors = np.empty((entropy.QUARTERS, 256), np.int64)
        self.costs = np.empty((most, 2))
        self._capacity = 0

    def reserve(self, size: int) -> None:
        """Get the encoder's kernels, and arrays for a payload of `size` elements."""
        if self._capacity > 0 and size <= self._capacity <= max(size, _KEPT):
            return
        kernels = self.kernels
        self._capacity = capacity = 1 << max(size - 1, 1).bit_length()
        sizes = [*[2 * capacity] * 3, *[8 * capacity] * 3, 8 * kernels.CELLS, 2 * kernels.CELLS]
        sizes += [kernels.PLANE_BYTES * capacity, kernels.STREAM_BYTES * capacity + kernels.STREAM_SPARE]
        # One block, which a later thread reuses: threads live no longer than the encoding of a version. Its arrays
        # begin with lines of the processor's cache.
        starts = np.cumsum([0, *((nbytes | 63) + 1 for nbytes in sizes)])
        self._encoder = empty(int(starts[-1]) + kernels.DIRECTORY_BYTES, np.uint8)
        at = self._encoder.ctypes.data + starts
        arrays = np.array([*at[:8], self.costs.ctypes.data, *at[8:], capacity, *[0] * kernels.FACTS], np.int64)
        self.facts = arrays[-kernels.FACTS :]
        self.encoder = arrays.ctypes.data


def workspace() -> Workspace:
    """Return this thread's workspace."""
    held: Workspace | None = getattr(_held, "workspace", None)
    if held is None:
        held = _held.workspace = Workspace()
    return held


class PayloadPlan(NamedTuple):
    """The planned contents of a payload, which a thread keeps until it encodes or decodes again.

    Attributes
    ----------
    coded
        The elements in coded order, as signed integers of their own width.
    number
        Number of groups.
    size
        Bytes of the payload.
    narrow
        Bytes that hold each element: 1, 2, 4 or 8.
    differs
        Whether any element differs from 0.
    room
        The output of the kernels.
    """

    coded: Array
    number: int
    size: int
    narrow: int
    differs: bool
    room: Workspace


def check_arrays(values: Array, classes: Array | None) -> None:
    """Raise `UsageError` if the arrays' dtype or shape cannot be coded."""
    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.flags.c_contiguous or not values.dtype.isnative:
        raise UsageError("Integers to code must be a one-dimensional, contiguous integer array in native byte order.")
    if classes is not None and (classes.dtype != np.uint8 or classes.shape != values.shape):
        raise UsageError("Classes must be an array of uint8 with one entry for each integer.")


def make_plan(values: Array, classes: Array | None) -> PayloadPlan:
    """Plan the payload of some integers; see `encode_integers`."""
    check_arrays(values, classes)
    room = workspace()
    room.reserve(values.size)
    groups = room.groups
    signed = aligned(values.view(f"i{values.itemsize}"))
    groups.view(np.uint8).fill(0)
    if classes is None:
        coded, number = signed, int(signed.size > 0)
        groups["count"][0] = signed.size
    else:
        coded, number = sort_elements(signed, classes, room)
    size = room.kernels.plan_payload(coded, classes is not None, number, room.tables, room.encoder)
    narrow, differs, *_ = room.facts.tolist()
    return PayloadPlan(coded, number, size, narrow, differs != 0, room)


def sort_elements(signed: Array, classes: Array, room: Workspace) -> tuple[Array, int]:
    """Return the elements sorted by class, and the number of their groups."""
    classes = aligned(classes)
    number = room.kernels.group_classes(classes, room.cursors, room.tables)
    if number < 0:
        raise UsageError("Classes must lie between 0 and 63.")
    coded = empty(signed.size, signed.dtype)
    room.kernels.to_coded_order(signed, classes, room.cursors, coded)
    return coded, number
