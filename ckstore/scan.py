"""Reads what is to be ingested: parses every file, and hashes each byte once in file order.

Objects are read a second time when they are coded, one after the other; they are then compared with the digests taken
here, so that a file that changes in between is refused and never stored half old, half new. That keeps memory bounded
whatever the order and number of the tensors in a file, and objects that the store holds already are not read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from blake3 import blake3

from ckstore.codecs.lattice import PARTS, Bits
from ckstore.errors import InputError
from ckstore.formats import parse, parse_opaque
from ckstore.formats.layout import ITEM_SIZES, FileLayout, Source
from ckstore.formats.skeleton import Checks, fill_crcs, pieces, stored_crcs
from ckstore.hashing import StreamSha256
from ckstore.inputs import InputFile, OpenFiles
from ckstore.records import content_id
from ckstore.units import Member, Unit, plan_units

#: Bytes that are read at once.
_BLOCK = 4 << 20

Progress = Callable[[int], None]


class Readable(Source, Protocol):
    """A source that can say whether it changed since it was opened."""

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
    """

    files: list[ScannedFile]
    links: list[tuple[str, str]] = field(default_factory=list)
    directories: list[tuple[str, int]] = field(default_factory=list)
    is_directory: bool = False
    units: list[Unit] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)

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
    version.units = plan_units([(version.prefix(file), file.layout) for file in version.files])
    for number, file in enumerate(version.files):
        try:
            _hash_file(file, _stretches(version.units, number), progress)
        except _CrcMismatch as mismatch:
            if not force:
                raise InputError(
                    f"{file.path} is damaged: entry {mismatch.name} does not match its CRC-32; get the file again, "
                    "or store it as opaque bytes with --force."
                ) from None
            file.layout = parse_opaque(file.source)
            file.digests.clear()
            hash_version(version, force=force, progress=None)
            return
    version.contents = [_content_id(version, unit) for unit in version.units]


class _CrcMismatch(Exception):  # noqa: N818 - a signal between two functions of this module, not an error of its own
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _stretches(units: Sequence[Unit], number: int) -> dict[int, list[Member]]:
    stretches: dict[int, list[Member]] = {}
    for unit in units:
        for member in unit.members:
            if member.file == number:
                stretches.setdefault(member.extent, []).append(member)
    for members in stretches.values():
        members.sort(key=lambda member: member.first)
    return stretches


def _hash_file(file: ScannedFile, stretches: dict[int, list[Member]], progress: Progress | None) -> None:
    layout = file.layout
    checks = Checks(layout)
    skeleton = bytearray()
    cuts = _cuts(layout, stretches)
    extent, member, stop = next(cuts, (-1, None, layout.size))
    hasher = blake3()
    with StreamSha256() as sha:
        for start in range(0, layout.size, _BLOCK):
            block = file.source.pread(start, min(_BLOCK, layout.size - start))
            sha.update(block)
            checks.update(start, block)
            view = memoryview(block)
            while view:
                part = view[: stop - start]
                if member is None:
                    skeleton += part
                else:
                    hasher.update(part)
                view = view[len(part) :]
                start += len(part)
                if start == stop:
                    if member is not None:
                        file.digests[extent, member.first] = hasher.digest()
                        hasher = blake3()
                    extent, member, stop = next(cuts, (-1, None, layout.size))
            if progress is not None:
                progress(len(block))
        file.sha256 = sha.hexdigest()
    file.crcs = stored_crcs(file.source, layout)
    for checked, expected, found in zip(layout.checked, file.crcs, checks.results, strict=True):
        if expected != found:
            raise _CrcMismatch(checked.name)
    file.skeleton = fill_crcs(bytes(skeleton), layout, [0] * len(file.crcs))
    file.source.check_unchanged()


def _cuts(layout: FileLayout, stretches: dict[int, list[Member]]) -> Iterator[tuple[int, Member | None, int]]:
    """The file cut into (extent, stretch of it, end) and (-1, None, end) for the skeleton, in order."""
    for piece in pieces(layout):
        if piece.extent < 0:
            yield -1, None, piece.stop
            continue
        size = ITEM_SIZES[layout.extents[piece.extent].dtype]
        for member in stretches.get(piece.extent, []):
            yield piece.extent, member, piece.start + (member.first + member.count) * size


def _content_id(version: ScannedVersion, unit: Unit) -> str:
    digests = [version.files[member.file].digests[member.extent, member.first] for member in unit.members]
    return content_id(unit.dtype, unit.chunk, digests)


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
