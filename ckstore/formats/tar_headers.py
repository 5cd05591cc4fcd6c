"""Reads the headers of a tar archive, in the forms ustar, pax and GNU: the place of each file's data.

Only headers are read, not the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckstore.formats.layout import Source

#: Headers and the data of files begin at multiples of this many bytes.
BLOCK = 512
#: Maximal headers of an archive that is read.
MAX_HEADERS = 100_000
#: Maximal bytes of a long name, or of the records of a pax header.
_MAX_EXTENSION = 1 << 20

_FILES = (b"0", b"\0", b"7")
#: Links, devices, directories, and the label of a volume, which have no data.
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6", b"V")
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _PAX_OF_ALL = b"x", b"g"
_OCTAL = re.compile(rb"[0-7]{0,12}")
_RECORD = re.compile(rb"(\d{1,8}) ([^=\n]{1,256})=")
_ZEROS = bytes(BLOCK)


@dataclass(frozen=True, slots=True)
class TarEntry:
    """A file of an archive: its name without a leading `./`, and the place of its data."""

    name: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        """The offset after the last byte of the data."""
        return self.start + self.size


@dataclass(slots=True)
class TarHeaders:
    """The files of an archive in order, and the offset after the last block of data.

    If the archive is cut off or damaged, `problem` is the reason, and the last file may be cut off as well.
    """

    entries: list[TarEntry]
    stop: int
    problem: str = ""


class _UnreadableError(Exception):
    """The archive has a part that is not read, such as a sparse file."""


def starts_like_tar(head: bytes) -> bool:
    """Return whether a file begins like a tar archive."""
    return head[257:262] == b"ustar"


def read_headers(source: Source) -> TarHeaders | None:
    """Return the files of an archive.

    None for other files, and for archives with sparse files, parts of other volumes, a name twice, or too many headers.
    """
    try:
        found = _Reader(source).read()
    except _UnreadableError:
        return None
    names = {entry.name for entry in found.entries}
    return found if len(names) == len(found.entries) else None


class _Reader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._found = TarHeaders([], 0)
        self._name = b""
        self._pax: dict[bytes, bytes] = {}

    def read(self) -> TarHeaders:
        found, position = self._found, 0
        for _ in range(MAX_HEADERS):
            found.stop = min(position, self._source.size)
            if position + BLOCK > self._source.size:
                return self._broken("the archive is cut off before the zeros at its end")
            header = self._source.pread(position, BLOCK)
            if header == _ZEROS:
                return found
            if not _has_checksum(header):
                if position == 0:
                    raise _UnreadableError
                return self._broken(f"the header at byte {position} of the archive is damaged")
            start = position + BLOCK
            stop = self._follow(header, start)
            if stop > self._source.size:
                return found
            position = start + -(-(stop - start) // BLOCK) * BLOCK
        raise _UnreadableError

    def _broken(self, problem: str) -> TarHeaders:
        self._found.problem = problem
        return self._found

    def _follow(self, header: bytes, start: int) -> int:
        """Keep the contents of a header; return the offset after its data."""
        kind, size = header[156:157], _number(header[124:136])
        if kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL):
            self._extend(kind, start, size)
            return start + size
        size, name = self._own(size, header)
        if kind in _FILES:
            stop = min(start + size, self._source.size)
            self._found.entries.append(TarEntry(name, start, stop - start))
            if start + size > self._source.size:
                self._broken(f"the archive ends within {name}")
        elif kind not in _WITHOUT_DATA or size:
            raise _UnreadableError
        self._name, self._pax = b"", {}
        return start + size

    def _own(self, size: int, header: bytes) -> tuple[int, str]:
        """Return size and name of a file, with those of the extensions before its header."""
        if any(key.startswith(b"GNU.sparse") for key in self._pax):
            raise _UnreadableError
        if b"size" in self._pax:
            digits = self._pax[b"size"]
            if not digits.isdigit() or len(digits) > 18:
                raise _UnreadableError
            size = int(digits)
        name = self._pax.get(b"path", self._name) or _until_zero(header[:100])
        if header[257:263] == b"ustar\0" and header[345:346] != b"\0" and not (self._pax.get(b"path") or self._name):
            name = _until_zero(header[345:500]) + b"/" + name
        return size, name.removeprefix(b"./").decode("utf-8", "surrogateescape")

    def _extend(self, kind: bytes, start: int, size: int) -> None:
        if size > _MAX_EXTENSION or start + size > self._source.size:
            raise _UnreadableError
        data = self._source.pread(start, size)
        if kind == _LONG_NAME:
            self._name = _until_zero(data)
        elif kind == _PAX:
            self._pax = _records(data)
        elif kind == _PAX_OF_ALL and not _records(data).keys().isdisjoint((b"path", b"size")):
            raise _UnreadableError


def _records(data: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header: their length in decimal, a blank, the key, `=`, the value and a line end."""
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        record = _RECORD.match(data, position)
        stop = position + int(record[1]) if record else 0
        if record is None or not record.end() < stop <= len(data) or data[stop - 1 : stop] != b"\n":
            raise _UnreadableError
        found[record[2]] = data[record.end() : stop - 1]
        position = stop
    return found


def _number(field: bytes) -> int:
    """Return a size: octal digits, or after a first byte of 0x80 in binary."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = _until_zero(field).strip()
    if not _OCTAL.fullmatch(digits):  # A first byte of 0xFF makes the number negative.
        raise _UnreadableError
    return int(digits or b"0", 8)


def _has_checksum(header: bytes) -> bool:
    """Return whether the sum of a header's bytes, signed or not, is the one that it contains."""
    digits = _until_zero(header[148:156]).strip()
    if not digits or not _OCTAL.fullmatch(digits):
        return False
    summed = header[:148] + b" " * 8 + header[156:]
    total = sum(summed)
    return int(digits, 8) in (total, total - 256 * sum(byte > 127 for byte in summed))


def _until_zero(field: bytes) -> bytes:
    return field.partition(b"\0")[0]
