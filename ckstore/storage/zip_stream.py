"""Writing a zip file from its beginning to its end, hashed on the way, and hashing a finished one.

The digest of a zip file is BLAKE3-20 of its bytes, with the data of each long member replaced by the BLAKE3 of these
alone: values that were hashed already are not hashed again.

Python's `zipfile` either seeks back to each header once the member's CRC is known, so that the file must be read again
to be hashed, or writes sizes after the members, 16 bytes each. Here the members are known before they are written. The
bytes equal those of `zipfile`, except for sizes and offsets from 2 to 4 GiB, which need no long fields.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from blake3 import blake3

from ckstore.runtime import forks
from ckstore.runtime.checksum import crc32
from ckstore.runtime.zip_records import (
    DEFLATED,
    FULL,
    LOCAL,
    LOCAL_MAGIC,
    STORED,
    Member,
    Style,
    directory,
    local_record,
    packed_size,
    read_local,
)
from ckstore.storage import durable

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Members from this number of bytes on are hashed apart.
_APART = 1 << 16
#: Bytes that are read at once.
_BLOCK = 1 << 22
#: Number of bytes up to which shorter pieces are buffered.
_BUFFERED = 1 << 16

#: Unix mode for the owner only, first of January 1980: files depend on nothing but their content.
_STYLE = Style(version=20, flags=0, date=1 << 5 | 1, system=3, attributes=0o600 << 16)
#: Size above which zlib's slowest level does not pay: it takes three times as long for 1 % fewer bytes.
_SMALL = 1 << 15
#: Bytes of its window that zlib cannot use.
_LOOKAHEAD = 262


class ZipStream:
    """A new zip file with stored and deflated members; `size` bytes are written."""

    def __init__(self, path: Path) -> None:
        self._file = durable.new_file(path, buffering=0)
        self._digest = blake3()
        self._buffer = bytearray()
        self._members: list[Member] = []
        self.size = 0

    def add_stored(
        self,
        name: str,
        views: Sequence[memoryview],
        *,
        align: int = 1,
        digest: bytes | None = None,
        crc: int | None = None,
    ) -> tuple[int, int]:
        """Add a member from the concatenated views; return offset and length of the data.

        The offset is a multiple of `align`. `digest` and `crc` are BLAKE3 and CRC-32 of the data, if they are known.
        """
        length = sum(view.nbytes for view in views)
        if crc is None:
            crc = 0
            for view in views:
                crc = crc32(view, crc)
        self._begin(name, STORED, crc, length, length, align)
        offset = self.size
        self._add_data(views, length, digest)
        return offset, length

    def add_deflated(self, name: str, data: bytes) -> None:
        """Add a member, compressed by zlib; the directory lists it before the others."""
        # A window not much larger than the data takes a tenth of the time, with the same result.
        window = min(max((len(data) + _LOOKAHEAD).bit_length(), 9), 15)
        deflate = zlib.compressobj(9 if len(data) <= _SMALL else 7, zlib.DEFLATED, -window)
        packed = deflate.compress(data) + deflate.flush()
        self._begin(name, DEFLATED, crc32(data), len(packed), len(data))
        self._members.insert(0, self._members.pop())
        self._add_data([memoryview(packed)], len(packed))

    def finish(self) -> str:
        """Write the directory; return the digest of the file."""
        self._add(directory(_STYLE, self._members, self.size))
        self._flush()
        return self._digest.hexdigest(length=20)

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; without `finish` it is not a valid zip file."""
        self._file.close()

    def _begin(self, name: str, method: int, crc: int, packed: int, size: int, align: int = 1) -> None:
        """Write a member's header, and keep its entry of the directory."""
        member = Member(name.encode("ascii"), method, crc, packed, size, self.size)
        self._add(local_record(_STYLE, member, align=align))
        self._members.append(member)

    def _add_data(self, views: Sequence[memoryview], length: int, digest: bytes | None = None) -> None:
        """Write the data of a member; `digest` is their BLAKE3, if it is known."""
        hasher = blake3() if length >= _APART else self._digest
        for view in views:
            if digest is None or hasher is self._digest:
                hasher.update(view)
            self._write(view)
        if hasher is not self._digest:
            self._digest.update(digest or hasher.digest())

    def _add(self, data: Buffer) -> None:
        self._digest.update(data)
        self._write(data)

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
        while view:
            view = view[self._file.write(view) :]


def digest_file(file: BinaryIO) -> str:
    """Return the digest of an open zip file, read from its beginning; empty for one that ends within a member.

    Any other bytes have a digest too. Different files have different ones: which members are hashed apart follows from
    the bytes before them.
    """
    # A forked child lacks the threads that its parent may have started, and would wait for them.
    threads = 1 if forks.generation() else blake3.AUTO
    digest = blake3(max_threads=threads)
    while record := file.read(LOCAL.size):
        digest.update(record)
        if len(record) < LOCAL.size or not record.startswith(LOCAL_MAGIC):
            break
        local = read_local(record)
        names = file.read(local.name_length + local.extra_length)
        digest.update(names)
        left = local.packed if local.packed != FULL else packed_size(names[local.name_length :])
        hasher = blake3(max_threads=threads) if left >= _APART else digest
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                return ""
            hasher.update(block)
            left -= len(block)
        if hasher is not digest:
            digest.update(hasher.digest())
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest(length=20)
