"""Layout documents as rows, read and written after docs/format.md alone, valid or not."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

MARKS = ("conj", "neg", "parameter", "requires_grad", "array")
#: The columns in order: T for texts, I for integers.
KINDS = "TIIII" "T" "IIIIIT" "TIIIIIII" "III" "TIIII" "TTIIITI" "IIII"  # fmt: skip


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return number, at


def _as_varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _as_varint(number >> 7)


def columns(data: bytes) -> list[list[Any]]:
    """Return the columns of a layout document."""
    found: list[list[Any]] = []
    at = 0
    for kind in KINDS:
        count, at = _varint(data, at)
        if kind == "T":
            size, at = _varint(data, at)
            texts = data[at : at + size].decode().split("\0") if count else []
            assert len(texts) == count
            found.append(texts)
        else:
            code = data[at]
            size = count << (code & 3)
            stored = np.frombuffer(data, f"<u{1 << (code & 3)}", count, at + 1).astype(np.uint64)
            found.append((np.cumsum(stored) if code & 4 else stored).tolist())
            at += 1
        at += size
    assert at == len(data)
    return found


def packed(columns: list[list[Any]]) -> bytes:
    """Return columns as bytes; values of other types become some of their own."""
    data = b""
    for number, column in enumerate(columns):
        values = column if isinstance(column, list) else [column]
        data += _as_varint(len(values))
        if KINDS[number % len(KINDS)] == "T":
            text = "\0".join(map(str, values)).encode("utf-8", "surrogatepass")
            data += _as_varint(len(text)) + text
        else:
            numbers = [(value if isinstance(value, int) else len(str(value))) % (1 << 64) for value in values]
            data += b"\3" + np.array(numbers, "<u8").tobytes()
    return data


def rows(data: bytes) -> dict[str, Any]:
    """Return a layout document with a row for each file, extent, tensor, checked stretch and unit."""
    read = iter(columns(data))
    kinds, sizes, *counts, names = (next(read) for _ in range(6))
    starts, dtypes, ranks, shape, named, own = (next(read) for _ in range(6))
    extents = [[start, names[dtype], *_lists([rank], shape), number]
               for start, dtype, rank, number in zip(starts, dtypes, ranks, named, strict=True)]  # fmt: skip
    paths, dtypes, ranks, shape, strides, places, offsets, marks = (next(read) for _ in range(8))
    tensors = [
        [path, names[dtype], *_lists([rank], shape), *_lists([rank], strides), place - 1, offset, _marks(marked)]
        for path, dtype, rank, place, offset, marked in zip(paths, dtypes, ranks, places, offsets, marks, strict=True)
    ]
    numbers, first, whole = (next(read) for _ in range(3))
    boxes = {one: [*_lists([ranks[one]], first), *_lists([ranks[one]], whole)] for one in numbers}
    labels, starts, lengths, many, positions = (next(read) for _ in range(5))
    at = [[] for _ in labels]  # type: list[list[int]]
    for place in range(max(many, default=0)):
        for one, total in zip(at, many, strict=True):
            if place < total:
                one.append(positions.pop(0))
    checked = [[name, start, start + length, one]
               for name, start, length, one in zip(labels, starts, lengths, at, strict=True)]  # fmt: skip
    files = []
    done = 0
    for kind, size, *own_counts in zip(kinds, sizes, *counts, strict=True):
        mine, tensors_of, checked_of = (
            [found.pop(0) for _ in range(count)]
            for found, count in zip((extents, tensors, checked), own_counts, strict=True)
        )
        for extent in mine:
            extent[3] = tensors_of[extent[3] - 1][0] if extent[3] else own.pop(0)
        shards = [[one - done, *boxes[one]] for one in boxes if done <= one < done + len(tensors_of)]
        done += len(tensors_of)
        files.append({"kind": kind, "size": size, "extents": mine, "tensors": tensors_of, "checked": checked_of}
                     | ({"shards": shards} if shards else {}))  # fmt: skip
    keys, signatures, dtypes, ranks, shape, roles, many, *members = read
    flat = [list(member) for member in zip(*members, strict=True)]
    units = [
        [key, signature, names[dtype], *_lists([rank], shape), role, [flat.pop(0) for _ in range(count)]]
        for key, signature, dtype, rank, role, count in zip(keys, signatures, dtypes, ranks, roles, many, strict=True)
    ]
    return {"files": files, "units": units}


def _lists(counts: list[int], items: list[int]) -> list[list[int]]:
    """Take lists of given lengths from the beginning of items."""
    return [[items.pop(0) for _ in range(count)] for count in counts]


def _marks(number: int) -> list[str]:
    return [mark for bit, mark in enumerate(MARKS) if number >> bit & 1]


def document(rows: dict[str, Any]) -> bytes:
    """Return rows as a layout document; every extent has its own path."""
    files, units = rows["files"], rows["units"]
    extents, tensors, checked = ([row for file in files for row in file[part]]
                                 for part in ("extents", "tensors", "checked"))  # fmt: skip
    names = list(dict.fromkeys([row[1] for row in (*extents, *tensors)] + [unit[2] for unit in units]))
    befores = np.cumsum([0] + [len(file["tensors"]) for file in files]).tolist()
    shards = [[before + one[0], *one[1:]]
              for before, file in zip(befores, files, strict=False) for one in file.get("shards", [])]  # fmt: skip
    longest = max((len(row[3]) for row in checked), default=0)
    members = [member for unit in units for member in unit[5]]

    def flat(lists: Any) -> list[Any]:
        return list(chain.from_iterable(lists))

    return packed([
        [file["kind"] for file in files], [file["size"] for file in files],
        *([len(file[part]) for file in files] for part in ("extents", "tensors", "checked")), names,
        [row[0] for row in extents], [names.index(row[1]) for row in extents], [len(row[2]) for row in extents],
        flat(row[2] for row in extents), [0] * len(extents), [row[3] for row in extents],
        [row[0] for row in tensors], [names.index(row[1]) for row in tensors], [len(row[2]) for row in tensors],
        flat(row[2] for row in tensors), flat(row[3] for row in tensors), [row[4] + 1 for row in tensors],
        [row[5] for row in tensors], [sum(1 << MARKS.index(mark) for mark in row[6]) for row in tensors],
        [row[0] for row in shards], flat(row[1] for row in shards), flat(row[2] for row in shards),
        [row[0] for row in checked], [row[1] for row in checked], [row[2] - row[1] for row in checked],
        [len(row[3]) for row in checked],
        [row[3][place] for place in range(longest) for row in checked if place < len(row[3])],
        [unit[0] for unit in units], [unit[1] for unit in units], [names.index(unit[2]) for unit in units],
        [len(unit[3]) for unit in units], flat(unit[3] for unit in units), [unit[4] for unit in units],
        [len(unit[5]) for unit in units], *([member[part] for member in members] for part in range(4)),
    ])  # fmt: skip
