"""Packs of a remote store: written here and put there, read in ranges through the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ckstore.errors import IntegrityError
from ckstore.storage import durable
from ckstore.storage.pack import PackInfo, parse_pack_name
from ckstore.storage.pack_reader import OpenFile, OpenPack, PackReader, missing
from ckstore.storage.remote.bucket import Bucket, patiently
from ckstore.storage.remote.cache import BlockCache

#: Where packs lie in the object store, and their blocks in the mirror.
_PREFIX, _BLOCKS = "packs/", "blocks"
#: Bytes that are fetched at once into a file.
_PIECE = 16 << 20


class _RemotePack:
    """A pack that lies in the object store."""

    def __init__(self, cache: BlockCache, name: str, size: int) -> None:
        self._cache = cache
        self._name = name
        self.size = size

    def pread(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` on."""
        length = min(length, self.size - offset)
        return self._cache.read(self._name, self.size, offset, length) if length > 0 else b""

    def read_into(self, offset: int, target: memoryview) -> int:
        """Fill some of `target` from `offset` on."""
        data = self.pread(offset, len(target))
        target[: len(data)] = data
        return len(data)


class RemotePacks(PackReader):
    """The packs of a remote store; what was written by this mirror, and mapped packs, are files of it.

    Parameters
    ----------
    bucket
        Of the store.
    mirror
        The mirror's directory.
    size_of
        The bytes of a pack, as the catalog says; None where it does not have the pack.
    refresh
        Called where a pack is not there: `gc` may have put another one in its place.
    """

    def __init__(
        self, bucket: Bucket, mirror: Path, size_of: Callable[[str], int | None], refresh: Callable[[], None]
    ) -> None:
        super().__init__(mirror)
        self._bucket = bucket
        self._size_of = size_of
        self._refresh = refresh
        self._cache = BlockCache(mirror / _BLOCKS, self._fetch)

    def publish(self, names: Sequence[str]) -> None:
        """Put packs; that a name is its content makes it harmless to do that twice."""
        for name in names:
            patiently(partial(self._bucket.put, _PREFIX + name, self._directory / name))
            durable.checkpoint("pack-put")

    def prefetch(self, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Begin to fetch what will be read."""
        wanted = []
        for name, parts in ranges.items():
            opened = self._opened(name)
            if isinstance(opened, _RemotePack):
                wanted.append((name, opened.size, parts))
        self._cache.prefetch(wanted)

    def list_packs(self) -> list[PackInfo]:
        """Every pack that lies in the object store, by name."""
        found = []
        for item in self._bucket.list(_PREFIX):
            name = item.name.removeprefix(_PREFIX)
            parsed = parse_pack_name(name)
            if parsed is not None:
                found.append(PackInfo(name, item.size, parsed[1]))
        return found

    def close(self) -> None:
        """Close every file, and wait for what is being fetched."""
        self._cache.close()
        super().close()

    def forget(self, pack: str) -> None:
        """Close a pack that was or will be removed."""
        super().forget(pack)
        self._cache.drop(pack)

    def _open_pack(self, pack: str) -> OpenPack:
        path = self._path(pack)
        if path.exists():
            return OpenFile(path)
        size = self._size_of(pack)
        if size is None:
            size = next((item.size for item in self._bucket.list(_PREFIX) if item.name == _PREFIX + pack), None)
        if size is None:
            raise FileNotFoundError(pack)
        return _RemotePack(self._cache, pack, size)

    def _whole(self, pack: str) -> OpenFile:
        """A pack as a file of the mirror, into which it is fetched."""
        opened = self._opened(pack)
        if not isinstance(opened, OpenFile):
            temporary = durable.temporary_path(self._directory)
            try:
                with temporary.open("wb") as file:
                    for offset in range(0, opened.size, _PIECE):
                        file.write(self._fetch(pack, offset, min(_PIECE, opened.size - offset)))
                temporary.replace(self._path(pack))
            finally:
                temporary.unlink(missing_ok=True)
            opened = OpenFile(self._path(pack))
            self._open.put(pack, opened)
        return opened

    def _fetch(self, pack: str, offset: int, length: int) -> bytes:
        try:
            [data] = patiently(lambda: self._bucket.read_ranges(_PREFIX + pack, [(offset, length)]))
        except FileNotFoundError:
            self._open.drop(pack)
            self._refresh()
            raise missing(pack) from None
        except EOFError as error:
            raise IntegrityError(f"Pack {pack} is shorter than the catalog says; run `ckstore verify`.") from error
        return data
