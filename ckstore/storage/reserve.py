"""The reserve: a file that a store keeps where the disk is nearly full, so that it can be given up to free more.

To forget a version takes a log record and SQLite's journal, to rebuild the catalog a second one: on a full disk nothing
could be freed otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckstore.storage import root

NAME = "reserve"

#: Bytes of it, besides those of a second catalog.
SIZE = 512 << 10

#: It is kept where fewer bytes are free than the first, until more are than the second.
LITTLE, PLENTY = 1 << 30, 2 << 30

_STEP = 64 << 10


def keep(store: Path) -> None:
    """See that the store has a reserve where the disk has little room, and none where it has plenty.

    Never fails: what is free may be less than the reserve, which then takes as much as there is.
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
        with path.open("ab", buffering=0) as file:
            while (size := file.tell()) < wanted:
                # At random: a file system that compresses would keep nothing.
                file.write(os.urandom(min(_STEP, wanted - size)))


@contextmanager
def kept(store: Path) -> Iterator[None]:
    """See to the reserve after what takes space: also where it failed, and gave up what it had taken."""
    try:
        yield
    finally:
        keep(store)


@contextmanager
def spent(store: Path) -> Iterator[None]:
    """Give the reserve up for what frees space, and set it aside again afterwards."""
    with suppress(OSError):
        (store / NAME).unlink(missing_ok=True)
    with kept(store):
        yield
