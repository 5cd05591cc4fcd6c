"""The packs of a remote store: written locally and uploaded, read in ranges through the cache."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ckstore.errors import IntegrityError
from ckstore.storage import durable
from ckstore.storage.pack import parse_pack_name
from ckstore.storage.pack_reader import PREFIX, MissingPackError, OpenFile, OpenPack, PackReader, is_named, missing
from ckstore.storage.remote.block_cache import BLOCK, BlockCache, allowed
from ckstore.storage.remote.bucket import ForeignNameError
from ckstore.storage.remote.mirror import Mirror
from ckstore.storage.remote.remote_catalog import RemoteCatalog
from ckstore.storage.zip_stream import digest_file

#: Directory of the blocks of packs in the mirror.
_BLOCKS = "blocks"
#: Largest age in seconds of local files of packs, written or mapped.
_KEPT = 24 * 3600.0
#: Number of parallel uploads.
_PUTS = 4
#: Bytes of each request that fetches a file.
_PIECE = 16 << 20
#: Seconds after which a pack that looks damaged is fetched again: others may have repaired it.
_AGAIN = 60.0
#: Number of snapshots that are kept, and age in seconds of abandoned objects that asked for the server's time.
_SNAPSHOTS, _ABANDONED = 2, 3600.0
#: Files of the mirror whose times are those of its last sweep, and of the last list of its files of packs.
_SWEPT, _LISTED = "swept", "listed"
#: Seconds between two such lists, of a day's files, and the part of the limit that is written in between.
_LIST, _PART = 3600.0, 16


class _RemotePack:
    """A pack in the object store."""

    def __init__(self, cache: BlockCache, name: str, size: int, look_again: Callable[[str], None]) -> None:
        self._cache = cache
        self._look_again = look_again
        self._name = name
        self.size = size

    def pread(self, offset: int, length: int) -> bytes:
        """Return at most `length` bytes from `offset` on."""
        length = min(length, self.size - offset)
        try:
            return self._cache.read(self._name, self.size, offset, length) if length > 0 else b""
        except MissingPackError:
            # Not in the fetching thread: a transaction of this thread may lock the catalog against it.
            self._look_again(self._name)
            raise

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill a part of `target` from `offset` on."""
        data = self.pread(offset, len(target))
        target[: len(data)] = data
        return len(data)


