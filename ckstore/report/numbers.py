"""A cache of rows of numbers in a file; it may be deleted at any time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.storage import durable

Row = npt.NDArray[np.float32]

#: Bytes of a key, and of the checksum at the start of the file.
_KEY = 16
_CHECKSUM = 32

#: A file above this size begins again with the rows of the present report.
_LARGEST = 1 << 26


def key_of(*parts: object) -> bytes:
    """Return the key of a row: a digest of the values that determine it."""
    return blake3(repr(parts).encode("utf-8", "surrogatepass")).digest(_KEY)


class Numbers:
    """Rows of `width` float32 numbers by key. A damaged file has none: its checksum is compared when it is opened.

    Examples
    --------
    >>> numbers = Numbers(Path("absent"), 2)
    >>> numbers.put(key_of("a"), np.float32([1, 2]))
    >>> numbers.get(key_of("a")).tolist(), numbers.get(key_of("b"))
    ([1.0, 2.0], None)
    """

    def __init__(self, path: Path, width: int) -> None:
        self._path = path
        self.width = width
        self._record = np.dtype([("key", f"V{_KEY}"), ("row", "<f4", (width,))])
        self._old = self._read()
        self._rows: dict[bytes, Row] = {}
        self._has_new = False

    def _read(self) -> dict[bytes, Row]:
        with suppress(OSError, ValueError):
            if self._path.is_file() and self._path.stat().st_size <= _LARGEST:
                data = self._path.read_bytes()
                if blake3(data[_CHECKSUM:]).digest() == data[:_CHECKSUM]:
                    records = np.frombuffer(data[_CHECKSUM:], self._record)
                    return dict(zip((bytes(key) for key in records["key"]), records["row"], strict=True))
        return {}

    def get(self, key: bytes) -> Row | None:
        """Return the row of a key, or None."""
        found = self._rows.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self._rows[key] = found
        return found

    def put(self, key: bytes, row: Row) -> None:
        """Add a row."""
        self._rows[key] = row
        self._has_new = True

    def save(self) -> None:
        """Write the file, unless nothing is new or the directory cannot be written."""
        if not self._has_new:
            return
        room = _LARGEST // self._record.itemsize - 1
        kept = dict(list((self._rows | self._old).items())[:room])
        records = np.empty(len(kept), self._record)
        for number, (key, row) in enumerate(kept.items()):
            records[number] = key, row
        data = records.tobytes()
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_cached(self._path, blake3(data).digest() + data)
