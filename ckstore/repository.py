"""An open store: its catalog, its packs, and the resolver and reader of its objects."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, get_args

from ckstore.errors import UsageError
from ckstore.runtime.cached import cached_property
from ckstore.storage import root
from ckstore.storage.catalog import Catalog
from ckstore.storage.connection import closed_error
from ckstore.storage.pack_reader import PackReader

if TYPE_CHECKING:
    from ckstore.objects.reader import ObjectReader
    from ckstore.objects.resolver import CatalogResolver
    from ckstore.storage.remote.mirror import Mirror

Mode = Literal["r", "a"]

#: Limit of the cache of decoded chunks, in bytes, of a store that is opened for one thing.
CACHE_BYTES = 64 << 20


class Address(NamedTuple):
    """Where a store is, for another process: an absolute path or a URL, and of a remote store its options and cache."""

    place: str
    options: tuple[tuple[str, str], ...] = ()
    cache: str | None = None

    def open(self, mode: Mode, cache_bytes: int = CACHE_BYTES) -> Repository:
        """Open the store."""
        cache = None if self.cache is None else Path(self.cache)
        return Repository(root.place(self.place), mode, cache_bytes, options=dict(self.options), cache=cache)


def opened(address: Address) -> Repository:
    """A store that this process has open for reading, by its address: opened once, and closed when the process ends."""
    found = _opened.get(address)
    if found is None:
        made = address.open("r")
        found = _opened.setdefault(address, made)
        if found is not made:
            made.close()  # Another thread was first.
    return found


_opened: dict[Address, Repository] = {}


@atexit.register
def _close_opened() -> None:
    while _opened:
        _opened.popitem()[1].close()


class Repository:
    """What operations, views and encoders take of a store.

    Parameters
    ----------
    place
        The store's directory, or the URL of one in an object store.
    mode
        `r` reads only; `a` reads and writes.
    cache_bytes
        Limit of the cache of decoded chunks.
    options, cache
        Of a remote store: what its client is told, and the directory of mirrors.

    Attributes
    ----------
    path
        The store's directory; of a remote store that of its mirror.
    catalog
        The index.
    packs
        The bytes.
    cache_bytes
        Limit of the cache.
    has_stored
        A version was stored through this repository: those that follow are stored against what is still at hand.
    """

    def __init__(
        self,
        place: Path | str,
        mode: Mode = "a",
        cache_bytes: int = CACHE_BYTES,
        *,
        options: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise UsageError(f"There is no mode {mode!r}; open a store with 'r' to read, or 'a' to read and write.")
        self.place = place
        self.mode = mode
        self.catalog: Catalog
        self.packs: PackReader
        self._mirror: Mirror | None = None
        if isinstance(place, str):
            from ckstore.storage.remote.mirror import find

            self._follow(find(place, options, cache))
        else:
            self.path = place
            self.catalog = Catalog.open(place, mode)
            self.packs = PackReader(place)
        self.has_stored = False
        self.cache_bytes = cache_bytes
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, mirror: Mirror) -> None:
        """Use a remote store through its mirror, as it is now."""
        from ckstore.storage.remote.catalog import RemoteCatalog
        from ckstore.storage.remote.packs import RemotePacks

        self._mirror, self.path = mirror, mirror.path
        catalog = RemoteCatalog(mirror, self.mode)
        catalog.refresh()
        self.catalog, self.packs = catalog, RemotePacks(mirror, catalog)

    @property
    def address(self) -> Address:
        """What opens the store in another process of this machine."""
        if self._mirror is None:
            return Address(os.path.abspath(self.path))
        return Address(str(self.place), tuple(self._mirror.options.items()), str(self._mirror.path.parent))

    def reopened(self, mode: Mode, cache_bytes: int = CACHE_BYTES) -> Repository:
        """The same store once more, with caches of its own."""
        return self.address.open(mode, cache_bytes)

    def close(self) -> None:
        """Close catalog and packs; what is read of it later raises `UsageError`."""
        self.catalog.close()
        self.packs.close()
        self._is_closed = True
        for name in ("resolver", "reader"):
            vars(self).pop(name, None)

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed_error()

    @cached_property
    def resolver(self) -> CatalogResolver:
        """Finds records by id."""
        from ckstore.objects.resolver import CatalogResolver

        self._require_open()
        return CatalogResolver(self.catalog, self.packs)

    @cached_property
    def reader(self) -> ObjectReader:
        """Decodes objects."""
        from ckstore.objects.reader import ObjectReader

        self._require_open()
        return ObjectReader(self.resolver, self.packs, self.cache_bytes)

    def require_writable(self) -> None:
        """Raise `UsageError` where the store is open for reading only."""
        if self.mode == "r":
            raise UsageError("The store is open for reading only; open it with mode='a'.")
