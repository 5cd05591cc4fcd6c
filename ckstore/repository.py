"""An open store: its catalog, its packs, and the resolver and reader of its objects."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, get_args

from ckstore.errors import ReadOnlyError, UsageError
from ckstore.runtime.cached import cached_property
from ckstore.storage import root
from ckstore.storage.connection import closed_error
from ckstore.storage.opening import open_store

if TYPE_CHECKING:
    from ckstore.objects.reader import ObjectReader
    from ckstore.objects.resolver import CatalogResolver
    from ckstore.objects.units import Unit

Mode = Literal["r", "a"]

#: Default limit of the cache of decoded chunks, in bytes.
CACHE_BYTES = 64 << 20


class Address(NamedTuple):
    """The address of a store for other processes: an absolute path, or a URL with options and cache."""

    place: str
    options: tuple[tuple[str, str], ...] = ()
    cache: str | None = None

    def open(self, mode: Mode, cache_bytes: int = CACHE_BYTES) -> Repository:
        """Open the store."""
        cache = None if self.cache is None else Path(self.cache)
        return Repository(root.place(self.place), mode, cache_bytes, options=dict(self.options), cache=cache)


def opened(address: Address) -> Repository:
    """Return the store at an address, open for reading: opened once a process, and closed at its end."""
    found = _opened.get(address)
    if found is None:
        made = address.open("r")
        found = _opened.setdefault(address, made)
        if found is not made:
            made.close()  # Another thread opened it first.
    return found


_opened: dict[Address, Repository] = {}


@atexit.register
def _close_opened() -> None:
    while _opened:
        _opened.popitem()[1].close()


class Repository:
    """The parts of an open store that other rooms use: the catalog is the index, packs hold the bytes.

    Parameters
    ----------
    place
        The store's directory, or the URL of a store in a bucket.
    mode
        `r` reads only; `a` reads and writes.
    cache_bytes
        Limit of the cache of decoded chunks.
    options, cache
        For a remote store: options of its client, and the directory of mirrors.

    Attributes
    ----------
    path
        The store's directory; for a remote store that of its mirror.
    has_stored
        Whether this repository has stored a version; later ones are stored against its cached objects.
    last_cut
        The id of the version that this repository stored last, its units by names and shapes alone, and its units.
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
            raise UsageError(f"Unknown mode {mode!r}; open a store with 'r' to read, or 'a' to read and write.")
        self.place = place
        self.mode = mode
        self._opened = open_store(place, mode, options, cache)
        self.path, self.catalog, self.packs = self._opened.path, self._opened.catalog, self._opened.packs
        self.has_stored = False
        self.last_cut: tuple[str, Sequence[Unit], Sequence[Unit]] = "", (), ()
        self.cache_bytes = cache_bytes
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> Address:
        """The address under which another process of this machine opens the store."""
        opened = self._opened
        return Address(opened.place, tuple(opened.options.items()), None if opened.cache is None else str(opened.cache))

    def reopened(self, mode: Mode, cache_bytes: int = CACHE_BYTES) -> Repository:
        """Open the same store again, with separate caches."""
        return self.address.open(mode, cache_bytes)

    def close(self) -> None:
        """Close catalog and packs; later reads raise `UsageError`."""
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
        """The resolver, which finds records by id."""
        from ckstore.objects.resolver import CatalogResolver

        self._require_open()
        return CatalogResolver(self.catalog, self.packs)

    @cached_property
    def reader(self) -> ObjectReader:
        """The reader, which decodes objects."""
        from ckstore.objects.reader import ObjectReader

        self._require_open()
        return ObjectReader(self.resolver, self.packs, self.cache_bytes)

    def require_writable(self) -> None:
        """Raise `ReadOnlyError` if the store is open for reading only."""
        if self.mode == "r":
            raise ReadOnlyError("The store is open for reading only; open it with mode='a'.")
