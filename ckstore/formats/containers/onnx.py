"""ONNX models: a protobuf message whose graph has the weights as initialisers.

Only those are read that have their numbers in one stretch; nodes, and graphs within them, stay bytes.

Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto (ModelProto, GraphProto, TensorProto), and
https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import FileLayout, Format, Source
from ckstore.varint import read_varints

#: Above the fields of any model: those of its messages, of its graph and of initialisers.
_MAX_FIELDS = 1 << 22
_MAX_NAME_BYTES = 1 << 16
_MAX_AXES = 64
_WINDOW = 1 << 16

_IR_VERSION, _GRAPH = 1, 7
_INITIALISER = 5
_DIMS, _DATA_TYPE, _FLOATS, _NAME, _RAW, _DOUBLES, _LOCATION = 1, 2, 4, 8, 9, 10, 14
#: Types of fields.
_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
#: dtype of each `TensorProto.DataType` whose elements are whole bytes.
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn",
    18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip


class _Messages:
    """The fields of messages, whose lengths are read through a window of the file; raises `ValueError` for others."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._window = (0, b"")
        self._left = _MAX_FIELDS

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, type, and first and last place of each field; of a number the value in place of the last."""
        while start < stop:
            self._left -= 1
            tag, start = self.number(start)
            kind, end = tag & 7, start
            if kind == _NUMBER:
                end, following = self.number(start)
            elif kind == _BYTES:
                length, start = self.number(start)
                following = end = start + length
            elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
                following = end = start + (8 if kind == _EIGHT_BYTES else 4)
            else:
                raise ValueError("no type of a field")
            if following > stop or self._left < 0:
                raise ValueError("a field leaves its message, or there are too many")
            yield tag >> 3, kind, start, end
            start = following

    def number(self, at: int) -> tuple[int, int]:
        """Return the number at a place, and the next place."""
        first, data = self._window
        if not first <= at <= first + len(data) - 10:
            first, data = self._window = (at, self._source.pread(at, min(_WINDOW, self._source.size - at)))
        [value], following = read_varints(data, at - first)
        return value, first + following

    def numbers(self, start: int, stop: int) -> list[int]:
        """Return packed numbers."""
        found: list[int] = []
        while start < stop and len(found) <= _MAX_AXES:
            value, start = self.number(start)
            found.append(value)
        return found


def _parse(source: Source) -> FileLayout | None:
    """Return the layout of a model; each initialiser's name is one path segment. None for another or a damaged file."""
    layout = FileLayout("onnx", source.size, tree={})
    messages = _Messages(source)
    try:
        for number, kind, start, stop in messages.fields(0, source.size):
            if (number, kind) == (_GRAPH, _BYTES):
                for inner, inner_kind, first, last in messages.fields(start, stop):
                    if (inner, inner_kind) == (_INITIALISER, _BYTES):
                        _add(layout, source, messages, first, last)
                    elif inner_kind == _BYTES:
                        layout.add_bytes(("__bytes__", len(layout.extents)), first, last)
            elif kind == _BYTES:
                layout.add_bytes(("__bytes__", len(layout.extents)), start, stop)
    except ValueError:
        return None
    return layout if layout.tensors else None


def _add(layout: FileLayout, source: Source, messages: _Messages, start: int, stop: int) -> None:
    """Add an initialiser; raise `ValueError` for one that contradicts itself."""
    name, dtype, shape, data, elsewhere = "", "", list[int](), list[tuple[int, int, int]](), False
    others = list[tuple[int, int]]()
    for number, kind, first, last in messages.fields(start, stop):
        if number == _DIMS:
            shape += [last] if kind == _NUMBER else messages.numbers(first, last)
        elif (number, kind) == (_DATA_TYPE, _NUMBER):
            dtype = _DTYPES.get(last, "")
        elif (number, kind) == (_NAME, _BYTES) and last - first <= _MAX_NAME_BYTES:
            name = source.pread(first, last - first).decode()
        elif number in (_RAW, _FLOATS, _DOUBLES) and kind == _BYTES:
            data.append((number, first, last))
        elif number == _LOCATION:
            elsewhere = last != 0
        elif kind == _BYTES:
            others.append((first, last))
    if not name or name in layout.tree or name in layout.bytes_for or len(shape) > _MAX_AXES:
        raise ValueError("an initialiser has no name of its own, or too many axes")
    fields = {_RAW, {"float32": _FLOATS, "float64": _DOUBLES}.get(dtype)}
    count = prod(shape)
    if elsewhere:
        layout.bytes_for[name] = "in another file"
    elif dtype and count == 0 and max(shape) < 1 << 63:
        layout.tree[name] = layout.add((name,), dtype, tuple(shape), start)
    elif dtype and len(data) == 1 and data[0][0] in fields:
        if data[0][2] - data[0][1] != count * ITEM_SIZES[dtype]:
            raise ValueError("an initialiser has another size than its shape")
        layout.tree[name] = layout.add((name,), dtype, tuple(shape), data[0][1])
    else:
        layout.bytes_for[name] = "of a dtype or form that is not read"
        for first, last in [*others, *((first, last) for _, first, last in data)]:
            layout.add_bytes(("__bytes__", name, len(layout.extents)), first, last)


def _starts_like(head: bytes) -> bool:
    """Return whether a file begins with a small version of the format, and another field of a model."""
    following = {number << 3 | _BYTES for number in (2, 3, 4, 6, _GRAPH, 8)} | {5 << 3}
    return len(head) > 3 and head[0] == _IR_VERSION << 3 and 0 < head[1] < 64 and head[2] in following


FORMAT = Format("onnx", _starts_like, _parse, in_archives=False)
