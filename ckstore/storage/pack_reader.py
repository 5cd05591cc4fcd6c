"""Reading packs: positioned reads through a bounded cache of open files, the zip directory, and shard indexes."""

from __future__ import annotations

import io
import mmap
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ckstore.errors import IntegrityError
from ckstore.runtime import forks
from ckstore.runtime.checksum import crc32c
from ckstore.runtime.lru import Lru
from ckstore.storage import durable, root
from ckstore.storage.pack import PackEntry, PackInfo, digest_file, parse_pack_name
from ckstore.storage.schema import plain_object, read_json
from ckstore.storage.zip_records import (
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

_ABSENT = 2**64 - 1
_TAIL = 1024
#: Bytes of the metadata of an array: exponents of millions of rows are in it.
_LARGEST_METADATA = 1 << 24
#: What is wrong with a zip that cannot be read.
_UNREADABLE = (KeyError, ValueError, NotImplementedError, MemoryError, zipfile.BadZipFile, struct.error)
# pread(2) returns at most 2^31 - 4096 bytes on Linux.
_LARGEST_READ = 1 << 30
#: What `zipfile` reads at once.
_BUFFER = 1 << 16


class MissingPackError(IntegrityError):
    """A pack is not there: it was lost, or `gc` has put another one in its place."""


class OpenPack(Protocol):
    """A pack that is being read."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def pread(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` on; none behind the end."""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill some of `target` from `offset` on; returns how many bytes."""


class OpenFile:
    """A file descriptor that is closed with its last reference: a thread that still reads keeps it alive."""

    __slots__ = ("descriptor", "size")

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor, self.size = durable.open_file(path)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def pread(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` on."""
        return os.pread(self.descriptor, min(length, _LARGEST_READ), offset)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill some of `target` from `offset` on."""
        if not hasattr(os, "preadv"):
            data = self.pread(offset, len(target))
            target[: len(data)] = data
            return len(data)
        return os.preadv(self.descriptor, [target[:_LARGEST_READ]], offset)


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
            raise ValueError("There is nothing before the first byte.")
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(min(len(buffer), self._pack.size - self._at), 0)
        taken = self._pack.read_into(self._at, memoryview(buffer)[:length]) if length else 0
        self._at += taken
        return taken


class PackReader:
    """Positioned reads from the packs of one store, for any number of threads.

    Parameters
    ----------
    store : Path
        The store's directory.
    limit : int
        How many files stay open; the least recently used one is closed first.
    """

    def __init__(self, store: Path, limit: int = 64) -> None:
        self._directory = store / root.PACKS
        self._open: Lru[str, OpenPack] = Lru(limit)

    def mapped(self, pack: str) -> memoryview:
        """A pack's bytes, mapped for one reader alone: what it writes to them stays its own.

        Raises
        ------
        MissingPackError
            The pack is not there.
        """
        opened = self._whole(pack)
        return memoryview(mmap.mmap(opened.descriptor, 0, access=mmap.ACCESS_COPY))

    def pread(self, pack: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset` of a pack.

        Raises
        ------
        IntegrityError
            The pack is missing or shorter than that.
        """
        opened = self._opened(pack)
        if offset < 0 or length < 0 or offset + length > opened.size:
            raise _short(pack, offset, length)
        parts = []
        remaining = length
        while remaining:
            try:
                part = opened.pread(offset + length - remaining, remaining)
            except MemoryError as error:
                raise IntegrityError(f"Pack {pack} has {length:,} bytes in one piece, more than fit here.") from error
            if not part:
                raise _short(pack, offset, length)
            parts.append(part)
            remaining -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset` of a pack on.

        Raises
        ------
        IntegrityError
            The pack is missing or shorter than that.
        """
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
        """The size of a pack in bytes; raises `IntegrityError` where it is missing."""
        return self._opened(pack).size

    def digest(self, pack: str) -> str:
        """What a pack's bytes say its name should be: 40 hexadecimal characters. Reads the whole file."""
        # Opened anew: what was put in the place of an open file counts.
        self.forget(pack)
        return digest_file(self._buffered(pack))

    def find_entry(self, pack: str, member: str) -> PackEntry:
        """Where the bytes of a stored zip member lie, from the pack's own directory.

        Parameters
        ----------
        pack : str
            File name of the pack.
        member : str
            For instance `manifest/c/0`.

        Raises
        ------
        IntegrityError
            The pack is missing, no zip, or has no such member.
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
        """Where the header of a stored member lies and how long it is, if it is the last one: so are manifests.

        The directory has two entries for each array of the pack; its last one is found without reading the others.
        """
        length = min(_TAIL, self.size(pack))
        tail = self.pread(pack, self.size(pack) - length, length)
        end = length - END.size
        place = tail.rfind(CENTRAL_MAGIC, 0, max(end, 0))
        if place < 0 or tail[end : end + 4] != END_MAGIC or place + CENTRAL.size > end:
            return None
        record = read_central(tail, place)
        name = tail[place + CENTRAL.size :][: record.name_length]
        if name != member.encode() or record.method != STORED or record.packed != record.size:
            return None
        return None if FULL in (record.size, record.offset) else (record.offset, record.size)

    def array_metadata(self, pack: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The Zarr metadata of arrays of a pack, by name.

        Raises
        ------
        IntegrityError
            The pack is missing, no zip, or lacks one of them.
        """
        file = self._buffered(pack)
        try:
            with zipfile.ZipFile(file) as archive:
                return {name: self._metadata(archive, name) for name in names}
        except (*_UNREADABLE, zlib.error, EOFError) as error:
            raise IntegrityError(f"Pack {pack} has unreadable metadata ({error}); restore it from a copy.") from error

    @staticmethod
    def _metadata(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
        with archive.open(f"{name}/zarr.json") as file:
            found: dict[str, Any] = read_json(file.read(_LARGEST_METADATA), plain_object)
            return found

    def list_packs(self) -> list[PackInfo]:
        """Every pack that lies in the store, known to the catalog or not, by name."""
        found = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                parsed = parse_pack_name(entry.name)
                # Whoever wrote it may take it back meanwhile.
                with suppress(FileNotFoundError):
                    if parsed is not None and entry.is_file():
                        found.append(PackInfo(entry.name, entry.stat().st_size, parsed[1]))
        return sorted(found, key=lambda info: info.name)

    def modified(self, name: str) -> float:
        """When a pack was written, in seconds; raises `FileNotFoundError`."""
        return self._path(name).stat().st_mtime

    def now(self) -> float:
        """The time by the clock of `modified`."""
        return time.time()

    def files(self) -> Iterator[tuple[str, str, int]]:
        """Every file of the store: directory, name, size in bytes."""
        top = self._directory.parent
        for directory, _, names in os.walk(top):
            for name in names:
                yield os.path.relpath(directory, top), name, os.lstat(os.path.join(directory, name)).st_size

    #: Whether packs lie in an object store.
    is_remote = False

    def prefetch_manifests(self, names: Iterable[str], besides: int = 0) -> None:
        """Say which packs' manifests will be read: those of a remote store are fetched together.

        The smallest packs come whole, as far as so many bytes go: objects in them will be wanted, too.
        """

    def prefetch(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Say what will be read, as (pack, offset, length) in order: parts of remote packs are fetched together."""

    def publish(self, names: Sequence[str]) -> None:
        """Let packs that were written here be found by all who use the store; called before they are committed."""

    def remove(self, name: str) -> None:
        """Remove a pack that the catalog does not have any more."""
        self.forget(name)
        self._path(name).unlink(missing_ok=True)
        durable.checkpoint("pack-removed")

    def sweep(self, grace: float) -> dict[str, int]:
        """Delete from a remote store what went more than `grace` seconds ago; returns bytes by names of packs."""
        return {}

    def sweep_in_passing(self, grace: float, pause: float) -> None:
        """The same right after a commit, unless this mirror did it less than `pause` seconds ago."""

    def forget(self, pack: str) -> None:
        """Close a pack that was or will be removed."""
        self._open.drop(pack)

    def distrust(self, packs: Iterable[str]) -> bool:
        """Drop what is here of remote packs that look damaged; whether reading them again is worth it."""
        return False

    def close(self) -> None:
        """Close every file; a later read opens it again."""
        self._open.clear()

    def _path(self, pack: str) -> Path:
        # Names come out of the catalog, which may have been made by someone else.
        if parse_pack_name(str(pack)) is None:
            raise IntegrityError(f"{pack!r} is not the name of a pack; run `ckstore recover` to rebuild the catalog.")
        return self._directory / pack

    def _buffered(self, pack: str, opened: OpenPack | None = None) -> io.BufferedReader:
        return io.BufferedReader(_File(opened or self._opened(pack)), _BUFFER)

    def _whole(self, pack: str) -> OpenFile:
        """A pack as a file of this machine."""
        opened = self._opened(pack)
        assert isinstance(opened, OpenFile)
        return opened

    def _open_pack(self, pack: str) -> OpenPack:
        """Open a pack; raises `FileNotFoundError`."""
        return OpenFile(self._path(pack))

    def _opened(self, pack: str) -> OpenPack:
        forks.check()
        opened = self._open.get(pack)
        if opened is None:
            try:
                opened = self._open.put(pack, self._open_pack(pack))
            except FileNotFoundError:
                raise missing(pack) from None
        return opened


def read_shard_index(data: bytes, chunks: int, shard_length: int | None = None) -> list[tuple[int, int] | None]:
    """Parse the index at the end of a shard.

    Parameters
    ----------
    data : bytes
        The last bytes of the shard, at least `16 * chunks + 4`.
    chunks : int
        Number of chunks in the shard.
    shard_length : int, optional
        Length of the whole shard in bytes; when given, every chunk must lie in it.

    Returns
    -------
    list of (offset, length) or None
        For each chunk where it lies from the start of the shard; None where it is absent, that is all zeros.

    Raises
    ------
    IntegrityError
        The checksum does not agree, or a chunk lies outside of the shard.
    """
    length = 16 * chunks + 4
    table = data[len(data) - length : len(data) - 4] if len(data) >= length else b""
    if not table or crc32c(table).to_bytes(4, "little") != data[-4:]:
        raise IntegrityError("The index of a shard does not match its checksum; restore the pack from a copy.")
    limit = None if shard_length is None else shard_length - length
    result: list[tuple[int, int] | None] = []
    for offset, size in struct.iter_unpack("<QQ", table):
        if offset == size == _ABSENT:
            result.append(None)
        elif limit is not None and offset + size > limit:
            raise IntegrityError("The index of a shard points outside of it; restore the pack from a copy.")
        else:
            result.append((offset, size))
    return result


def missing(pack: str) -> MissingPackError:
    """What is said of a pack that is not there."""
    return MissingPackError(
        f"Pack {pack} is missing from the store; restore it from a copy, then run `ckstore verify`."
    )


def _short(pack: str, offset: int, length: int) -> IntegrityError:
    return IntegrityError(
        f"Pack {pack} is too short for {length} bytes at {offset}; restore it from a copy, then run `ckstore verify`."
    )
