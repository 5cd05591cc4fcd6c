"""Reads what is to be ingested: parses every file, and hashes each byte once in file order.

An exact ingest codes objects while their bytes are still at hand. Those that are read a second time (all of a coarse
version, which is planned as a whole, and bundles whose members lie far apart) are compared with the digests taken here,
so that a file that changes in between is refused and never stored half old, half new. Memory stays bounded whatever the
order and number of the tensors in a file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from ckstore.codecs.lattice import PARTS, Bits
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats import parse, parse_opaque
from ckstore.formats.layout import FileLayout, Source
from ckstore.formats.skeleton import Checks, fill_crcs, pieces, stored_crcs
from ckstore.formats.torch.state_dict import StateDictSource
from ckstore.objects.identity import content_id
from ckstore.objects.units import Member, Unit, plan_units
from ckstore.runtime.sha256 import StreamSha256
from ckstore.scanning.files import InputFile, OpenFiles

#: Bytes that are read at once.
BLOCK = 4 << 20

#: Blocks whose memory takes turns, so that some may wait for SHA-256.
_BLOCKS = 6

#: Objects are estimated, planned and encoded in windows of about this many bytes.
WINDOW = 32 << 20

#: Windows in memory.
_WINDOWS = 3

#: Where objects begin in memory: NumPy wants its items aligned, and the processor its cache lines.
_ALIGNMENT = 64

Progress = Callable[[int], None]


class Readable(Source, Protocol):
    """A source that can say whether it changed since it was opened."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on."""

    def check_unchanged(self) -> None:
        """Raise `InputError` where it did."""

    def close(self) -> None:
        """Give the source up."""


@dataclass(slots=True)
class ScannedFile:
    """One file of a version.

    Attributes
    ----------
    path
        Relative to the version's directory, with slashes; the file's own name for a version of one file.
    source, layout
        Its bytes and how they are cut.
    mode, mtime_ns
        Permissions and modification time; None for what never was a file.
    sha256
        Of the whole file, hexadecimal.
    skeleton
        Bytes outside of extents, stored CRCs as zeros.
    crcs
        CRC-32 of each of `layout.checked`.
    digests
        For each extent the digests of its stretches, by first element.
    """

    path: str
    source: Readable
    layout: FileLayout
    mode: int | None = None
    mtime_ns: int | None = None
    sha256: str = ""
    skeleton: bytes = b""
    crcs: list[int] = field(default_factory=list)
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)


@dataclass(slots=True)
class ScannedVersion:
    """Everything that will be one version.

    Attributes
    ----------
    files
        Regular files.
    links, directories
        Symbolic links as (path, target), and directories as (path, mode).
    is_directory
        The version is a directory tree, not one file.
    units, contents
        The objects and their content ids, in the same order.
    is_hashed
        All content ids and digests are known.
    held
        Values of units that are in memory, by their first members: keys need not differ.
    name
        Where it comes from, as text; empty for a state dict.
    step
        The step that the files, or else the name, tell.
    """

    files: list[ScannedFile]
    links: list[tuple[str, str]] = field(default_factory=list)
    directories: list[tuple[str, int]] = field(default_factory=list)
    is_directory: bool = False
    units: list[Unit] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    is_hashed: bool = False
    held: dict[Member, Bits] = field(default_factory=dict)
    name: str = ""
    step: int | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.layout.size for file in self.files)

    @property
    def layouts(self) -> list[FileLayout]:
        """How the files are cut."""
        return [file.layout for file in self.files]

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.source.close()

    def prefix(self, file: ScannedFile) -> str:
        """What the typed paths of a file's tensors begin with in this version's units."""
        return f"{file.path}/" if self.is_directory else ""

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Bits of the elements from `first` to before `last` of a unit, as unsigned integers; read-only."""
        held = self.held.get(unit.members[0])
        if held is not None:
            return held[first:last]
        size = ITEM_SIZES[unit.dtype]
        parts = []
        position = 0
        for member in unit.members:
            extent = self.files[member.file].layout.extents[member.extent]
            scale = 2 if extent.dtype in PARTS else 1
            count = member.count * scale
            low, high = max(first, position), min(last, position + count)
            if low < high:
                offset = extent.start + (member.first * scale + low - position) * size
                parts.append(self.files[member.file].source.pread(offset, (high - low) * size))
            position += count
            if position >= last:
                break
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), f"u{size}")

    def check(self, unit: Unit, bits: Bits) -> None:
        """Raise `InputError` where the unit's bytes are not those that were hashed."""
        if unit.members[0] in self.held:
            return  # These very bytes were.
        data = memoryview(bits).cast("B")
        position = 0
        for member in unit.members:
            file = self.files[member.file]
            nbytes = member.count * ITEM_SIZES[file.layout.extents[member.extent].dtype]
            if blake3(data[position : position + nbytes]).digest() != file.digests[member.extent, member.first]:
                raise InputError(f"{file.path} changed while it was read; ingest it again when nothing writes to it.")
            position += nbytes


