"""Puts a catalog that was built again in the place of the present one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckstore.errors import IntegrityError, NoStoreError
from ckstore.storage import durable, root
from ckstore.storage.catalog import Catalog
from ckstore.storage.connection import create_file, place_lock


def replace_catalog(store: Path, build: Callable[[Catalog, Catalog | None], None]) -> None:
    """Build a catalog beside the present one and put it in its place at once; nobody else writes meanwhile.

    Parameters
    ----------
    store : Path
        The store's directory.
    build : callable
        Fills the empty catalog that it is given first; where it raises, the present catalog stays. The second one is
        the present catalog, None where it is gone or cannot be opened; what it says may be damaged all the same.

    Raises
    ------
    LockedError
        Another process is writing to the present catalog.
    """

    def fill(beside: Path, present: Catalog | None) -> None:
        with Catalog(beside, "a") as catalog, catalog.transaction():
            build(catalog, present)

    replace_file(store, fill)


def replace_file(store: Path, fill: Callable[[Path, Catalog | None], None]) -> None:
    """As `replace_catalog`, but what fills the empty catalog is given the directory in which it is."""
    beside = durable.temporary_path(store)
    beside.mkdir()
    try:
        create_file(beside / root.CATALOG)
        # From before the packs are listed: a version that is committed after that would not be in the new catalog.
        with _writers_kept_out(store) as present:
            fill(beside, present)
            durable.checkpoint("catalog-built")
            with place_lock(store, exclusive=True):
                if present is None:
                    # It would be taken for the journal of the catalog that comes now.
                    (store / (root.CATALOG + "-journal")).unlink(missing_ok=True)
                os.replace(beside / root.CATALOG, store / root.CATALOG)
                durable.sync_directory(store)
    finally:
        for name in (root.CATALOG, root.CATALOG + "-journal"):
            (beside / name).unlink(missing_ok=True)
        with suppress(OSError):
            beside.rmdir()


@contextmanager
def _writers_kept_out(store: Path) -> Iterator[Catalog | None]:
    """Hold the write lock of the present catalog; None where it cannot be written to, by nobody."""
    stack = ExitStack()
    present: Catalog | None = None
    try:
        present = stack.enter_context(Catalog(store, "a"))
        stack.enter_context(present.transaction())
    except (IntegrityError, NoStoreError):
        present = None
    try:
        yield present
    finally:
        with suppress(IntegrityError):  # Nothing was changed in it, damaged as it may be.
            stack.close()
