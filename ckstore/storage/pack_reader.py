"""Reading packs: positioned reads through a bounded cache of open files, the zip directory, and shard indexes."""

from __future__ import annotations

import io
import mmap
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from ckstore.errors import AccessError, CkstoreError, IntegrityError
from ckstore.runtime import forks
from ckstore.runtime.access import access_explained
from ckstore.runtime.checksum import crc32c
from ckstore.runtime.lru import Lru
from ckstore.runtime.zip_records import (
    CENTRAL,
    CENTRAL_MAGIC,
    END,
    END_MAGIC,
    FULL,
    LOCAL,
    LOCAL_MAGIC,
    STORED,
    read_central,
    read_local,
)
from ckstore.storage import durable, root
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.interface import Storage
from ckstore.storage.pack import PackEntry, PackInfo, parse_pack_name
from ckstore.storage.schema import Plain, decode, fields
from ckstore.storage.segments import SUFFIX, FoundPlaces, Place, Places, check_header, header_size, is_segment, members
from ckstore.storage.zip_stream import digest_file

#: Prefix of the names of packs.
PREFIX = f"{root.PACKS}/"
_ABSENT = 2**64 - 1
_TAIL = 1024
#: Largest metadata of a pack's arrays: they include exponents of millions of rows.
_LARGEST_METADATA = 1 << 26
#: Type of a pack's Zarr metadata.
_GROUP = fields({"consolidated_metadata": fields({"metadata": Plain})})
#: Errors of an unreadable zip.
_UNREADABLE = (KeyError, ValueError, NotImplementedError, MemoryError, zipfile.BadZipFile, struct.error)
# pread(2) returns at most 2^31 - 4096 bytes on Linux.
_LARGEST_READ = 1 << 30
#: Size of the reads of `zipfile`.
_BUFFER = 1 << 16
#: Packs that are checked concurrently.
_READS = 8
#: Looks for a pack in segments, which may be replaced in between.
_LOOKS = 4

#: Packs that stay open where a process may have fewer files open than usual, and elsewhere. A chain of a coarse version
#: has up to two dozen, and more packs than stay open are opened for each object again.
_FEW, _MANY = 10, 32

#: Files that a process may have open on most clusters.
_USUAL = 1024


class MissingPackError(IntegrityError):
    """A pack is missing: it was lost, or `gc` has replaced it."""


class OpenPack(Protocol):
    """A pack open for reading."""

    @property
    def size(self) -> int:
        """Its size in bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on; none after the end."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill a part of `target` from `offset` on; return the number of bytes."""


class OpenFile:
    """A file descriptor that is closed with its last reference, so that no reading thread loses it."""

    __slots__ = ("descriptor", "size")

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor, self.size = durable.open_file(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the process, this module's names may be deleted before the last file.
        if self.descriptor >= 0:
            close(self.descriptor)

    def is_at(self, path: Path) -> bool:
        """Return whether it is the file at a path, of the same size as when it was opened."""
        found = os.stat(path)
        return os.path.samestat(os.fstat(self.descriptor), found) and found.st_size == self.size

    def pread(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on."""
        return os.pread(self.descriptor, min(length, _LARGEST_READ), offset)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill a part of `target` from `offset` on."""
        if not hasattr(os, "preadv"):
            data = self.pread(offset, len(target))
            target[: len(data)] = data
            return len(data)
        return os.preadv(self.descriptor, [target[:_LARGEST_READ]], offset)


class _Part:
    """A pack within a segment."""

    def __init__(self, file: OpenFile, pack: str, place: Place) -> None:
        before = header_size(pack)
        if place.offset < before or place.offset + place.size > file.size:
            raise _short(pack, place.offset, place.size)
        check_header(file.pread(place.offset - before, before), pack, place.size)
        self.file, self.segment, self.offset, self.size = file, place.segment, place.offset, place.size

    def pread(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on."""
        return self.file.pread(self.offset + offset, min(length, self.size - offset)) if offset < self.size else b""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill a part of `target` from `offset` on."""
        return self.file.read_into(self.offset + offset, target[: max(self.size - offset, 0)])


class _File(io.RawIOBase):
    """A pack as a file, for `zipfile`."""

    def __init__(self, pack: OpenPack) -> None:
        self._pack = pack
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._pack.size}[whence]
        if self._at < 0:
            raise ValueError("the position is negative")
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._pack.size - self._at), 0)
        taken = self._pack.read_into(self._at, memoryview(buffer)[:length]) if length else 0
        self._at += taken
        return taken


