"""The reserve: a file that a store keeps on a nearly full disk, and deletes when it needs space to free more.

Forgetting a version needs a log record and SQLite's journal, rebuilding the catalog a second catalog. Without the
reserve, a full disk could not be freed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckstore.storage import durable, root

NAME = "reserve"

#: Size in bytes, in addition to a second catalog.
SIZE = 512 << 10

#: The reserve is created below the first number of free bytes, and deleted above the second.
LITTLE, PLENTY = 1 << 30, 2 << 30

_STEP = 64 << 10


def keep(store: Path) -> None:
    """Create the reserve on a nearly full disk; delete it if there is plenty of space.

    Never fails: with less space than that, the reserve takes all of it.
    """
    path = store / NAME
    with suppress(OSError):
        status = os.statvfs(store)
        free = status.f_bavail * status.f_frsize
        if free > PLENTY:
            path.unlink(missing_ok=True)
        if free > LITTLE:
            return
        wanted = SIZE + (store / root.CATALOG).stat().st_size
        durable.touch(path)
        with path.open("ab", buffering=0) as file:
            while (size := file.tell()) < wanted:
                # Random bytes: a file system with compression would reserve nothing for others.
                file.write(os.urandom(min(_STEP, wanted - size)))


@contextmanager
def kept(store: Path) -> Iterator[None]:
    """Renew the reserve after an operation that takes space, even a failed one."""
    try:
        yield
    finally:
        keep(store)


@contextmanager
def spent(store: Path) -> Iterator[None]:
    """Delete the reserve for an operation that frees space, and renew it afterwards."""
    with suppress(OSError):
        (store / NAME).unlink(missing_ok=True)
    with kept(store):
        yield
