"""Temporary places for unfinished output outside a store, and the removal of those of killed processes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ckstore.runtime import forks
from ckstore.storage import durable

_PLACE = re.compile(r"\.tmp-\d+-[0-9a-f]{16}")

#: Names in a place: of the output, and of the target's former contents.
_MADE, _FORMER = "made", "former"

#: Minimal age in seconds of an abandoned place: its maker locks it only after creating it.
GRACE = 60.0


def begin(directory: Path) -> AbstractContextManager[tuple[Path, Path]]:
    """Create a place in `directory`: a path for the output, and one for the target's former contents.

    The place is removed after the block. It is locked while the process runs, so that `sweep` on any host spares it.
    """
    place = durable.temporary_path(directory)
    place.mkdir(mode=0o700)
    return _held(place)


@contextmanager
def _held(place: Path) -> Iterator[tuple[Path, Path]]:
    lock = _locked(place)
    try:
        yield place / _MADE, place / _FORMER
    finally:
        if not (place / _FORMER).exists():
            shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            forks.close_unshared(lock)


def sweep(directory: Path) -> None:
    """Remove abandoned places in `directory`, if their processes are provably dead.

    Such a place has our form, an id of a dead process and no lock, and contains nothing of the target.
    """
    with suppress(OSError):
        for path in durable.find_temporaries(directory, GRACE):
            ours = _PLACE.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
            if not ours or not set(os.listdir(path)) <= {_MADE}:
                continue
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                forks.close_unshared(lock)


def _locked(place: Path) -> int | None:
    """Return a descriptor with an exclusive lock of a directory; None if it cannot be locked."""
    try:
        import fcntl

        descriptor = forks.open_unshared(place, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        forks.close_unshared(descriptor)
        return None
    return descriptor
