"""An open store: its catalog, its packs, and the resolver and reader of its objects."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from ckstore.errors import UsageError
from ckstore.storage.catalog import Catalog
from ckstore.storage.pack_reader import PackReader

if TYPE_CHECKING:
    from ckstore.objects.reader import ObjectReader
    from ckstore.objects.resolver import CatalogResolver

Mode = Literal["r", "a"]

#: Limit of the cache of decoded chunks, in bytes, of a store that is opened for one thing.
CACHE_BYTES = 64 << 20


class Repository:
    """What operations, views and encoders take of a store.

    Parameters
    ----------
    path
        The store's directory.
    mode
        `r` reads only; `a` reads and writes.
    cache_bytes
        Limit of the cache of decoded chunks.

    Attributes
    ----------
    catalog
        The index.
    packs
        The bytes.
    cache_bytes
        Limit of the cache.
    has_stored
        A version was stored through this repository: those that follow are stored against what is still at hand.
    """

    def __init__(self, path: Path, mode: Mode = "a", cache_bytes: int = CACHE_BYTES) -> None:
        self.path = path
        self.mode = mode
        self.catalog = Catalog.open(path, mode)
        self.packs = PackReader(path)
        self.has_stored = False
        self.cache_bytes = cache_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close catalog and packs."""
        self.catalog.close()
        self.packs.close()

    @cached_property
    def resolver(self) -> CatalogResolver:
        """Finds records by id."""
        from ckstore.objects.resolver import CatalogResolver

        return CatalogResolver(self.catalog, self.packs)

    @cached_property
    def reader(self) -> ObjectReader:
        """Decodes objects."""
        from ckstore.objects.reader import ObjectReader

        return ObjectReader(self.resolver, self.packs, self.cache_bytes)

    def require_writable(self) -> None:
        """Raise `UsageError` where the store is open for reading only."""
        if self.mode == "r":
            raise UsageError("The store is open for reading only; open it with mode='a'.")
