"""The decorator of kernels that Python calls, and the directory that keeps their compiled code.

The directory is the first writable one of `NUMBA_CACHE_DIR`, the directory of the sources, the user's cache and a
temporary directory. An image may be built by one user and run by another, for whom it is read-only. Compiled code in an
earlier, read-only directory is linked into the writable one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numba import njit
from numba.core import caching, config

from ckstore.errors import CkstoreError
from ckstore.runtime.compiling import kept_in_passing

Function = TypeVar("Function", bound=Callable[..., Any])

_KERNELS = Path(__file__).parent


class Decorator(Protocol):
    """A decorator that compiles a function and, to the type checker, keeps its type."""

    def __call__(self, function: Function, /) -> Function:
        """Compile `function` at its first call."""
        ...


kernel: Decorator = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy", no_cfunc_wrapper=True)
"""Compile a function at its first call, to machine code that runs without the GIL and is cached on disk."""


class Kept(caching.InTreeCacheLocator):  # type: ignore[misc]
    """The first locator that numba asks for the cache of a function; it answers for kernels alone."""

    @classmethod
    def from_function(cls, function: Any, source: str) -> Any:
        """Return the cache of a function of the file `source`; None if it is not a kernel.

        Raises
        ------
        CkstoreError
            No directory is writable, not even the one for temporary files.
        """
        if not Path(source).is_relative_to(_KERNELS):
            return None
        read_only: list[str] = []
        kinds = [caching.InTreeCacheLocator, caching.UserWideCacheLocator, Temporary]
        for kind in [caching.UserProvidedCacheLocator, *kinds] if config.CACHE_DIR else kinds:
            with suppress(OSError):
                place = kind(function, source)
                place.get_source_stamp = _sources
                path = place.get_cache_path()
                if not _is_writable(path):
                    read_only.append(path)
                    continue
                for former in reversed(read_only):
                    _link(former, path)
                return place
        raise CkstoreError("No directory for compiled kernels is writable: set NUMBA_CACHE_DIR to one that is.")


class Temporary(caching.UserWideCacheLocator):  # type: ignore[misc]
    """A temporary directory of the user: later processes find it until the machine clears it."""

    def __init__(self, function: Any, source: str) -> None:
        super().__init__(function, source)
        self._cache_path = os.path.join(_temporary(), self.get_suitable_cache_subpath(source))


@cache
def _sources() -> str:
    """Return the SHA-256 of the sources of all kernels, by name, for which compiled code is valid.

    Numba looks at the function's own module, but kernels contain code and constants of others: after an update of one
    of those alone, old code would run on arrays made for the new one.
    """
    digest = sha256()
    for path in sorted(_KERNELS.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


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
    """Link compiled code of one directory into another, unless that has a later version."""
    with suppress(OSError):
        for entry in os.scandir(former):
            target = os.path.join(path, entry.name)
            with suppress(FileNotFoundError):
                if not entry.name.endswith((".nbi", ".nbc")) or os.stat(target).st_mtime >= entry.stat().st_mtime:
                    continue
            partial = f"{target}.{os.getpid()}"
            os.symlink(entry.path, partial)
            os.replace(partial, target)


@cache
def _temporary() -> str:
    path = os.path.join(tempfile.gettempdir(), f"ckstore-{os.getuid()}")
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        path = tempfile.mkdtemp(prefix="ckstore-")  # Code from a place that others can write to would be executed.
    kept_in_passing(path)
    return path
