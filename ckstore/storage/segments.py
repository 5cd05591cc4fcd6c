"""Segments: files of many small packs, each a stored member of a zip under its own name."""

from __future__ import annotations

import io
import mmap
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from ckstore.errors import IntegrityError
from ckstore.runtime.zip_records import CENTRAL, CENTRAL_MAGIC, END, LOCAL, LOCAL_MAGIC, STORED, read_local
from ckstore.storage import durable, root
from ckstore.storage.zip_stream import ZipStream, digest_file

SUFFIX = ".segment.zip"
#: Packs of fewer bytes are joined, by this number at a time.
SMALL, COUNT = 1 << 18, 128

_NAME = re.compile(rf"[0-9a-f]{{40}}{re.escape(SUFFIX)}")
#: Length of the name of a pack in a segment: a digest and `.zip`.
_NAME_LENGTH = 44
#: A member's header with the name of a pack, wherever it is: the directory may be damaged.
_HEADER = re.compile(rb"(?s)PK\x03\x04.{26}([0-9a-f]{40}\.zip)")


class Place(NamedTuple):
    """The place of a pack: name of the segment, and the offset and number of its bytes there."""

    segment: str
    offset: int
    size: int


class Places(Protocol):
    """Knows which packs are in segments."""

    def segment_of(self, pack: str) -> Place | None:
        """Return the place of a pack in a segment; None if it has none."""

    def in_segments(self, names: Collection[str] | None = None) -> Mapping[str, Place]:
        """Return the places of packs in segments, by name; None asks for all."""


class FoundPlaces:
    """The packs in the segments of a directory, found without a catalog."""

    def __init__(self, store: Path) -> None:
        self._directory = store / root.PACKS
        self._places: dict[str, Place] = {}

    def segment_of(self, pack: str) -> Place | None:
        """Return the place of a pack in a segment; None if it has none."""
        return self._places.get(pack) or self.in_segments().get(pack)

    def in_segments(self, names: Collection[str] | None = None) -> Mapping[str, Place]:
        """Return the places of packs in segments, by name; of several places an intact one. Reads every segment."""
        self._places = {}
        for path in sorted(self._directory.glob(f"*{SUFFIX}")):
            # It may be damaged, or another process has joined its packs again.
            with suppress(FileNotFoundError, IntegrityError):
                if is_segment(path.name):
                    for name, place in members(path):
                        if name not in self._places or _holds(path, name, *place):
                            self._places[name] = Place(path.name, *place)
        return {name: place for name, place in self._places.items() if names is None or name in names}


def is_segment(name: str) -> bool:
    """Return whether a file's name is that of a segment."""
    return _NAME.fullmatch(name) is not None


def write(path: Path, packs: Iterable[tuple[str, bytes]]) -> tuple[str, dict[str, Place]]:
    """Write packs, given with their bytes, into a new file, durably; return its name and the places of the packs."""
    with durable.write_explained(path.parent, 0), closing(ZipStream(path)) as stream:
        places = {name: stream.add_stored(name, [memoryview(data)]) for name, data in packs}
        segment = stream.finish() + SUFFIX
        durable.sync_file(stream.fileno())
    return segment, {name: Place(segment, *place) for name, place in places.items()}


def members(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the packs in a segment, with the places of their bytes; damaged ones may be among them."""
    descriptor, size = durable.open_file(path)
    with open(descriptor, "rb") as file:
        if not size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 0
            while match := _HEADER.search(data, at):
                offset, length = _bytes_of(match[0], match.start(), size)
                if length < SMALL:
                    yield match[1].decode(), (offset, length)
                # A pack may hold the bytes of a header: it is searched only if its size may be damaged.
                after = offset + length
                at = after if data[after : after + 4] in (LOCAL_MAGIC, CENTRAL_MAGIC) else offset


def _bytes_of(header: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the place of a member's bytes, given its header at an offset of a file that has an end."""
    local = read_local(header)
    offset = start + LOCAL.size + local.name_length + local.extra_length
    return offset, max(min(local.packed, end - offset), 0)


def _holds(path: Path, pack: str, offset: int, size: int) -> bool:
    """Return whether a segment has a pack intact at an offset."""
    descriptor, _ = durable.open_file(path)
    with open(descriptor, "rb") as file:
        file.seek(offset)
        return is_pack(pack, file.read(size))


def check_header(header: bytes, pack: str, size: int) -> None:
    """Raise `IntegrityError` unless the bytes before a pack in a segment are its header."""
    local = read_local(header)
    named = header[LOCAL.size :] == pack.encode() and local.magic == LOCAL_MAGIC and local.method == STORED
    if not named or (local.packed, local.extra_length) != (size, 0):
        raise IntegrityError(f"Pack {pack} is not at its place in a segment; restore it from a copy, or recover.")


def is_pack(name: str, data: bytes) -> bool:
    """Return whether bytes are those of a pack of a name."""
    return name.startswith(digest_file(io.BytesIO(data)) or "-")


def size_of(packs: int, size: int) -> int:
    """Return the bytes of a segment with a number of packs that have this size in all."""
    return END.size + packs * (LOCAL.size + CENTRAL.size + 2 * _NAME_LENGTH) + size


def header_size(pack: str) -> int:
    """Return the number of bytes of a pack's header in a segment."""
    return LOCAL.size + len(pack)