@dataclass(frozen=True, slots=True)
class _Uncached:
    """A pack in the object store, read past the cache."""

    fetch: Callable[[str, int, int], bytes]
    name: str
    size: int

    def pread(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on."""
        return self.fetch(self.name, offset, length)

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill `target` from `offset` on."""
        target[:] = self.pread(offset, len(target))
        return len(target)


class RemotePacks(PackReader):
    """The packs of a remote store; packs written by this mirror, and mapped packs, are local files."""

    def __init__(self, mirror: Mirror, catalog: RemoteCatalog) -> None:
        super().__init__(mirror.storage, mirror.path, catalog)
        self._mirror = mirror
        self._catalog = catalog
        self._cache = BlockCache(mirror.path / _BLOCKS, self._fetch)
        self._distrusted: dict[str, float] = {}
        self._leave_to_cache()

    def publish(self, names: Sequence[str]) -> None:
        """Upload packs in parallel; a repeated upload is harmless, since the name is a digest of the content."""
        self._leave_to_cache(names)
        with ThreadPoolExecutor(_PUTS) as pool:
            for _ in pool.map(super().publish, [[name] for name in names]):
                durable.checkpoint("pack-put")

    def prefetch(self, parts: Iterable[tuple[str, int, int]]) -> None:
        """Start fetching parts that will be read."""
        sizes: dict[str, int | None] = {}
        wanted = []
        for name, offset, length in parts:
            if name not in sizes:
                sizes[name] = None
                with suppress(IntegrityError):
                    opened = self._opened(name)
                    sizes[name] = opened.size if isinstance(opened, _RemotePack) else None
            size = sizes[name]
            if size is not None:
                wanted.append((name, size, offset, length))
        self._cache.prefetch(wanted)

    def is_there(self, pack: str, size: int) -> bool:
        """As for a local pack, but in the object store; ignores the local cache. Its size is known afterwards."""
        with suppress(IntegrityError):
            self._fetch(pack, size - 1, 1)
            if self._open.get(pack) is None and not self._path(pack).exists():
                self._open.put(pack, self._remote(pack, size))
            return True
        return False

    def digest(self, pack: str) -> str:
        """As for a local pack, but of the bytes in the object store; ignores the local cache."""
        self.forget(pack)
        return digest_file(self._buffered(pack, self._remote(pack, self.size(pack))))

    def _is_mended(self, pack: str, size: int) -> bool:
        """Return whether the bytes in the object store match a pack's name, or could be uploaded again.

        Ignores the local cache for the first, since only it may have whole bytes for the second.
        """
        uncached = _Uncached(self._fetch, pack, size)
        with suppress(IntegrityError):
            if is_named(pack, digest_file(self._buffered(pack, uncached, _PIECE))):
                return True
        return self._put_again(pack, size)

    def _put_again(self, pack: str, size: int) -> bool:
        """Upload a damaged or missing pack again, if its bytes are in a local file or in the cache.

        Its name determines its bytes, so that concurrent uploads are equal.
        """
        path, temporary = self._path(pack), durable.temporary_path(self._directory)
        try:
            if not _is_pack(path, pack):
                path = temporary
                with durable.new_file(path) as file:
                    for start in range(0, size, BLOCK):
                        block = self._cache.at_hand(pack, start // BLOCK, min(BLOCK, size - start))
                        if block is None:
                            return False
                        file.write(block)
                if not _is_pack(path, pack):
                    return False
            self._storage.put(PREFIX + pack, path)
            return True
        finally:
            temporary.unlink(missing_ok=True)
            self._drop_damaged(pack)

    def distrust(self, packs: Iterable[str]) -> bool:
        """Drop local copies of packs that look damaged: others may have repaired them since they were read."""
        now = time.monotonic()
        fresh = [pack for pack in packs if now - self._distrusted.get(pack, -math.inf) > _AGAIN]
        for pack in fresh:
            self._distrusted[pack] = now
            self._drop_damaged(pack)
        return bool(fresh)

    def _drop_damaged(self, pack: str) -> None:
        """Drop the blocks of a pack, and its file if that does not match the name."""
        self.forget(pack)
        if not _is_pack(self._path(pack), pack):
            self._path(pack).unlink(missing_ok=True)

    def now(self) -> float:
        """Return the server's time: that of an object written now. Deletes such objects of killed processes."""
        name = f"probe/{secrets.token_hex(16)}"
        self._storage.put(name, b"now")
        going = [name]
        try:
            listed = {item.name: item.modified for item in self._storage.list("probe/")}
            going += [other for other, then in listed.items() if (listed[name] - then).total_seconds() > _ABANDONED]
        finally:
            self._storage.delete(going)
        return listed[name].timestamp()

    def sweep(self, grace: float, pause: float = 0.0) -> dict[str, int]:
        """Delete packs removed over `grace` seconds ago: all readers have seen the record of their removal since.

        No later record refers to a removed pack, so that nobody needs the deleted ones. Older snapshots of the catalog
        are deleted as well. With `pause`, the last commit is the present time, and those are left to `gc`.
        """
        if not pause:
            deleted = self._sweep(lambda written: self.now() - grace)
            self._delete_snapshots()
            return deleted
        if self._is_due(_SWEPT, pause):
            with suppress(ForeignNameError):  # `gc` reports it; the commit succeeded.
                return self._sweep(lambda written: max(moment.timestamp() for moment in written.values()) - grace)
        return {}

    def _sweep(self, until: Callable[[Mapping[int, datetime]], float]) -> dict[str, int]:
        """Delete packs dropped before a cutoff, which `until` computes from the records' times by number."""
        sizes = {info.name: info.bytes for info in self.list_packs()}
        gone = self._catalog.gone(sizes.keys() - self._catalog.known_packs(sizes))
        there = {name: sizes[name] for name in gone}
        if not there:
            return {}
        try:
            written = self._mirror.log.modified(min(gone[name] for name in there))
        except ForeignNameError:  # The log cannot be listed until somebody deletes the name, which `verify` reports.
            return {}
        last = until(written)
        old = [name for name in there if gone[name] in written and written[gone[name]].timestamp() <= last]
        for name in old:
            self.remove(name)
            durable.checkpoint("pack-deleted")
        self._storage.delete([PREFIX + name for name in old])
        return {name: there[name] for name in old}

    def _delete_snapshots(self) -> None:
        """Delete all snapshots but the last two: one of them may be in use."""
        names = [item.name for item in self._storage.list(f"snapshots/{self._mirror.log.store}/")]
        self._storage.delete(sorted(names)[:-_SNAPSHOTS])

    def _is_due(self, name: str, pause: float) -> bool:
        """Return whether `pause` seconds have passed since the time of a file of the mirror, which is now then."""
        path = self._mirror.path / name
        with suppress(OSError):
            with suppress(FileNotFoundError):
                if 0 <= time.time() - path.stat().st_mtime < pause:
                    return False
            durable.touch(path)
            return True
        return False

    def close(self) -> None:
        """Close every file, and wait for running requests."""
        self._cache.close()
        super().close()

    def forget(self, pack: str) -> None:
        """Close a pack that was or will be removed."""
        super().forget(pack)
        self._cache.drop(pack)

    def apart(self) -> list[str]:
        """Return the packs in the object store, whether the catalog has them or not."""
        return [info.name for info in self.list_packs()]

    def segments(self) -> dict[str, int]:
        """Return nothing: packs in an object store are not joined."""
        return {}

    def doubled(self) -> list[str]:
        """Return nothing, likewise."""
        return []

    def _open_pack(self, pack: str) -> OpenPack:
        self._close_removed()
        with suppress(FileNotFoundError):
            return OpenFile(self._path(pack))
        size = self._catalog.pack_bytes(pack)
        if size is None:
            size = next((info.bytes for info in self.list_packs() if info.name == pack), None)
        if size is None:
            raise FileNotFoundError(pack)
        return self._remote(pack, size)

    def _remote(self, pack: str, size: int) -> _RemotePack:
        return _RemotePack(self._cache, pack, size, self._look_again)

    def _whole(self, pack: str) -> OpenFile:
        """Return a pack as a file of the mirror; fetch it if needed."""
        opened = self._opened(pack)
        if not isinstance(opened, OpenFile):
            size, temporary = opened.size, durable.temporary_path(self._directory)
            try:
                with durable.write_explained(self._directory, size), durable.new_file(temporary) as file:
                    for offset in range(0, size, _PIECE):
                        file.write(self._fetch(pack, offset, min(_PIECE, size - offset)))
                    # Mapped bytes are not checked: after a power cut, the file must be complete or missing.
                    file.flush()
                    durable.sync_file(file.fileno())
                opened = OpenFile(temporary)
                temporary.replace(self._path(pack))
            finally:
                temporary.unlink(missing_ok=True)
            self._open.drop(pack)
            self._open.put(pack, opened)
            self._leave_to_cache([pack])
        return opened

    def _leave_to_cache(self, names: Collection[str] = ()) -> None:
        """Remove local files of other packs written a while ago, and the oldest ones beyond a limit.

        The former were committed, or their writers were killed. Of the latter, a file is removed if its pack is
        committed or never will be. The last one stays at any size, for readers that map packs one after the other. The
        files are listed after an hour, and by chance: once while all processes write a part of the limit.
        """
        limit = allowed(self._directory)
        written = sum(durable.size_of(self._path(name)) for name in names)
        if secrets.randbelow(max(limit // _PART, 1)) >= written and not self._is_due(_LISTED, _LIST):
            return
        found = []
        for path in self._directory.iterdir():
            with suppress(OSError):
                status = path.stat()
                if path.name not in names and status.st_mtime < time.time() - _KEPT:
                    durable.remove(path)
                elif parse_pack_name(path.name) is not None:
                    found.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in found) - limit
        gone = self._catalog.gone() if over > 0 else {}
        for _, size, path in sorted(found)[:-1]:
            if over <= 0:
                break
            if path.name not in names and (path.name in gone or self._catalog.pack_bytes(path.name) is not None):
                with suppress(OSError):
                    path.unlink()
                over -= size
        self._close_removed()

    def _close_removed(self) -> None:
        """Close files that any process has removed: they take up space while open."""
        for name in self._open:
            if isinstance(self._open.get(name), OpenFile) and not self._path(name).exists():
                self._open.drop(name)

    def _look_again(self, pack: str) -> None:
        """Apply the log of others after a pack was found missing."""
        self._open.drop(pack)
        self._catalog.refresh()

    def _fetch(self, pack: str, offset: int, length: int) -> bytes:
        try:
            return self._storage.read_range(PREFIX + pack, offset, length)
        except FileNotFoundError:
            raise missing(pack) from None
        except EOFError as error:
            raise IntegrityError(f"Pack {pack} is shorter than the catalog says; run `ckstore verify`.") from error


def _is_pack(path: Path, name: str) -> bool:
    """Return whether the file at a path exists and matches the pack's name."""
    try:
        with path.open("rb") as file:
            return is_named(name, digest_file(file))
    except FileNotFoundError:
        return False
