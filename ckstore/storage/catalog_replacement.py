"""Replaces the catalog by a rebuilt one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckstore.errors import IntegrityError, NoStoreError
from ckstore.storage import durable, root
from ckstore.storage.catalog import Catalog
from ckstore.storage.connection import PlaceLock, create_file


def replace_catalog(store: Path, fill: Callable[[Path, Catalog | None], None]) -> None:
    """Build a catalog next to the present one and replace it atomically; other writers wait.

    `fill` gets the directory of an empty catalog, and the present catalog: None if that is missing or cannot be opened;
    its rows may be damaged. If `fill` raises, the present catalog stays.

    Raises
    ------
    LockedError
        Another process is writing to the present catalog.
    """
    temporary = durable.temporary_path(store)
    durable.new_directory(temporary)
    try:
        create_file(temporary / root.CATALOG)
        # Held before the packs are listed: the new catalog would lack a version committed after that.
        with _writers_kept_out(store) as present:
            fill(temporary, present)
            durable.checkpoint("catalog-built")
            with PlaceLock(store, exclusive=True):
                if present is None:
                    # SQLite would take it for the journal of the new catalog.
                    (store / (root.CATALOG + "-journal")).unlink(missing_ok=True)
                os.replace(temporary / root.CATALOG, store / root.CATALOG)
                durable.sync_directory(store)
    finally:
        for name in (root.CATALOG, root.CATALOG + "-journal", root.CLAIMS, root.CLAIMS + "-journal"):
            (temporary / name).unlink(missing_ok=True)
        with suppress(OSError):
            temporary.rmdir()


@contextmanager
def _writers_kept_out(store: Path) -> Iterator[Catalog | None]:
    """Hold the write lock of the present catalog; yield None if no process can write to it."""
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
        with suppress(IntegrityError):  # Rolls back; the catalog may be damaged, but is unchanged.
            stack.close()