def open_file(path: Path, *, force: bool) -> ScannedFile:
    """Parse one file that is a checkpoint by itself."""
    try:
        path.name.encode("utf-8")
    except UnicodeEncodeError:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise InputError(f"The name {shown} is not UTF-8; rename it, then ingest again.") from None
    source = InputFile(path, OpenFiles())
    layout = _parse(source, path.name, force=force, lone=True)
    return ScannedFile(path.name, source, layout, source.mode, source.mtime_ns)


def open_directory(path: Path, *, force: bool) -> ScannedVersion:
    """Parse all files of a directory tree."""
    from ckstore.formats.directory import require_checkpoint, scan

    version = ScannedVersion([], is_directory=True)
    entries = scan(path)
    opened = OpenFiles()
    for entry in entries:
        if entry.kind == "symlink":
            version.links.append((entry.path, entry.target or ""))
        elif entry.kind == "directory":
            version.directories.append((entry.path, entry.mode))
        else:
            source = InputFile(path / entry.path, opened)
            layout = _parse(source, entry.path, force=force, lone=False)
            version.files.append(ScannedFile(entry.path, source, layout, source.mode, source.mtime_ns))
    if not any(file.layout.tensors for file in version.files):
        require_checkpoint(path, entries)
    return version


def _parse(source: InputFile, name: str, *, force: bool, lone: bool) -> FileLayout:
    try:
        return parse(source, name, lone=lone)
    except InputError:
        if not force or source.size == 0:
            raise
        return parse_opaque(source)


def hash_version(version: ScannedVersion, *, force: bool, progress: Progress | None = None) -> None:
    """Read every byte once: fill in digests, skeletons, CRCs, units and content ids.

    Raises
    ------
    InputError
        A CRC in a file does not agree with its bytes (unless `force`, which stores that file as opaque bytes).
    """
    while True:
        reading = Reading(version, progress)
        try:
            for _ in reading.windows(hold=False):
                pass
        except _CrcMismatch as mismatch:
            if not force:
                raise mismatch.refusal() from None
            mismatch.file.layout = parse_opaque(mismatch.file.source)
            mismatch.file.digests.clear()
            progress = None
            continue
        version.is_hashed = True
        return


def held_windows(version: ScannedVersion, progress: Progress | None = None) -> Generator[list[int], None, None]:
    """Read every byte once, and hand objects out while their bytes are at hand; units are planned at once.

    Yields
    ------
    list of int
        Numbers of units whose content ids are known. `version.read` takes them from memory until the third window
        after this one is asked for (one is being read, one estimated, one coded); what came in too many pieces to be
        kept, it reads again.

    Raises
    ------
    InputError
        A CRC in a file does not agree with its bytes.
    """
    reading = Reading(version, progress)

    def windows() -> Generator[list[int], None, None]:
        try:
            yield from reading.windows(hold=True)
        except _CrcMismatch as mismatch:
            raise mismatch.refusal() from None
        version.is_hashed = True

    return windows()


