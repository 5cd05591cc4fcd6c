"""Columns of integers and texts as bytes, read and checked so that numbers stay arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckstore.storage.schema import LIMIT
from ckstore.varint import read_varint, varint

Integers = npt.NDArray[np.int64]

#: Types of stored numbers; the last two bits of the code of a column are the number of one.
_TYPES = ("u1", "<u2", "<u4", "<u8")
#: Set in the code of a column of differences, which are small and alike in a regular model.
_DIFFERENCES = 4


def pack_integers(values: Sequence[int] | Integers) -> bytes:
    """Return a column of integers from 0 to 2^63 − 1; raise `ValueError` for others."""
    try:
        column = np.asarray(values, np.int64).reshape(-1)
    except OverflowError:
        raise ValueError("an integer takes more than 63 bits") from None
    if column.size and column.min() < 0:
        raise ValueError("an integer is negative")
    code = 0
    if column.size > 1:
        steps = np.diff(column, prepend=0)
        if steps.min() >= 0:
            column, code = steps, _DIFFERENCES
    largest = int(column.max()) if column.size else 0
    kind = next(number for number, name in enumerate(_TYPES) if largest <= np.iinfo(name).max)
    return varint(column.size) + bytes([code + kind]) + column.astype(_TYPES[kind]).tobytes()


def pack_texts(texts: Sequence[str]) -> bytes:
    """Return a column of texts; raise `ValueError` for a NUL or a lone surrogate."""
    data = "\0".join(texts).encode()
    if data.count(0) != max(len(texts) - 1, 0):
        raise ValueError("a text has a NUL")
    return varint(len(texts)) + varint(len(data)) + data


class ColumnReader:
    """Reads columns one after the other; raises `ValueError` for damaged ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integers(self, count: int | None = None, limit: int = LIMIT) -> Integers:
        """Return a column of integers below a limit; with `count`, of this length."""
        data = self._data
        size, at = read_varint(data, self._at)
        code = data[at] if at < len(data) else 8
        if code >= 2 * _DIFFERENCES:
            raise ValueError("the code of a column is cut off or unknown")
        kind = np.dtype(_TYPES[code % _DIFFERENCES])
        self._at = at + 1 + size * kind.itemsize
        if self._at > len(data) or (count is not None and size != count):
            raise ValueError("a column has another length")
        stored = np.frombuffer(data, kind, size, at + 1)
        if kind.itemsize == 8 and size and int(stored.max()) >= 1 << 63:
            raise ValueError("an integer takes more than 63 bits")
        column = stored.astype(np.int64)
        if code >= _DIFFERENCES and size:
            np.cumsum(column, out=column)
            # A sum that wraps once is negative.
            if float(stored.sum(dtype=np.float64)) >= 1.5 * 2.0**63 or int(column.min()) < 0:
                raise ValueError("an integer takes more than 63 bits")
        if size and int(column.max()) >= limit:
            raise ValueError("an integer is too large")
        return column

    def texts(self, count: int | None = None) -> list[str]:
        """Return a column of texts; with `count`, of this length."""
        size, at = read_varint(self._data, self._at)
        length, at = read_varint(self._data, at)
        self._at = at + length
        if self._at > len(self._data):
            raise ValueError("a column is cut off")
        texts = str(self._data[at : self._at], "utf-8").split("\0") if size else []
        if len(texts) != size or (not size and length) or (count is not None and size != count):
            raise ValueError("a column has another length")
        return texts

    def end(self) -> None:
        """Raise `ValueError` unless everything was read."""
        if self._at != len(self._data):
            raise ValueError("bytes follow the last column")
