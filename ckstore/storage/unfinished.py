"""Places for what is written outside of a store and is not whole yet, and what killed processes left of such."""

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

#: Names in a place: of what is written, and of what stood where it goes.
_MADE, _FORMER = "made", "former"

#: Seconds for which a place must have been left untouched: its maker locks it only once it is there.
GRACE = 60.0


def begin(directory: Path) -> AbstractContextManager[tuple[Path, Path]]:
    """Make a place in `directory`: a path to write to, and one for what stood at the target; gone with the block.

    It is locked as long as the process runs, which tells `sweep` that it is in use, on whatever host.
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
    """Remove the places in `directory` that processes left which are provably gone.

    They are of our kind, of a process that does not run, locked by none, and hold nothing that stood there before.
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
    """A descriptor that holds the only lock of a directory; None where another has it, or nobody can."""
    try:
        import fcntl

        descriptor = forks.open_unshared(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        forks.close_unshared(descriptor)
        return None
    return descriptor