class _CrcMismatch(Exception):  # noqa: N818 - a signal between functions of this module, not an error of its own
    def __init__(self, file: ScannedFile, name: str) -> None:
        super().__init__(name)
        self.file = file
        self.name = name

    def refusal(self) -> InputError:
        return InputError(
            f"{self.file.path} is damaged: entry {self.name} does not match its CRC-32; get the file again, "
            "or store it as opaque bytes with --force."
        )


class Reading:
    """One pass over the files of a version, in order.

    Parameters
    ----------
    version
        Gets its units, content ids and the facts of its files.
    progress
        Called with numbers of bytes that were read.
    """

    def __init__(self, version: ScannedVersion, progress: Progress | None) -> None:
        self._version = version
        self._progress = progress
        version.units = plan_units([(version.prefix(file), file.layout) for file in version.files])
        version.contents = [""] * len(version.units)
        #: Unit, and first byte in it, of each stretch of an extent.
        self._places: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int], list[Member]] = {}
        self._missing = [len(unit.members) for unit in version.units]
        for number, unit in enumerate(version.units):
            position = 0
            for member, nbytes in zip(unit.members, unit.member_bytes, strict=True):
                self._places[member.file, member.extent, member.first] = number, position
                self._stretches.setdefault((member.file, member.extent), []).append(member)
                position += nbytes
        for members in self._stretches.values():
            members.sort(key=lambda member: member.first)
        self._blocks = [np.empty(BLOCK, np.uint8) for _ in range(_BLOCKS)]

    def windows(self, *, hold: bool) -> Iterator[list[int]]:
        """Units whose last byte was read, in windows of about `WINDOW` bytes."""
        held = _Held(self._version) if hold else None
        for file in range(len(self._version.files)):
            yield from self._read_file(file, held)
        if held is not None:
            yield from held.rest()

    def _read_file(self, number: int, held: _Held | None) -> Iterator[list[int]]:
        file = self._version.files[number]
        layout = file.layout
        # What a state dict in memory would be has the checksums that fit.
        checks = None if isinstance(file.source, StateDictSource) else Checks(layout)
        skeleton = bytearray()
        cuts = _cuts(layout, number, self._stretches)
        extent, member, stop = next(cuts, (-1, None, layout.size))
        hasher = blake3()
        target = None
        if member is not None and held is not None:
            target = yield from held.target(*self._places[number, extent, member.first])
        with StreamSha256() as sha:
            for index, start in enumerate(range(0, layout.size, BLOCK)):
                sha.wait(_BLOCKS - 1)  # Nothing waits any more for what this block's memory held.
                view = self._blocks[index % _BLOCKS].data[: min(BLOCK, layout.size - start)]
                file.source.read_into(start, view)
                sha.update(view)
                if checks is not None:
                    checks.update(start, view)
                if self._progress is not None:
                    self._progress(len(view))
                while view:
                    part = view[: stop - start]
                    if member is None:
                        skeleton += part
                    else:
                        hasher.update(part)
                    if target is not None:
                        target[: len(part)] = np.frombuffer(part, np.uint8)
                        target = target[len(part) :]
                    view = view[len(part) :]
                    start += len(part)
                    if start == stop:
                        if member is not None:
                            file.digests[extent, member.first] = hasher.digest()
                            hasher = blake3()
                            arrived = self._arrived(number, member)
                            if held is not None and arrived is not None:
                                held.arrived(arrived)
                        extent, member, stop = next(cuts, (-1, None, layout.size))
                        target = None
                        if member is not None and held is not None:
                            target = yield from held.target(*self._places[number, extent, member.first])
            file.sha256 = sha.hexdigest()
        file.crcs = stored_crcs(file.source, layout)
        if checks is not None:
            for checked, expected, found in zip(layout.checked, file.crcs, checks.results, strict=True):
                if expected != found:
                    raise _CrcMismatch(file, checked.name)
        file.skeleton = fill_crcs(bytes(skeleton), layout, [0] * len(file.crcs))
        file.source.check_unchanged()

    def _arrived(self, file: int, member: Member) -> int | None:
        """Take note that a stretch was hashed; the number of its unit where that is complete now."""
        version = self._version
        number, _ = self._places[file, member.extent, member.first]
        self._missing[number] -= 1
        if self._missing[number]:
            return None
        unit = version.units[number]
        digests = [version.files[one.file].digests[one.extent, one.first] for one in unit.members]
        version.contents[number] = content_id(unit.dtype, unit.chunk, digests)
        return number