class PackReader:
    """Positioned reads from the packs of one store, for any number of threads.

    `path` is the directory in which packs are written: the store's own, or a mirror. `places` knows the packs in
    segments. At most `_MANY` files stay open, or `_FEW`.
    """

    def __init__(self, storage: Storage, path: Path, places: Places) -> None:
        self._storage = storage
        self.read_price = storage.read_price
        self._directory = path / root.PACKS
        self._places = places
        self._open: Lru[str, OpenPack] = Lru(_FEW if _open_files() < _USUAL else _MANY)

    @classmethod
    def of(cls, store: Path, places: Places | None = None) -> Self:
        """Return the packs of a store in a directory; by default, its segments are read for places."""
        return cls(DirectoryStorage(store), store, places or FoundPlaces(store))

    def mapped(self, pack: str) -> memoryview:
        """Return a pack's bytes as a private mapping: changes to them stay in memory."""
        opened = self._whole(pack)
        file = opened.file if isinstance(opened, _Part) else opened
        start = opened.offset if isinstance(opened, _Part) else 0
        mapped = memoryview(mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_COPY))
        return mapped[start : start + opened.size]

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset` of a pack; raise `IntegrityError` if it lacks some."""
        opened = self._opened(pack)
        if offset < 0 or length < 0 or offset + length > opened.size:
            raise _short(pack, offset, length)
        parts = []
        remaining = length
        while remaining:
            try:
                part = opened.pread(offset + length - remaining, remaining)
            except MemoryError as error:
                raise IntegrityError(
                    f"Pack {pack} has {length:,} bytes in one piece, more than memory allows."
                ) from error
            if not part:
                raise _short(pack, offset, length)
            parts.append(part)
            remaining -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` of a pack on; raise `IntegrityError` if it lacks some bytes."""
        opened = self._opened(pack)
        if offset < 0 or offset + len(target) > opened.size:
            raise _short(pack, offset, len(target))
        done = 0
        while done < len(target):
            taken = opened.read_into(offset + done, target[done:])
            if not taken:
                raise _short(pack, offset, len(target))
            done += taken

    def size(self, pack: str) -> int:
        """Return the size of a pack in bytes; raise `IntegrityError` if it is missing."""
        return self._opened(pack).size

    def is_there(self, pack: str, size: int) -> bool:
        """Return whether a pack of a size is in the store."""
        self.forget(pack)
        with suppress(IntegrityError):
            return self.size(pack) == size
        return False

    def digest(self, pack: str) -> str:
        """Return the digest of a pack's bytes, which its name should contain, in hexadecimal. Reads the whole file."""
        # Opened again, since the file may have been replaced.
        self.forget(pack)
        return digest_file(self._buffered(pack))

    def is_intact(self, pack: str) -> bool:
        """Return whether a pack's bytes match its name; raise `IntegrityError` if it is missing."""
        return is_named(pack, self.digest(pack))

    def find_entry(self, pack: str, member: str) -> PackEntry:
        """Return the place of a stored zip member's bytes, such as `manifest/c/0`, from the pack's own directory.

        Raise `IntegrityError` if the pack is missing, no zip, or has no such member.
        """
        place = self._last_member(pack, member)
        if place is None:
            try:
                with zipfile.ZipFile(self._buffered(pack)) as archive:
                    info = archive.getinfo(member)
            except MissingPackError:
                raise
            except _UNREADABLE as error:
                reason = f"Pack {pack} has no readable {member} ({error}); restore it from a copy."
                raise IntegrityError(reason) from error
            stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
            place = info.header_offset, info.file_size if stored else -1
        offset, size = place
        header = read_local(self.pread(pack, offset, LOCAL.size))
        if header.magic != LOCAL_MAGIC or size < 0:
            raise IntegrityError(f"Pack {pack} has a damaged header for {member}; restore the pack from a copy.")
        return PackEntry(offset + LOCAL.size + header.name_length + header.extra_length, size)

    def _last_member(self, pack: str, member: str) -> tuple[int, int] | None:
        """Return offset and length of a stored member's header if it is the last one, as manifests are.

        The directory has an entry for each array of the pack; its last one is found without reading the others.
        """
        size = self.size(pack)
        length = min(_TAIL, size)
        tail = self.pread(pack, size - length, length)
        end = length - END.size
        place = tail.rfind(CENTRAL_MAGIC, 0, max(end, 0))
        if place < 0 or tail[end : end + 4] != END_MAGIC or place + CENTRAL.size > end:
            return None
        record = read_central(tail, place)
        name = tail[place + CENTRAL.size :][: record.name_length]
        if name != member.encode() or record.method != STORED or record.packed != record.size:
            return None
        return None if FULL in (record.size, record.offset) else (record.offset, record.size)

    def array_metadata(self, pack: str) -> dict[str, Any]:
        """Return the Zarr metadata of the arrays of a pack, by name; raise `IntegrityError` if it is damaged."""
        file = self._buffered(pack)
        try:
            with zipfile.ZipFile(file) as archive:
                if "zarr.json" not in archive.NameToInfo:
                    return {}
                with archive.open("zarr.json") as metadata:
                    group = decode(metadata.read(_LARGEST_METADATA), _GROUP)
            arrays: dict[str, Any] = group["consolidated_metadata"]["metadata"]
            return arrays
        except (*_UNREADABLE, zlib.error, EOFError) as error:
            raise IntegrityError(f"Pack {pack} has unreadable metadata ({error}); restore it from a copy.") from error

    def list_packs(self) -> list[PackInfo]:
        """Return every pack in the store by name, whether the catalog has it or not.

        In a segment there are the packs that the catalog finds there: others were removed.
        """
        return sorted((info for info, _ in self._listed()), key=lambda info: info.name)

    def written(self) -> dict[str, float]:
        """Return the time at which each pack was written, in seconds, by name."""
        return {info.name: written for info, written in self._listed()}

    def _listed(self) -> Iterator[tuple[PackInfo, float]]:
        segments: dict[str, float] = {}
        single = set()
        for item in self._storage.list(PREFIX):
            name = item.name.removeprefix(PREFIX)
            if is_segment(name):
                segments[name] = item.modified.timestamp()
            elif parse_pack_name(name) is not None:
                single.add(name)
                yield PackInfo(name, item.size), item.modified.timestamp()
        for name, place in self._places.in_segments().items() if segments else ():
            if place.segment in segments and name not in single:
                yield PackInfo(name, place.size), segments[place.segment]

    def segments(self) -> dict[str, int]:
        """Return the sizes of all segments, by name."""
        found = {}
        for name in filter(is_segment, self._names()):
            with suppress(FileNotFoundError):  # Another process has removed it.
                found[name] = self.path_of(name).stat().st_size
        return found

    def apart(self) -> list[str]:
        """Return the packs with files of their own, whether the catalog has them or not."""
        return [name for name in self._names() if parse_pack_name(name) is not None]

    def _names(self) -> list[str]:
        with access_explained(self._directory), suppress(FileNotFoundError):
            return sorted(os.listdir(self._directory))
        return []

    def place_of(self, pack: str) -> Place | None:
        """Return the place of a pack in a segment; None if it has none."""
        return self._places.segment_of(pack)

    def doubled(self) -> list[str]:
        """Return the packs in segments that have files of their own as well, left by a killed process."""
        return list(self._places.in_segments(self.apart()))

    def is_intact_at(self, pack: str, path: Path, place: Place) -> bool:
        """Return whether a pack's bytes at a place in a segment match its name."""
        with suppress(IntegrityError, FileNotFoundError):
            return is_named(pack, digest_file(self._buffered(pack, _Part(OpenFile(path), pack, place))))
        return False

    def damage_of(self, segment: str) -> str:
        """Return the reason why a segment is damaged; empty if it is not. Reads the whole file."""
        try:
            digest = digest_file(self._buffered(segment, OpenFile(self.path_of(segment))))
        except AccessError:
            raise
        except FileNotFoundError:
            return ""  # Another process has removed it.
        except (CkstoreError, OSError) as error:
            return str(error)
        return "" if digest + SUFFIX == segment else "its bytes do not match the digest in its name"

    def names_in(self, segment: str) -> list[str]:
        """Return the names of the packs in a segment, whether the catalog has them or not."""
        return [name for name, _ in members(self.path_of(segment))]

    def placed_in(self, segments: Collection[str]) -> list[str]:
        """Return the names of the catalog's packs in some segments, in order of commit."""
        return [name for name, place in self._places.in_segments().items() if place.segment in segments]

    def path_of(self, segment: str) -> Path:
        """Return the path of a segment."""
        return self._directory / segment

    def remove_segment(self, name: str) -> None:
        """Delete a segment that the catalog does not refer to."""
        self._open.drop(name)
        self.path_of(name).unlink(missing_ok=True)
        durable.checkpoint("segment-removed")

    def now(self) -> float:
        """Return the present time, by the clock of `written`."""
        return time.time()

    def files(self) -> Iterator[tuple[str, str, int]]:
        """Yield directory, name and size in bytes of every object of the store."""
        for item in self._storage.list(""):
            directory, _, name = item.name.rpartition("/")
            yield directory.partition("/")[0] or ".", name, item.size

    def damaged(self, sizes: Mapping[str, int]) -> set[str]:
        """Return the packs, given with their sizes, that are missing or do not match their names; repair others."""
        with ThreadPoolExecutor(_READS, thread_name_prefix="ckstore-recover") as pool:
            whole = pool.map(lambda item: self._is_mended(*item), sizes.items())
            return {name for name, is_whole in zip(sizes, whole, strict=True) if not is_whole}

    def _is_mended(self, pack: str, _: int) -> bool:
        """Return whether a pack matches its name, perhaps after a repair."""
        try:
            return self.is_intact(pack)
        except IntegrityError:
            return False

    def prefetch(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Announce reads, as (pack, offset, length) in order; a hint, for packs whose reads have a price."""

    def publish(self, names: Sequence[str]) -> None:
        """Make new packs available to all users of the store; called before they are committed."""
        for name in names:
            self._storage.put(PREFIX + name, self._directory / name)

    def remove(self, name: str) -> None:
        """Delete a pack that the catalog does not have any more."""
        self.forget(name)
        self._path(name).unlink(missing_ok=True)
        durable.checkpoint("pack-removed")

    def sweep(self, grace: float, pause: float = 0.0) -> dict[str, int]:
        """Delete packs that were removed over `grace` seconds ago, if other machines may have read them until now.

        Return their sizes by name. With `pause`, do so only right after a commit, and if this machine has not done so
        for as many seconds.
        """
        return {}

    def forget(self, pack: str) -> None:
        """Close a pack that was or will be removed."""
        self._open.drop(pack)

    def distrust(self, packs: Iterable[str]) -> bool:
        """Close packs that look damaged; return whether any may have been repaired since they were opened."""
        replaced = [pack for pack in packs if self._is_replaced(pack)]
        for pack in replaced:
            self.forget(pack)
        return bool(replaced)

    def _is_replaced(self, pack: str) -> bool:
        """Return whether another file is at the place of an open pack."""
        opened = self._open.get(pack)
        if not isinstance(opened, OpenFile | _Part):
            return False
        path = self._path(pack)
        if isinstance(opened, _Part):
            if path.exists():
                return True  # It was restored from a copy.
            path = self.path_of(opened.segment)
        file = opened.file if isinstance(opened, _Part) else opened
        with suppress(OSError):
            return not file.is_at(path)
        return False

    def close(self) -> None:
        """Close every file; a later read opens it again."""
        self._open.clear()

    def _path(self, pack: str) -> Path:
        # Names come from the catalog, which is untrusted input.
        if parse_pack_name(str(pack)) is None:
            raise IntegrityError(f"{pack!r} is not the name of a pack; run `ckstore recover` to rebuild the catalog.")
        return self._directory / pack

    def _buffered(self, pack: str, opened: OpenPack | None = None, size: int = _BUFFER) -> io.BufferedReader:
        return io.BufferedReader(_File(opened or self._opened(pack)), size)

    def _whole(self, pack: str) -> OpenFile | _Part:
        """Return a pack as a local file, or a part of one."""
        opened = self._opened(pack)
        assert isinstance(opened, OpenFile | _Part)
        return opened

    def _open_pack(self, pack: str) -> OpenPack:
        """Open a pack; raise `FileNotFoundError`."""
        with suppress(FileNotFoundError):
            return OpenFile(self._path(pack))
        for _ in range(_LOOKS):
            place = self._places.segment_of(pack)
            if place is None:
                break
            with suppress(FileNotFoundError):  # Its packs were joined again since.
                return _Part(self._segment(place.segment), pack, place)
        raise FileNotFoundError(pack)

    def _segment(self, name: str) -> OpenFile:
        """Return an open segment, shared by its packs."""
        path = self.path_of(name)
        opened = self._open.get(name)
        if not isinstance(opened, OpenFile) or not opened.is_at(path):  # It was restored from a copy.
            self._open.drop(name)
            opened = self._open.put(name, OpenFile(path))
        assert isinstance(opened, OpenFile)
        return opened

    def _opened(self, pack: str) -> OpenPack:
        forks.check()
        opened = self._open.get(pack)
        if opened is None:
            try:
                opened = self._open.put(pack, self._open_pack(pack))
            except FileNotFoundError:
                raise missing(pack) from None
        return opened


def _open_files() -> float:
    """Return the number of files that this process may have open; 0 if it is unknown."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return 0
    return float("inf") if most == resource.RLIM_INFINITY else most


def read_shard_index(data: bytes, chunks: int, shard_length: int) -> list[tuple[int, int] | None]:
    """Return offset and length in the shard for each chunk; None for a chunk that is all zeros.

    `data` are the last bytes of the shard, at least `16 * chunks + 4`.

    Raises
    ------
    IntegrityError
        The checksum does not match, or a chunk lies outside the shard.
    """
    length = 16 * chunks + 4
    table = data[len(data) - length : len(data) - 4] if len(data) >= length else b""
    if not table or crc32c(table).to_bytes(4, "little") != data[-4:]:
        raise IntegrityError("The index of a shard does not match its checksum; restore the pack from a copy.")
    result: list[tuple[int, int] | None] = []
    for offset, size in struct.iter_unpack("<QQ", table):
        if offset == size == _ABSENT:
            result.append(None)
        elif offset + size > shard_length - length:
            raise IntegrityError("The index of a shard points outside of it; restore the pack from a copy.")
        else:
            result.append((offset, size))
    return result


def is_named(pack: str, digest: str) -> bool:
    """Return whether a pack's name contains this digest."""
    parsed = parse_pack_name(pack)
    return parsed is not None and parsed[0] == digest


def missing(pack: str) -> MissingPackError:
    """Return the error for a missing pack."""
    return MissingPackError(
        f"Pack {pack} is missing from the store; restore it from a copy, then run `ckstore verify`."
    )


def _short(pack: str, offset: int, length: int) -> IntegrityError:
    return IntegrityError(
        f"Pack {pack} is too short for {length} bytes at {offset}; restore it from a copy, then run `ckstore verify`."
    )
