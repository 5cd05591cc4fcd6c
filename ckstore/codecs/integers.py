"""Integers to self-contained, checksummed payloads and back: the one entropy coder of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.checksum import crc32c
from ckstore.codecs.integer_header import (
    DAMAGED,
    FORMAT,
    GROUPED,
    PADDING,
    STREAMED,
    count_bytes,
    read_header,
    varint,
)
from ckstore.errors import IntegrityError, UsageError

Array = npt.NDArray[Any]


def encode_integers(values: Array, classes: Array | None = None) -> bytes:
    """Encode integers.

    Parameters
    ----------
    values : (n,) integer array
        Of 1, 2, 4 or 8 bytes, signed or not, in native byte order; unsigned ones are taken for signed ones of the same
        bits, so that a small difference modulo 2 to the width is small either way.
    classes : (n,) uint8, optional
        A class from 0 to 63 for each element, which the decoder must be given again.

    Raises
    ------
    UsageError
        If the arrays' dtype or shape does not fit.
    """
    plan = _plan(values, classes)
    streamed = plan.summary[2] > 0
    flags = plan.width_code | plan.narrow_code << 2 | (classes is not None) * GROUPED | streamed * STREAMED
    head = bytearray(count_bytes(plan.coded.size))
    if classes is not None:
        head += crc32c(_fixed(classes)).to_bytes(4, "little")
    directory = _write_directory(plan, classes is not None)
    check = crc32c(plan.coded.astype(f"<i{1 << plan.narrow_code}", copy=False))
    if not streamed:
        rest = bytes(head) + directory
        check = crc32c(rest, crc32c(bytes((FORMAT, flags)), check))
        return bytes((FORMAT, flags)) + check.to_bytes(4, "little") + rest

    streams = _write_streams(plan)
    for size in (len(directory), *map(len, streams[:3])):
        head += varint(size)
    rest = b"".join((check.to_bytes(4, "little"), head, directory, *streams, bytes(PADDING)))
    whole = crc32c(memoryview(rest)[4:], crc32c(bytes((FORMAT, flags))))
    return b"".join((bytes((FORMAT, flags)), whole.to_bytes(4, "little"), rest))


def decode_integers(payload: bytes | bytearray | memoryview, out: Array, classes: Array | None = None) -> None:
    """Decode a payload into `out`.

    Parameters
    ----------
    payload : bytes-like
        What `encode_integers` returned.
    out : (n,) integer array, C-contiguous
        Of as many elements as were encoded, and of their width.
    classes : (n,) uint8, optional
        The classes given to the encoder. Without them, the elements of a payload with groups come in coded order.

    Raises
    ------
    IntegrityError
        If the payload is damaged, does not fit `out`, or was encoded with other classes.
    UsageError
        If the arrays' dtype or shape is none that could be right.
    """
    from ckstore.kernels import entropy_coder, entropy_directory, entropy_order, entropy_read
    from ckstore.kernels.entropy_layout import ROW, SYMBOLS

    _check_arrays(out, classes)
    if not out.flags.writeable:
        raise UsageError("The output array is read-only: give one that can be written.")
    view = memoryview(payload).cast("B")
    header = read_header(view)
    if header.count != out.size or header.width != out.itemsize:
        raise IntegrityError(
            f"The payload holds {header.count} integers of {header.width} bytes, not {out.size} of {out.itemsize}: "
            "decode it with the shape and dtype it was encoded from."
        )
    if classes is not None and not header.grouped:
        raise IntegrityError("The payload was encoded without classes: decode it without them.")
    if classes is not None:
        classes = _fixed(classes)
        if crc32c(classes) != header.classes_check:
            raise IntegrityError("The payload was encoded with other classes: give those of the base it was coded by.")
    if header.streamed and header.check != crc32c(view[10:], crc32c(view[:2])):
        raise IntegrityError(DAMAGED)

    coder = np.zeros(5, np.int64)
    odds = np.empty((entropy_directory.CONTEXTS, 2), np.int32)
    directory = np.array(view[header.directory : header.streams], np.uint8)
    most = 64 if header.grouped else 1
    groups = np.zeros((most, entropy_directory.COLUMNS), np.int64)
    rows = np.zeros((most, 2, ROW), np.uint8)
    lengths = np.empty((most, SYMBOLS), np.uint8)
    pairs = min(header.count, most * entropy_directory.MOST_ADAPTIVE)
    runs = np.empty(pairs, np.uint64)
    pair_values = np.empty(pairs, np.uint64)
    number = 0
    if header.count:
        entropy_coder.start_coder(coder, directory, odds, 0)
        number = entropy_directory.code_directory(
            coder, directory, odds, header.grouped, header.count, groups, rows, lengths, runs, pair_values
        )
    if number < 0:
        raise IntegrityError(DAMAGED)

    wide = np.dtype(np.int64 if header.narrow == 8 else np.int32)
    signed = np.asarray(out).view(f"i{out.itemsize}")
    direct = classes is None and signed.dtype == wide and signed.flags.aligned
    coded = signed if direct else np.empty(header.count, wide)
    buffer = _fixed(np.frombuffer(view, np.uint8))
    positions = np.array(header.stream_starts, np.int64) * 8
    ends = np.array(header.stream_ends, np.int64)
    if entropy_read.read_streams(buffer, positions, ends, groups, number, rows, lengths, runs, pair_values, coded):
        raise IntegrityError(DAMAGED)
    narrow = coded.astype(f"<i{header.narrow}", copy=False)
    check = crc32c(narrow)
    if header.streamed:
        if check != header.data_check:
            raise IntegrityError(DAMAGED)
    elif crc32c(view[6:], crc32c(view[:2], check)) != header.check:
        raise IntegrityError(DAMAGED)
    if classes is not None:
        counts = np.zeros(entropy_order.CLASSES, np.int64)
        counts[groups[:number, entropy_directory.CLASS]] = groups[:number, entropy_directory.COUNT]
        actual = np.zeros(entropy_order.CLASSES, np.int64)
        cursors = np.empty((entropy_order.QUARTERS, entropy_order.CLASSES), np.int64)
        if entropy_order.class_counts(classes, actual, cursors) or not np.array_equal(counts, actual):
            raise IntegrityError(DAMAGED)
        natural = signed if signed.dtype == wide and signed.flags.aligned else np.empty(header.count, wide)
        entropy_order.to_natural_order(coded, classes, cursors, natural)
        if natural is not signed:
            signed[:] = natural
    elif not direct:
        signed[:] = coded


def entropy_bits(values: Array, classes: Array | None = None) -> float:
    """Order-0 entropy in bits, group by group, of the tokens that the encoder chooses, and their raw bits."""
    return float(_plan(values, classes).summary[1])


def payload_bits(values: Array, classes: Array | None = None) -> float:
    """Estimated size in bits of the payload, from histograms alone; for a planner that weighs samples."""
    plan = _plan(values, classes)
    return float(plan.summary[0]) + 8.0 * (16 if plan.summary[2] == 0 else 36)


def count_integers(payload: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Number of integers in a payload and bytes of each, from its header alone, which no checksum has confirmed yet."""
    header = read_header(memoryview(payload).cast("B"))
    return header.count, header.width


