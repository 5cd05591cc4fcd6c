"""Opens, creates and rebuilds stores: the one module that tells directories and buckets apart."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckstore.errors import ConflictError, NoStoreError, UsageError
from ckstore.storage import root
from ckstore.storage.catalog import Catalog
from ckstore.storage.catalog_replacement import replace_catalog
from ckstore.storage.connection import Mode
from ckstore.storage.pack_reader import PackReader


class OpenStore(NamedTuple):
    """An open store.

    Attributes
    ----------
    place
        Absolute path or URL.
    path
        The directory with its catalog, in which packs are written: the store's own, or its mirror.
    options, cache
        The client's options, and the directory of mirrors; None for a store in a directory.
    """

    place: str
    path: Path
    catalog: Catalog
    packs: PackReader
    options: Mapping[str, str]
    cache: Path | None


def open_store(
    place: Path | str, mode: Mode, options: Mapping[str, str] | None = None, cache: Path | None = None
) -> OpenStore:
    """Open the store at a path or URL; raise `NoStoreError` if there is none."""
    if not isinstance(place, str):
        catalog = Catalog.open(place, mode)
        return OpenStore(os.path.abspath(place), place, catalog, PackReader.of(place, catalog), {}, None)
    from ckstore.storage.remote.mirror import find
    from ckstore.storage.remote.remote_catalog import RemoteCatalog
    from ckstore.storage.remote.remote_packs import RemotePacks

    mirror = find(place, options, cache, mode=mode)
    catalog = RemoteCatalog(mirror, mode)
    catalog.refresh()
    packs = RemotePacks(mirror, catalog)
    return OpenStore(place, mirror.path, catalog, packs, mirror.options, mirror.path.parent)


def create_store(
    place: Path | str,
    options: Mapping[str, str] | None = None,
    cache: Path | None = None,
    *,
    shared: bool = False,
) -> None:
    """Create a store at a path or URL; raise `ConflictError` if it holds something else.

    With `shared`, the group of the directory may write to it.
    """
    if isinstance(place, str):
        if shared:
            raise UsageError(f"A group shares a directory; rights to {place} are those of the bucket.")
        from ckstore.storage.remote.mirror import create

        create(place, options, cache)
    else:
        Catalog.create(place, shared=shared).close()


def ensure_store(place: Path | str, options: Mapping[str, str] | None = None, cache: Path | None = None) -> None:
    """Create a store where there is none, even if another process does so concurrently."""
    if isinstance(place, str):
        from ckstore.storage.remote.mirror import find

        try:
            find(place, options, cache)
        except NoStoreError:
            with suppress(ConflictError):
                create_store(place, options, cache)
        return
    try:
        if not (place / root.CATALOG).is_file():
            create_store(place)
    except ConflictError:
        if not (place / root.CATALOG).is_file():
            raise


def rebuild_from_log(place: Path | str) -> bool:
    """Rebuild the catalog from the log if that has every change; return False if it lacks ingests, as a directory's.

    Options and cached bytes stay. Other processes of a mirror go on. Raise `NoStoreError` if there is no store.
    """
    if not isinstance(place, str):
        if not root.is_store(place):
            raise NoStoreError(f"{place} is not a store: it has no packs and log; name another one.")
        root.check_no_mirror(place)
        return False
    from ckstore.storage.remote.mirror import find
    from ckstore.storage.remote.remote_catalog import RemoteCatalog

    mirror = find(place, from_log=True)

    def fill(target: Path, _: Catalog | None) -> None:
        with RemoteCatalog(replace(mirror, path=target), "a") as catalog:
            catalog.refresh()

    replace_catalog(mirror.path, fill)
    return True
