"""A version before its ingest: its files, their layouts, its objects and their ids."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from blake3 import blake3

from ckstore.codecs.lattice import PARTS, Bits
from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.layout import FileLayout, Path, Source
from ckstore.objects.continuation import Cut
from ckstore.objects.units import Member, Unit
from ckstore.runtime.blocks import aligned
from ckstore.runtime.checksum import crc32


class Readable(Source, Protocol):
    """A source that detects changes since it was opened."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on."""

    def check_unchanged(self) -> None:
        """Raise `InputError` if it changed."""

    def close(self) -> None:
        """Release the source."""


@dataclass(slots=True)
class ScannedFile:
    """One file of a version, at a path in its directory with slashes; alone, at its own name.

    `mode` and `mtime_ns` are None for a version without files. Once the file is hashed, `blake3` is that of the whole
    file; `skeleton` has the bytes outside of extents, with stored CRCs as zeros; `crcs` those of `layout.checked`;
    `digests` those of the stretches of units, by extent and first element; so are `checksums`, of a file in which no
    object was held.
    """

    path: str
    source: Readable
    layout: FileLayout
    mode: int | None = None
    mtime_ns: int | None = None
    blake3: str = ""
    skeleton: bytes = b""
    crcs: list[int] = field(default_factory=list)
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    checksums: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass(slots=True)
class ScannedVersion:
    """The contents of a future version.

    Its links are (path, target), its directories (path, mode). `contents` are the content ids of the units, known with
    all digests once `is_hashed`. `held` has the values of units that are in memory, by their first members: keys may be
    equal. `name` is its origin as text, empty for a state dict; `step` comes from the contents of the files, or else
    from the name; `unused` is a sentence on a number there that is no step. `cuts_before` are of the parent: the size
    of each opaque extent in parts, and their first bytes, by the prefix of the file and the path of the extent.
    `continued` returns the units that continue the parent's, as `objects.continuation`, in place of the ones
    `alone` without it.
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
    cuts_before: Mapping[tuple[str, Path], tuple[int, Sequence[int]]] = field(default_factory=dict)
    alone: list[Unit] = field(default_factory=list)
    continued: Callable[[Cut, Container[tuple[int, int]]], list[Unit]] | None = None
    unused: str = ""

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.layout.size for file in self.files)

    @property
    def layouts(self) -> list[FileLayout]:
        """The layouts of the files."""
        return [file.layout for file in self.files]

    def close(self) -> None:
        """Close all files."""
        for file in self.files:
            file.source.close()

    def settle(self) -> None:
        """Raise `InputError` if a file changed since it was opened; release the values in memory."""
        for file in self.files:
            file.source.check_unchanged()
        self.held.clear()

    @property
    def cut(self) -> Cut:
        """The files and the units."""
        return Cut([(self.prefix(file), file.layout) for file in self.files], self.units)

    def prefix(self, file: ScannedFile) -> str:
        """Return the prefix of the typed paths of a file's tensors in this version's units."""
        return f"{file.path}/" if self.is_directory else ""

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Return the bits of the elements from `first` to before `last` of a unit: unsigned, aligned, read-only."""
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
        return aligned(np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), f"u{size}"))

    def digest(self, unit: Unit) -> bytes | None:
        """Return the BLAKE3 of a hashed unit's bytes; None for a unit of several members."""
        first, *others = unit.members
        return None if others else self.files[first.file].digests[first.extent, first.first]

    def checked(self, unit: Unit, *, rounded: bool = False) -> Callable[[int, int], Bits]:
        """Return a reader of a unit; raise `InputError` as `check` does."""
        whole = self.whole(unit, rounded=rounded)
        return lambda first, last: whole[first:last]

    def whole(self, unit: Unit, *, rounded: bool = False) -> Bits:
        """Return the bits of all elements of a unit; raise `InputError` as `check` does."""
        bits = self.read(unit, 0, unit.count)
        self.check(unit, bits, rounded=rounded)
        return bits

    def check(self, unit: Unit, bits: Bits, *, rounded: bool = False) -> None:
        """Raise `InputError` unless the unit's bytes are the hashed ones, by CRC-32 if they are `rounded`."""
        if unit.members[0] in self.held:
            return  # These very bytes were hashed.
        data = memoryview(bits).cast("B")
        position = 0
        for member in unit.members:
            file = self.files[member.file]
            nbytes = member.count * ITEM_SIZES[file.layout.extents[member.extent].dtype]
            part, key = data[position : position + nbytes], (member.extent, member.first)
            known = file.checksums.get(key) if rounded else None
            if blake3(part).digest() != file.digests[key] if known is None else crc32(part) != known:
                raise InputError(f"{file.path} changed while it was read; ingest it again when nothing writes to it.")
            position += nbytes