@dataclass
class _Plan:
    coded: Array
    width_code: int
    narrow_code: int
    groups: Array
    number: int
    rows: Array
    lengths: Array
    runs: Array
    values: Array
    summary: Array


def _fixed(array: Array) -> Array:
    """The array contiguous, aligned and read-only: kernels are compiled once for each kind of array."""
    array = np.require(np.asarray(array), requirements=("C", "A")).view()
    array.flags.writeable = False
    return array


def _check_arrays(values: Array, classes: Array | None) -> None:
    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.flags.c_contiguous or not values.dtype.isnative:
        raise UsageError("Integers to code must be a one-dimensional, contiguous integer array in native byte order.")
    if classes is not None and (classes.dtype != np.uint8 or classes.shape != values.shape):
        raise UsageError("Classes must be an array of uint8 with one entry for each integer.")


def _plan(values: Array, classes: Array | None) -> _Plan:
    from ckstore.kernels import entropy_directory, entropy_order, entropy_plan
    from ckstore.kernels.entropy_layout import ROW, SYMBOLS

    _check_arrays(values, classes)
    signed = values.view(f"i{values.itemsize}")
    size = signed.size
    narrow_code = 0
    if size:
        reach = max(int(signed.max()), -int(signed.min()) - 1)
        narrow_code = next(code for code in range(4) if reach < 1 << (8 << code) - 1)
    coded = _fixed(signed.astype(np.int64 if narrow_code == 3 else np.int32, copy=False))
    most = 1 if classes is None else 64
    groups = np.zeros((most, entropy_directory.COLUMNS), np.int64)
    number = int(size > 0)
    if classes is None:
        groups[0, entropy_directory.COUNT] = size
    else:
        classes = _fixed(classes)
        counts = np.zeros(entropy_order.CLASSES, np.int64)
        cursors = np.empty((entropy_order.QUARTERS, entropy_order.CLASSES), np.int64)
        if entropy_order.class_counts(classes, counts, cursors):
            raise UsageError("Classes must lie between 0 and 63.")
        ordered = np.empty_like(coded)
        entropy_order.to_coded_order(coded, classes, cursors, ordered)
        coded = _fixed(ordered)
        present = np.flatnonzero(counts)
        number = present.size
        groups[:number, entropy_directory.CLASS] = present
        groups[:number, entropy_directory.COUNT] = counts[present]
        groups[1:number, entropy_directory.START] = np.cumsum(counts[present])[:-1]
    rows = np.zeros((most, 2, ROW), np.uint8)
    lengths = np.empty((most, SYMBOLS), np.uint8)
    runs = np.empty(size + 1, np.uint64)
    pair_values = np.empty(size + 1, np.uint64)
    summary = np.zeros(3)
    entropy_plan.plan_groups(coded, 8 << narrow_code, groups, number, rows, lengths, runs, pair_values, summary)
    width_code = values.itemsize.bit_length() - 1
    return _Plan(coded, width_code, narrow_code, groups, number, rows, lengths, runs, pair_values, summary)