class _Held:
    """The bytes of objects that are being read and coded: some windows, and bundles that are not complete yet."""

    def __init__(self, version: ScannedVersion) -> None:
        self._version = version
        self._arenas = deque(np.empty(WINDOW, np.uint8) for _ in range(_WINDOWS))
        self._used = 0
        self._window: list[int] = []
        self._filled = 0
        #: Windows that were handed out and may still be used.
        self._before: deque[list[int]] = deque()
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}
        self._waiting = 0
        self._late: dict[int, None] = {}

    def target(self, number: int, position: int) -> Generator[list[int], None, npt.NDArray[np.uint8] | None]:
        """Where the bytes of a unit from `position` on go; None where they are not kept.

        Yields a window where the unit has no room beside what is held.
        """
        buffer = self._buffers.get(number)
        if buffer is None and number not in self._late:
            unit = self._version.units[number]
            nbytes = unit.nbytes
            if self._filled and self._filled + nbytes > WINDOW:
                yield from self._close()
            if len(unit.members) > 1:
                if self._waiting + nbytes > WINDOW:
                    self._late[number] = None
                    return None
                self._waiting += nbytes
                buffer = np.empty(nbytes, np.uint8)
            else:
                if self._used + nbytes <= WINDOW:
                    buffer = self._arenas[0][self._used : self._used + nbytes]
                    self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                else:
                    buffer = np.empty(nbytes, np.uint8)
            self._buffers[number] = buffer
        return None if buffer is None else buffer[position:]

    def arrived(self, number: int) -> None:
        """Take note that all bytes of a unit were read."""
        buffer = self._buffers.pop(number, None)
        if buffer is None:
            return
        unit = self._version.units[number]
        if len(unit.members) > 1:
            self._waiting -= unit.nbytes
        buffer.flags.writeable = False
        self._version.held[unit.members[0]] = buffer.view(f"u{ITEM_SIZES[unit.dtype]}")
        self._window.append(number)
        self._filled += unit.nbytes

    def rest(self) -> Iterator[list[int]]:
        """The last window, and windows of what was not kept."""
        if self._window:
            yield from self._close()
        for number in self._late:
            self._window.append(number)
            self._filled += self._version.units[number].nbytes
            if self._filled >= WINDOW:
                yield from self._close()
        if self._window:
            yield from self._close()

    def _close(self) -> Iterator[list[int]]:
        """Yield the units that have come; whoever asks for more has coded the oldest, whose memory is free again."""
        self._before.append(self._window)
        self._window, self._filled, self._used = [], 0, 0
        self._arenas.rotate()
        yield self._before[-1]
        if len(self._before) == _WINDOWS:
            for number in self._before.popleft():
                self._version.held.pop(self._version.units[number].members[0], None)


def _cuts(
    layout: FileLayout, file: int, stretches: dict[tuple[int, int], list[Member]]
) -> Iterator[tuple[int, Member | None, int]]:
    """The file cut into (extent, stretch of it, end) and (-1, None, end) for the skeleton, in order."""
    for piece in pieces(layout):
        if piece.extent < 0:
            yield -1, None, piece.stop
            continue
        size = ITEM_SIZES[layout.extents[piece.extent].dtype]
        for member in stretches.get((file, piece.extent), []):
            yield piece.extent, member, piece.start + (member.first + member.count) * size


def tree_size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    if path.is_dir():
        return sum(entry.stat().st_size for entry in _walk(path))
    return path.stat().st_size


def _walk(path: Path) -> Iterator[os.DirEntry[str]]:
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry
