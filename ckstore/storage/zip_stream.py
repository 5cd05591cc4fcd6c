"""Writing a zip file from its beginning to its end, hashed on the way.

Python's `zipfile` either goes back to each header when the member's CRC is known, so that the file must be read again
to be hashed, or puts sizes behind the members, 16 bytes each. Here the members are known before they are written.
Source: PKWARE's APPNOTE 6.3.10, sections 4.3, 4.4 and 4.5.3; the bytes are those that `zipfile` writes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from ckstore.runtime.checksum import crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Shorter pieces are gathered until there are so many bytes of them.
_BUFFERED = 1 << 16

_LOCAL = struct.Struct("<4s2B4H3L2H")
_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_STORED, _DEFLATED = 0, 8
_UNIX = 3
#: The first of January 1980: files depend on nothing but their content.
_DATE = 1 << 5 | 1
_ATTRIBUTES = 0o600 << 16
_LIMIT = (1 << 31) - 1
_FULL = 0xFFFFFFFF
_MOST = 0xFFFF
#: Of a window zlib uses all but so many bytes.
_LOOKAHEAD = 262


class ZipStream:
    """A new zip file of stored and of deflated members.

    Parameters
    ----------
    path
        Of a file that does not exist.

    Attributes
    ----------
    size
        Bytes that were written so far.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._digest = blake3()
        self._buffer = bytearray()
        self._central = bytearray()
        self._members = 0
        self.size = 0

    def add_stored(self, name: str, views: Sequence[memoryview]) -> tuple[int, int]:
        """Add a member of these bytes, one view after the other; returns offset and length of the data."""
        crc = length = 0
        for view in views:
            crc = crc32(view, crc)
            length += view.nbytes
        self._begin(name, _STORED, crc, length, length)
        offset = self.size
        for view in views:
            self._write(view)
        return offset, length

    def add_deflated(self, name: str, data: bytes) -> None:
        """Add a member, compressed as well as zlib can."""
        # A window that is not much larger than the data costs a tenth of the time, and finds the same.
        window = min(max((len(data) + _LOOKAHEAD).bit_length(), 9), 15)
        deflate = zlib.compressobj(9, zlib.DEFLATED, -window)
        packed = deflate.compress(data) + deflate.flush()
        self._begin(name, _DEFLATED, crc32(data), len(packed), len(data))
        self._write(packed)

    def finish(self) -> str:
        """Write the directory; returns the first 20 bytes of the BLAKE3 of the file, in hexadecimal."""
        start = self.size
        self._write(self._central)
        length = self.size - start
        count = self._members
        if count > _MOST or start > _LIMIT or length > _LIMIT:
            end = self.size
            self._write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start))
            self._write(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        short = min(count, _MOST)
        self._write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, short, short, min(length, _FULL), min(start, _FULL), 0))
        self._flush()
        return self._digest.hexdigest(length=20)

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; without `finish` it is no zip file."""
        self._file.close()

    def _begin(self, name: str, method: int, crc: int, packed: int, size: int) -> None:
        """Write a member's header, and keep its entry of the directory."""
        path = name.encode("ascii")
        offset = self.size
        large = size > _LIMIT or packed > _LIMIT
        extra = struct.pack("<2H2Q", 1, 16, size, packed) if large else b""
        version = 45 if large else 20
        sizes = (_FULL, _FULL) if large else (packed, size)
        head = (method, 0, _DATE, crc, *sizes, len(path), len(extra))
        self._write(_LOCAL.pack(b"PK\3\4", version, 0, 0, *head) + path + extra)
        fields = [size, packed] if large else []
        if offset > _LIMIT:
            fields.append(offset)
        extra = struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
        version = 45 if fields else 20
        place = _FULL if offset > _LIMIT else offset
        head = (method, 0, _DATE, crc, *sizes, len(path), len(extra))
        self._central += _CENTRAL.pack(b"PK\1\2", version, _UNIX, version, 0, 0, *head, 0, 0, 0, _ATTRIBUTES, place)
        self._central += path + extra
        self._members += 1

    def _write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self.size += view.nbytes
        if view.nbytes < _BUFFERED:
            self._buffer += view
        if view.nbytes >= _BUFFERED or len(self._buffer) >= _BUFFERED:
            self._flush()
        if view.nbytes >= _BUFFERED:
            self._put(view)

    def _flush(self) -> None:
        if self._buffer:
            view, self._buffer = memoryview(self._buffer), bytearray()
            self._put(view)

    def _put(self, view: memoryview) -> None:
        self._digest.update(view)
        while view:
            view = view[self._file.write(view) :]