def _write_streams(plan: _Plan) -> list[memoryview]:
    from ckstore.kernels import entropy_directory as directory
    from ckstore.kernels.entropy_write import write_streams

    groups = plan.groups[: plan.number]
    kinds = groups[:, directory.KIND]
    items = np.select(
        [kinds == directory.DENSE, kinds == directory.SPARSE], [groups[:, directory.COUNT], groups[:, directory.PAIRS]]
    )
    room = int(((items // 4 + 1) * groups[:, directory.WIDEST]).sum()) // 8 + 32
    buffer = np.empty(4 * room, np.uint8)
    starts = np.arange(4, dtype=np.int64) * room
    ends = np.zeros(4, np.int64)
    write_streams(
        plan.coded, plan.groups, plan.number, plan.rows, plan.lengths, plan.runs, plan.values, buffer, starts, ends
    )
    return [buffer[start:end].data for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _write_directory(plan: _Plan, grouped: bool) -> bytes:
    from ckstore.kernels import entropy_coder
    from ckstore.kernels import entropy_directory as directory

    if not plan.number:
        return b""
    adaptive = plan.groups[: plan.number, directory.KIND] == directory.ADAPTIVE
    pairs = int(plan.groups[: plan.number, directory.PAIRS][adaptive].sum())
    symbols = int(plan.groups[: plan.number, directory.SYMBOL_COUNT].sum())
    # A decision costs at most 10.4 bits: 135 of them in a pair, 15 in a code length, below 6,000 in a group's rest.
    buffer = np.empty(192 * pairs + 24 * symbols + 8192 * plan.number, np.uint8)
    coder = np.zeros(5, np.int64)
    odds = np.empty((directory.CONTEXTS, 2), np.int32)
    entropy_coder.start_coder(coder, buffer, odds, 1)
    directory.code_directory(
        coder, buffer, odds, grouped, plan.coded.size, plan.groups, plan.rows, plan.lengths, plan.runs, plan.values
    )
    size = int(entropy_coder.finish_writing(coder, buffer))
    return buffer[:size].tobytes()
