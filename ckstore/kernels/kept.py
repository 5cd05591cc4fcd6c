"""Decides where compiled kernels are kept: where numba keeps them, else in a temporary directory.

Of `NUMBA_CACHE_DIR`, the directory of the sources, the user's cache and a temporary directory, the first that can be
written to. An image is built by one user and run by another, to whom it is read-only: compiled code that lies in a
place which comes first and cannot be written to is linked to the one that can, and found there.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba  # noqa: F401  # All of it first: where another thread imports it, its parts alone are not waited for.
from numba.core import caching, config

from ckstore.errors import CkstoreError
from ckstore.runtime.compiling import kept_in_passing
from ckstore.runtime.numba_hooks import ask_first

_KERNELS = Path(__file__).parent


class Temporary(caching.UserWideCacheLocator):  # type: ignore[misc]
    """A directory of the user's among the temporary ones: later processes find it until the machine clears it."""

    def __init__(self, function: Any, source: str) -> None:
        super().__init__(function, source)
        self._cache_path = os.path.join(_temporary(), self.get_suitable_cache_subpath(source))


class Kept(caching.InTreeCacheLocator):  # type: ignore[misc]
    """What numba asks first where it keeps a function; answers for kernels alone."""

    @classmethod
    def from_function(cls, function: Any, source: str) -> Any:
        """The place of a function of the file `source`; None for what is no kernel of ours.

        Raises
        ------
        CkstoreError
            Nothing can be written to, not even the directory for temporary files.
        """
        if not Path(source).is_relative_to(_KERNELS):
            return None
        read_only: list[str] = []
        kinds = [caching.InTreeCacheLocator, caching.UserWideCacheLocator, Temporary]
        for kind in [caching.UserProvidedCacheLocator, *kinds] if config.CACHE_DIR else kinds:
            with suppress(OSError):
                place = kind(function, source)
                path = place.get_cache_path()
                if not _is_writable(path):
                    read_only.append(path)
                    continue
                for former in reversed(read_only):
                    _link(former, path)
                return place
        raise CkstoreError(
            "There is no place for compiled kernels: set NUMBA_CACHE_DIR to a directory that can be written to."
        )


@cache
def _is_writable(path: str) -> bool:
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


@cache
def _link(former: str, path: str) -> None:
    """Let what was compiled into a directory be found in another one, unless that has something later."""
    with suppress(OSError):
        for entry in os.scandir(former):
            target = os.path.join(path, entry.name)
            with suppress(FileNotFoundError):
                if not entry.name.endswith((".nbi", ".nbc")) or os.stat(target).st_mtime >= entry.stat().st_mtime:
                    continue
            beside = f"{target}.{os.getpid()}"
            os.symlink(entry.path, beside)
            os.replace(beside, target)


@cache
def _temporary() -> str:
    path = os.path.join(tempfile.gettempdir(), f"ckstore-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        path = tempfile.mkdtemp(prefix="ckstore-")  # Code from a place that others write to would be run.
    kept_in_passing(path)
    return path


def keep() -> None:
    """Have numba ask us first."""
    ask_first(Kept)
