"""Random access to the bytes of a file: from disk, as a part of another, or reassembled from a skeleton."""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from operator import sub

from ckstore.errors import InputError
from ckstore.formats.layout import Source
from ckstore.runtime.access import DENIED, denied

#: The bits of a mode that are kept and restored. With set-user-id and the like, a store from someone else could create
#: a program that runs as another user.
PERMISSIONS = 0o777

#: Pieces that are copied one by one, at most: more are small.
_MANY = 64


class PartSource:
    """A stretch of a file as a file of its own."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self._size = size

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._size

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if there are fewer."""
        check_range(offset, length, self._size)
        return self._source.pread(self._start + offset, length)


class FileSource:
    """A regular file on disk, read with `pread` through one descriptor, never mapped.

    Anything else (directory, device, socket, FIFO) raises `InputError`. `size`, `mtime_ns` and `mode` are those at
    opening.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        # O_NONBLOCK: opening a FIFO must not wait for its writer.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            if error.errno in DENIED:
                raise InputError(str(denied(self.path, error))) from error
            raise InputError(f"{self.path} cannot be opened ({error.strerror}); name a file that can.") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise InputError(f"{self.path} is not a regular file; name a checkpoint file or directory.")
        self._identity = _identity(status)
        self._size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self.mode = status.st_mode & PERMISSIONS

    @property
    def size(self) -> int:
        """The size in bytes at opening."""
        return self._size

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if the file is shorter."""
        check_range(offset, length, self._size)
        parts: list[bytes] = []
        while length:
            part = os.pread(self._descriptor, length, offset)
            if not part:
                raise self._shorter()
            if len(part) == length and not parts:
                return part
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset` on; raise `InputError` if the file is shorter."""
        if not hasattr(os, "preadv"):
            target[:] = self.pread(offset, len(target))
            return
        check_range(offset, len(target), self._size)
        while target:
            taken = os.preadv(self._descriptor, [target], offset)
            if not taken:
                raise self._shorter()
            target = target[taken:]
            offset += taken

    def _shorter(self) -> InputError:
        return InputError(f"{self.path} became shorter while it was read; ingest it again when nothing writes to it.")

    def check_unchanged(self) -> None:
        """Raise `InputError` if size or mtime changed since opening, or another file has the path."""
        check_identity(self.path, self._identity)
        if _identity(os.fstat(self._descriptor)) != self._identity:
            raise _changed(self.path)

    def close(self) -> None:
        """Close the descriptor; closing twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # A thread that still reads keeps it open.
        # At the end of the process, this module's names may be deleted before the last file.
        if getattr(self, "_descriptor", -1) >= 0:
            close(self._descriptor)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CompositeSource:
    """A file reassembled from its skeleton and extents, which are (start, number of bytes), sorted and not overlapping.

    `read(extent, byte_offset, nbytes)` returns bytes of an extent; without it they are zeros. If it `is_still`, they
    are in memory and do not change, and may be used in place.
    """

    def __init__(
        self,
        skeleton: bytes,
        extents: Iterable[tuple[int, int]],
        size: int,
        read: Callable[[int, int, int], bytes | memoryview] | None = None,
        *,
        is_still: bool = False,
    ) -> None:
        self.is_still = is_still
        self._skeleton = skeleton
        self._size = size
        self._read = read or (lambda index, offset, nbytes: bytes(nbytes))
        #: The pieces of the file: their starts, and last its size; extent index (-1: skeleton); first byte there.
        pieces: list[int] = []
        position = taken = 0
        for index, (start, nbytes) in enumerate(extents):
            if start < position or nbytes < 0:
                raise InputError("The extents of a file overlap or are not sorted.")
            if start > position:
                pieces += position, -1, taken
                taken += start - position
            if nbytes:
                pieces += start, index, 0
            position = start + nbytes
        if position < size:
            pieces += position, -1, taken
            taken += size - position
        self._starts, self._owners, self._begins = [*pieces[::3], size], pieces[1::3], pieces[2::3]
        if taken != len(skeleton) or position > size:
            raise InputError("A skeleton and its extents do not add up to the size of the file.")

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._size

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if the file is shorter."""
        place = bisect_right(self._starts, offset) - 1
        # Mostly a header, a part of one piece of the skeleton.
        if 0 <= place < len(self._owners) and self._owners[place] < 0 < length <= self._starts[place + 1] - offset:
            begin = self._begins[place] + offset - self._starts[place]
            return self._skeleton[begin : begin + length]
        return b"".join(map(self._part, self._cut(offset, length)))

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset` on; raise `InputError` if the file is shorter."""
        pieces = self._cut(offset, len(target))
        if len(pieces) > _MANY:
            target[:] = b"".join(map(self._part, pieces))
            return
        for part in map(self._part, pieces):
            target[: len(part)] = part
            target = target[len(part) :]

    def view(self, offset: int, length: int) -> memoryview:
        """Return bytes of one extent, in place."""
        (piece,) = self._cut(offset, length)
        return memoryview(self._part(piece))

    def check_unchanged(self) -> None:
        """Do nothing: its bytes do not change."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _cut(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """Return the pieces of a stretch of the file."""
        check_range(offset, length, self._size)
        if not length:
            return []
        stop = offset + length
        first, last = bisect_right(self._starts, offset) - 1, bisect_left(self._starts, stop)
        lengths = map(sub, self._starts[first + 1 : last + 1], self._starts[first:last])
        found = list(zip(self._owners[first:last], self._begins[first:last], lengths, strict=True))
        found[-1] = (*found[-1][:2], stop - self._starts[last - 1])
        index, begin, nbytes = found[0]
        skipped = offset - self._starts[first]
        found[0] = index, begin + skipped, nbytes - skipped
        return found

    def _part(self, piece: tuple[int, int, int]) -> bytes | memoryview:
        index, begin, nbytes = piece
        return self._skeleton[begin : begin + nbytes] if index < 0 else self._read(index, begin, nbytes)


def check_range(offset: int, length: int, size: int) -> None:
    """Raise `InputError` unless `offset` and `length` lie within `size` bytes."""
    if offset < 0 or length < 0 or offset + length > size:
        raise InputError(f"bytes {offset} to {offset + length} were asked for, but the file ends at {size}")


def file_identity(path: str) -> tuple[int, int, int, int]:
    """Return device, inode, size and mtime of a file; raise `InputError` if the path is gone."""
    try:
        return _identity(os.stat(path))
    except OSError as error:
        raise InputError(f"{path} vanished while it was read; ingest it again when nothing writes to it.") from error


def check_identity(path: str, expected: tuple[int, int, int, int]) -> None:
    """Raise `InputError` if `file_identity` has changed."""
    if file_identity(path) != expected:
        raise _changed(path)


def _changed(path: str) -> InputError:
    return InputError(f"{path} changed while it was read; ingest it again when nothing writes to it.")


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
