"""Brings a directory to a version in place: reads changes since the version that it has, writes values that differ."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ckstore.errors import CkstoreError, ConflictError, IntegrityError
from ckstore.following.changed_chunks import ChangedChunks, Stretch, stretches_of
from ckstore.following.marker import LOCK, MARKER, HeldFile, Marker, is_as_left
from ckstore.following.written_files import WrittenFiles, read_at
from ckstore.formats.skeleton import pieces
from ckstore.formats.sources import PERMISSIONS
from ckstore.objects.identity import MemberHasher
from ckstore.reading.checkout import chosen_entries, inside, write_entry
from ckstore.reading.stored_version import StoredVersion
from ckstore.runtime.local_path import leads_out
from ckstore.runtime.scratch import scratch
from ckstore.runtime.threads import batches, shared, worker_count
from ckstore.storage import durable

if TYPE_CHECKING:
    from ckstore.objects.records import Patches, Record

#: Bytes that a thread decodes at a time.
_GROUP = 1_000_000

#: Bytes of a file that are hashed at a time.
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Amounts:
    """Work of an update: bytes of the store that it needed, bytes that it wrote, and whether it mended files."""

    read: int
    written: int
    mended: bool


def update(
    version: StoredVersion,
    root: Path,
    before: Marker | None,
    include: Sequence[str] = (),
    *,
    compare_first: bool = False,
) -> tuple[Marker, Amounts]:
    """Bring a directory to a version, or to its files that match a glob; the caller holds its lock exclusively.

    With `compare_first`, a file changes in a copy, which replaces it once its digest is the version's.

    Repeating an interrupted update is harmless: files in doubt are compared by digests, and values are written.
    """
    with durable.write_explained(root, 1):
        return _Update(version, root, before, include, compare_first=compare_first).run()


class _Update:
    """One update of a directory, whose marker is `before`."""

    def __init__(
        self,
        version: StoredVersion,
        root: Path,
        before: Marker | None,
        include: Sequence[str],
        *,
        compare_first: bool,
    ) -> None:
        self._version = version
        self._document = version.document
        self._layout = version.layout
        self._root = root
        self._before = before
        self._written = 0
        self._digests: dict[int, str] = {}
        self._include = tuple(include)
        chosen = chosen_entries(version, include)
        self._files = {number: entry for number, entry in enumerate(self._document.files) if entry.path in chosen}
        self._links = {path: target for path, target in self._document.links if path in chosen}
        self._directories = [path for path, _ in self._document.directories if path in chosen]
        for path in [*(entry.path for entry in self._files.values()), *self._links, *self._directories]:
            if path.split("/")[0] in (MARKER, LOCK):
                raise ConflictError(
                    f"Version {version.row.number} holds {path}, since a followed directory was ingested; ingest that "
                    "directory without it."
                )
        version.contents.require_whole(self._files)
        self._changed = [number for number in self._files if not self._is_there(number)]
        self._in_place = {number for number in self._changed if not version.is_changed(number)}
        made = self._changed if compare_first else []
        self._copies = {number: durable.temporary_path(root) for number in made}

    def run(self) -> tuple[Marker, Amounts]:
        """Write all differences; return the marker of the complete version."""
        units = self._units()
        held = self._held(units)
        ways = self._version.ways_from({unit: held.get(unit) for unit in units})
        self._marker(None).write(self._root)
        durable.checkpoint("follow-started")
        self._remove_others()
        try:
            self._write_units(held, ways)
            mended = self._write_rest()
        finally:
            for copy in self._copies.values():
                copy.unlink(missing_ok=True)
        self._write_links()
        marker = self._marker({number: self._settle(number) for number in self._changed})
        paths = [*marker.files, *marker.links, *self._directories]
        for directory in {self._root / above for path in paths for above in Path(path).parents}:
            durable.sync_directory(directory)
        durable.checkpoint("follow-written")
        marker.write(self._root)
        needed = {record.id: record.nbytes for way in ways.values() for level in way for record in level}
        return marker, Amounts(sum(needed.values()), self._written, mended)

    def _is_there(self, number: int) -> bool:
        """Return whether the file is the version's, as far as its size and its time tell."""
        entry, before = self._files[number], self._before
        if before is None or not before.is_complete:
            return False
        held = before.files.get(entry.path)
        if held is None or not is_as_left(self._root / entry.path, held):
            return False
        if self._version.is_changed(number):
            return (before.id, before.fidelity) == (self._version.row.uid, self._version.fidelity)
        return held.blake3 == entry.blake3

    def _place(self, path: str) -> Path:
        """Return the place of an entry, which may be a link; refuse one outside the directory or behind a link."""
        above, _, name = path.rpartition("/")
        return (inside(self._root, above) if above else self._root) / name

    # Units: the bytes of files in the cut of the version's objects.

    def _units(self) -> list[int]:
        """Return the numbers of the units with bytes in files that change in place."""
        return [
            number
            for number, unit in enumerate(self._layout.units)
            if any(member.file in self._in_place for member in unit.members)
        ]

    def _held(self, units: Sequence[int]) -> dict[int, str]:
        """Return the ids of the objects that the directory holds at the places of units, if it holds one."""
        known = self._known()
        paths = [entry.path for entry in self._document.files]
        found, unknown = {}, []
        for number in units:
            unit = self._layout.units[number]
            stretches = stretches_of(self._version, number)
            key = unit.dtype, unit.chunk, *((paths[file], first, nbytes) for file, first, nbytes in stretches)
            if key in known:
                found[number] = known[key]
            else:
                unknown.append((number, stretches))
        with ExitStack() as stack:
            readable: dict[int, tuple[int, int]] = {}
            for file in {file for _, stretches in unknown for file, _, _ in stretches} & self._files.keys():
                with suppress(OSError, IntegrityError):
                    readable[file] = durable.open_file(inside(self._root, paths[file]))
                    stack.callback(os.close, readable[file][0])

            def hashed(item: tuple[int, list[Stretch]]) -> tuple[int, str | None]:
                number, stretches = item
                unit = self._layout.units[number]
                hasher = MemberHasher(unit.dtype, unit.chunk, [nbytes for _, _, nbytes in stretches])
                for file, first, nbytes in stretches:
                    descriptor, size = readable.get(file, (-1, 0))
                    if first + nbytes > size:
                        return number, None
                    data = bytearray(nbytes)
                    read_at(memoryview(data), [(descriptor, first, nbytes)])
                    hasher.update(memoryview(data))
                return number, hasher.identity()

            hashes = shared(hashed, unknown, worker_count())
            return found | {number: identity for number, identity in hashes if identity is not None}

    def _known(self) -> Mapping[tuple[object, ...], str]:
        """Return the ids of the objects of the version before by their bytes' places, in files as an update left them.

        They are known without reading the files.
        """
        before = self._before
        if before is None or not before.is_complete or before.fidelity != "exact":
            return {}
        repository = self._version.repository
        rows = repository.catalog.with_uid(before.id)
        if not rows or rows[0].fidelity != "exact":
            return {}
        version = StoredVersion(repository, rows[0])
        try:
            document, layout = version.document, version.layout
        except CkstoreError:  # It was forgotten in the meantime, or is damaged.
            return {}
        sound = [
            entry.path in before.files and is_as_left(self._root / entry.path, before.files[entry.path])
            for entry in document.files
        ]
        found = {}
        for number, unit in enumerate(layout.units):
            stretches = stretches_of(version, number)
            if all(sound[file] for file, _, _ in stretches):
                places = ((document.files[file].path, first, nbytes) for file, first, nbytes in stretches)
                found[unit.dtype, unit.chunk, *places] = document.objects[number]
        return found

    def _write_units(
        self, held: Mapping[int, str], ways: Mapping[int, tuple[Sequence[Patches], Sequence[Record]]]
    ) -> None:
        """Write the chunks that differ from the directory's, decoded against these."""
        with self._opened() as opened:
            chunks = ChangedChunks(self._version, opened, held, ways)
            files = WrittenFiles(opened, {number: self._files[number].size for number in self._in_place})

            def write(group: list[tuple[int, int]]) -> dict[int, int]:
                memory = scratch("followed", sum(map(chunks.nbytes, group)), np.uint8)
                parts = chunks.read(group, memory)
                return files.write(memory, [part for part in parts if part[0] in self._in_place])

            with closing(files):
                for written in shared(write, batches(chunks.numbers(), chunks.nbytes, _GROUP), worker_count()):
                    self._written += files.note(written)
                for number in self._in_place:
                    self._write_skeleton(number, files)
                self._digests = files.digests()

    def _write_skeleton(self, number: int, files: WrittenFiles) -> None:
        skeleton, position = np.frombuffer(self._version.skeleton(number), np.uint8), 0
        parts = []
        for piece in pieces(self._layout.files[number]):
            if piece.extent < 0:
                start, position = position, position + piece.stop - piece.start
                parts.append((number, piece.start, start, position))
        files.write(skeleton, parts)

    @contextmanager
    def _opened(self) -> Iterator[dict[int, int]]:
        """Open the version's files by number: also for writing, and in the new size, if they change in place."""
        with ExitStack() as stack:
            files: dict[int, int] = {}
            for number, entry in self._files.items():
                if number in self._changed and number not in self._in_place:
                    continue
                place = self._made_place(number)
                if number in self._copies:
                    with suppress(FileNotFoundError):
                        shutil.copyfile(place, self._copies[number])
                    place = self._copies[number]
                flags = os.O_RDWR | os.O_CREAT if number in self._in_place else os.O_RDONLY
                files[number] = os.open(place, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
                stack.callback(os.close, files[number])
                if number in self._in_place:
                    os.ftruncate(files[number], entry.size)
            yield files

    def _made_place(self, number: int) -> Path:
        """Return the place of a file in a directory that exists: of a file without another name, or of none."""
        place = self._place(self._files[number].path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            status = place.lstat()
            if number not in self._changed:
                return place
            if not stat.S_ISREG(status.st_mode):
                _remove(place)
            elif status.st_nlink > 1:
                copy = durable.temporary_path(place.parent)
                shutil.copyfile(place, copy)
                copy.replace(place)
            elif not status.st_mode & stat.S_IWUSR:
                place.chmod(status.st_mode | stat.S_IWUSR)
        return place

    # Files, links and the marker.

    def _write_rest(self) -> bool:
        """Write other files as a whole: coarse ones, and any that differ from the original after all.

        Return whether there were any of the latter: their bytes were taken for others.
        """
        mended = False
        for number in self._changed:
            entry, place = self._files[number], self._made_place(number)
            made = self._copies.get(number, place)
            if number not in self._in_place or self._digests[number] != entry.blake3:
                mended = mended or number in self._in_place
                made.unlink(missing_ok=True)
                write_entry(self._version, number, made)
                self._written += entry.size
            if made != place:
                made.replace(place)
        return mended

    def _settle(self, number: int) -> HeldFile:
        """Give a file its mode and time, make it durable, and return how it was left.

        Its owner may read and write it: the next update does.
        """
        entry = self._files[number]
        place = self._place(entry.path)
        if entry.mode is not None:
            place.chmod(entry.mode & PERMISSIONS | stat.S_IRUSR | stat.S_IWUSR)
        if entry.mtime_ns is not None:
            os.utime(place, ns=(entry.mtime_ns, entry.mtime_ns))
        with place.open("rb") as file:
            durable.sync_file(file.fileno())
        status = place.lstat()
        digest = entry.blake3 if number in self._in_place else _digest(place)
        return HeldFile(status.st_size, status.st_mtime_ns, digest)

    def _marker(self, settled: Mapping[int, HeldFile] | None) -> Marker:
        """Return the marker of the complete version, or without `settled` files that of the update."""
        before, row = self._before, self._version.row
        origin = None
        if before is not None and settled is None:
            origin = before.id if before.is_complete else before.origin
        held = {} if before is None else before.files
        links = set() if before is None or settled is not None else {*before.links}
        files = {
            entry.path: held[entry.path]
            if number not in self._changed
            else HeldFile(entry.size, 0, entry.blake3)
            if settled is None
            else settled[number]
            for number, entry in self._files.items()
        }
        return Marker(
            state="updating" if settled is None else "complete", id=row.uid, number=row.number, run=row.run,
            step=row.step, fidelity=self._version.fidelity, applied=None if before is None else before.applied,
            origin=origin, files={**held, **files} if settled is None else files,
            links=tuple(sorted(links | self._links.keys())), include=self._include,
        )  # fmt: skip

    def _remove_others(self) -> None:
        """Remove files and links of the version before that this one lacks, and directories that become empty."""
        before = self._before
        if before is None:
            return
        ours = {entry.path for entry in self._files.values()}
        kept = set(self._directories)
        for path in sorted({*before.files.keys() - ours, *(set(before.links) - self._links.keys())}):
            with suppress(FileNotFoundError, NotADirectoryError, IntegrityError):
                place = self._place(path)
                if not place.is_dir() or place.is_symlink():
                    place.unlink()
                for above in Path(path).parents[:-1]:
                    directory = inside(self._root, above.as_posix())
                    if above.as_posix() in kept or any(directory.iterdir()):
                        break
                    directory.rmdir()

    def _write_links(self) -> None:
        for path in self._directories:
            inside(self._root, path).mkdir(parents=True, exist_ok=True)
        for path, target in self._links.items():
            place = self._place(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_symlink() and os.readlink(place) == target:
                continue
            _remove(place)
            place.symlink_to(target)
        real_root = os.path.realpath(self._root)
        outside = [
            path for path, target in self._links.items() if leads_out(path, target, os.fspath(self._root), real_root)
        ]
        for path in outside:
            self._place(path).unlink()
        if outside:
            raise IntegrityError(f"The manifest's link {outside[0]!r} points outside the version; it was removed.")


def _remove(place: Path) -> None:
    """Remove a file, a link, or a directory without files, such as an empty one of the version before."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(place.lstat().st_mode):
            place.unlink()
            return
        for directory, _, _ in os.walk(place, topdown=False):
            os.rmdir(directory)


def _digest(place: Path) -> str:
    """Return the BLAKE3 of a file, with all cores."""
    hasher = blake3(max_threads=worker_count())
    with place.open("rb", buffering=0) as file:
        block = memoryview(bytearray(16 * _BLOCK))
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()
