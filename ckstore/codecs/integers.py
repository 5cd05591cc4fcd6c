"""Integers to self-contained, checksummed payloads and back: the one entropy coder of all objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.integer_header import DAMAGED, Header, read_header
from ckstore.codecs.integer_plan import PayloadPlan, Workspace, check_arrays, make_plan, workspace
from ckstore.errors import IntegrityError, UsageError
from ckstore.runtime.blocks import aligned, empty
from ckstore.runtime.checksum import crc32
from ckstore.runtime.scratch import scratch

Array = npt.NDArray[Any]

#: Leading elements that are searched for a non-zero first.
_FIRST = 64


def encode_integers(values: Array, classes: Array | None = None) -> bytes:
    """Encode integers.

    Parameters
    ----------
    values : (n,) integer array
        Of 1, 2, 4 or 8 bytes, signed or not, in native byte order; unsigned ones are taken for signed ones of the same
        bits, so that a small difference modulo 2 to the width is small either way.
    classes : (n,) uint8, optional
        A class from 0 to 63 for each element; the decoder needs the same classes.

    Raises
    ------
    UsageError
        If the arrays' dtype or shape does not fit.
    """
    return _payload(make_plan(values, classes), classes).tobytes()


def encode_changes(values: Array, classes: Array | None = None) -> memoryview | None:
    """Return the same payload, in memory that is reused after the result is released; None if all integers are zero."""
    if classes is not None and not (values[:_FIRST].any() or values.any()):
        return None  # Without sorting by class.
    plan = make_plan(values, classes)
    if not plan.differs:
        return None
    payload = _payload(plan, classes)
    payload.flags.writeable = False
    return payload.data


def _payload(plan: PayloadPlan, classes: Array | None) -> Array:
    """Return the payload of a plan."""
    room, coded = plan.room, plan.coded
    payload = empty(plan.size, np.uint8)
    classes_check = 0 if classes is None else crc32(aligned(classes))
    room.kernels.write_payload(coded, classes is not None, classes_check, room.tables, room.encoder, payload)
    if plan.narrow < coded.itemsize:
        coded = empty(coded.size, f"i{plan.narrow}")
        room.kernels.narrow(plan.coded, coded)
    check = crc32(payload[6:], crc32(payload[:2], crc32(coded)))
    payload[2:6] = np.frombuffer(check.to_bytes(4, "little"), np.uint8)
    return payload


def decode_integers(payload: bytes | bytearray | memoryview, out: Array, classes: Array | None = None) -> None:
    """Decode a payload into `out`.

    Parameters
    ----------
    payload : bytes-like
        A result of `encode_integers`.
    out : (n,) integer array, C-contiguous
        With the number of encoded elements, and their width.
    classes : (n,) uint8, optional
        The classes given to the encoder. Without them, the elements of a payload with groups come in coded order.

    Raises
    ------
    IntegrityError
        If the payload is damaged, does not fit `out`, or was encoded with other classes; `out` may hold anything then.
    UsageError
        If the arrays have an impossible dtype or shape.
    """
    check_arrays(out, classes)
    if not out.flags.writeable:
        raise UsageError("The output array is read-only: give a writable one.")
    signed = out.view(f"i{out.itemsize}")
    if not signed.flags.aligned:
        signed[:] = _decode(payload, out.size, out.itemsize, classes, None)
        return
    narrow = _decode(payload, out.size, out.itemsize, classes, signed)
    if narrow is not signed:
        workspace().kernels.widen(narrow, signed)


def add_integers(payload: bytes | bytearray | memoryview, sums: Array, shift: int = 0) -> None:
    """Decode a payload without classes and add its integers to `sums`, writable int32, first shifted right.

    The shift, by 0 to 30 bits, rounds half up. Raise `IntegrityError` if the payload is damaged or does not fit; `sums`
    is unchanged then.
    """
    narrow = _decode(payload, sums.size, sums.itemsize, None, None)
    workspace().kernels.accumulate(narrow, sums, shift)


def _decode(
    payload: bytes | bytearray | memoryview, count: int, width: int, classes: Array | None, target: Array | None
) -> Array:
    """Return the integers of a payload in the narrowest dtype that holds them all.

    If `target` has that dtype, decode into it and return it.
    """
    view = memoryview(payload).cast("B")
    header = read_header(view)
    if classes is not None:
        classes = aligned(classes)
    _check_header(header, count, width, classes)

    if target is None or header.narrow != width:
        target = empty(count, f"i{header.narrow}")
    coded = target if classes is None else empty(count, target.dtype)
    room = workspace()
    number = _read_elements(header, view, room, coded)
    damaged = crc32(view[6:], crc32(view[:2], crc32(coded))) != header.check
    if not damaged and classes is not None:
        damaged = room.kernels.to_natural_order(coded, classes, room.tables, number, target) != 0
    if damaged:
        raise IntegrityError(DAMAGED)
    return target


def _check_header(header: Header, count: int, width: int, classes: Array | None) -> None:
    """Check everything that is known before decoding; raise `IntegrityError` for a mismatch."""
    if header.count != count or header.width != width:
        raise IntegrityError(
            f"The payload holds {header.count} integers of {header.width} bytes, not {count} of {width}: "
            "decode it with the shape and dtype it was encoded from."
        )
    if classes is not None and not header.grouped:
        raise IntegrityError("The payload was encoded without classes: decode it without them.")
    if classes is not None and crc32(classes) != header.classes_check:
        raise IntegrityError("The payload was encoded with other classes: give those of the base it was coded by.")


def _read_elements(header: Header, view: memoryview, room: Workspace, coded: Array) -> int:
    """Decode the elements in coded order. Return the number of groups; `room.groups` has the groups."""
    payload = np.frombuffer(view, np.uint8)
    number: int = room.kernels.read_directory(
        payload, header.directory, header.planes, header.grouped, header.count, room.tables
    )
    room.ends[:3] = header.streams
    planes = header.planes if header.streamed else 0
    if number < 0 or room.kernels.read_streams(payload, planes, room.tables, number, coded):
        raise IntegrityError(DAMAGED)
    return number


def entropy_bits(values: Array, classes: Array | None = None) -> float:
    """Return the order-0 entropy in bits, by group, of the encoder's tokens, with their raw bits."""
    plan = make_plan(values, classes)
    return float(plan.room.costs[: plan.number, 1].sum())


def payload_bits(
    values: Array, classes: Array | None = None, *, times: float = 1.0, payloads: int = 1, fine: int = 7
) -> tuple[float, float]:
    """Estimate the size in bits, from histograms alone, for a planner that uses samples.

    The estimate is of `payloads` payloads that hold `times` times the integers together: without classes, and with
    them (infinite if there are none). Histograms have 2^`fine` cells for each octave. A payload of more integers has
    larger tables, because it has more symbols, but less than proportionally: by the square root, as measured.
    """
    check_arrays(values, classes)
    from ckstore.kernels.entropy import ROWS, estimate_bits

    found = np.empty((2, 2))
    counts = scratch("histogram", (1 if classes is None else ROWS) * (16 * values.itemsize << fine), np.int32)
    estimate_bits(values.view(f"i{values.itemsize}"), classes, fine, counts, found)

    growing, tables = found.T
    natural, in_groups = (
        times * growing + (times * payloads) ** 0.5 * tables + payloads * np.where(growing > 0, 192, 96)
    )
    return float(natural), float("inf") if classes is None else float(in_groups)


def count_integers(payload: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the number of integers in a payload and bytes of each, from its unverified header alone."""
    header = read_header(memoryview(payload).cast("B"))
    return header.count, header.width
