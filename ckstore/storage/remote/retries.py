"""Repeated requests to an object store that does not answer, and a proof that a server can hold a store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ckstore.errors import CkstoreError, UnreachableError, UsageError
from ckstore.storage.interface import Listed, Storage
from ckstore.storage.remote.bucket import NoServerError

T = TypeVar("T")

#: Seconds of retries for a request without a response, and the first pause.
PATIENCE = 60.0
_PAUSE = 0.05


class RetryingStorage:
    """A place whose requests are repeated while it does not answer, but for `put_absent`: see `put_or_find`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.read_price = storage.read_price

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object."""
        patiently(lambda: self._storage.put(name, data))

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write an object if absent; ask once."""
        return self._storage.put_absent(name, data)

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        return patiently(lambda: self._storage.read(name))

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of an object."""
        return patiently(lambda: self._storage.read_range(name, offset, length))

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Yield objects in order."""
        return iter(patiently(lambda: [*self._storage.list(prefix, after)]))

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        patiently(lambda: self._storage.delete(names))


def patiently(request: Callable[[], T]) -> T:
    """Return the response to a repeatable request; retry while the object store does not answer."""
    deadline, pause = time.monotonic() + PATIENCE, _PAUSE
    while True:
        try:
            return request()
        except NoServerError:
            raise
        except UnreachableError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause *= 2 * (0.5 + secrets.randbelow(1000) / 1000)


def put_own(storage: Storage, name: str, data: bytes) -> bool:
    """Write an object with unique bytes if absent; return whether the object under that name is this one.

    Raise `UnreachableError` if the outcome is unknown.
    """
    return patiently(lambda: _put_own_once(storage, name, data))


def _put_own_once(storage: Storage, name: str, data: bytes) -> bool:
    return put_or_find(storage, name, data, lambda: storage.read(name)) in (None, data)


def put_or_find(storage: Storage, name: str, data: bytes, find: Callable[[], T]) -> T | None:
    """Write an object if absent and return None; otherwise return the result of `find`, or raise `FileNotFoundError`.

    The bytes of an existing object must show its writer: after a lost response, our own looks like another's. "Exists"
    can also mean that another request is in flight and no object exists yet (409 of S3).

    Raises
    ------
    UnreachableError
        The object was not written and none exists, or the outcome is unknown.
    """
    failed = UnreachableError(f"{name} could not be written, and does not exist; try again.")
    try:
        if storage.put_absent(name, data):
            return None
    except UnreachableError as error:
        failed = error
    try:
        return find()
    except FileNotFoundError:
        raise failed from None


def prove(storage: Storage, url: str) -> None:
    """Raise `UsageError` unless a place honours conditions and ranges: without them writers lose changes.

    Writes, reads and removes an object.
    """
    name = f"probe/{secrets.token_hex(16)}"
    try:
        lacks = _lack(storage, name)
    except FileNotFoundError:
        lacks = "does not return an object that was just written"
    finally:
        with suppress(CkstoreError):
            storage.delete([name])
    if lacks:
        raise UsageError(f"{url} cannot hold a store: the server {lacks}; choose one that does, see docs/format.md.")


def _lack(storage: Storage, name: str) -> str:
    if not _put_own_once(storage, name, b"first") or _put_own_once(storage, name, b"other"):
        return "overwrites an existing object (put if absent, If-None-Match: *)"
    if storage.read_range(name, 1, 2) != b"ir":
        return "does not return the requested range"
    if name not in [item.name for item in storage.list("probe/")]:
        return "does not list an object that was just written"
    return ""
