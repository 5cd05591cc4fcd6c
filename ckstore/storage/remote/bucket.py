"""What a store needs of an object store: five requests, and the proof that they do what they say."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ckstore.errors import CkstoreError, UsageError

T = TypeVar("T")

#: Clients would take what follows ? and # for something else than names, and what stands before @ for credentials.
_URL = re.compile(r"(s3|gs|az)://[^/?#@]+(/[^?#]*)?")
#: What is signed with a token has it in its address.
_QUERY = re.compile(r"\?\S*")

#: Options that are not secrets; credentials come from the environment, as the clients of each kind look for them.
OPTIONS = ("endpoint", "region", "skip_signature", "virtual_hosted_style_request", "account_name")

#: Bytes between two ranges that are read as one.
GAP = 1 << 20
#: Seconds for which a request that may have got lost is tried again, and the first pause.
PATIENCE = 60.0
_PAUSE = 0.05
#: Seconds for which the client itself repeats a request, or one part of a pack, before it says that it failed.
_CLIENT_PATIENCE = 10

#: The process whose threads carry out the clients' requests, once there was one.
_process: dict[str, int] = {}


class UnreachableError(CkstoreError):
    """The object store did not answer, or refused; whether it did what was asked is not known."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object: its name, its size in bytes, and when it was written, by the server's clock."""

    name: str
    size: int
    modified: datetime


class Bucket(Protocol):
    """Objects by name. Safe for threads."""

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object, of bytes or of a file, over one that is there."""

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless one is there; returns whether it was written. A lost response may say that it was not.

        Raises
        ------
        UnreachableError
            It may have been written or not.
        """

    def read(self, name: str) -> bytes:
        """All of an object; raises `FileNotFoundError`."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Bytes at (offset, length), close ones in one request; raises `FileNotFoundError`, `EOFError`."""

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """The objects whose names begin with a prefix that ends in a slash, in order, from behind a name on."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, those that are not there as well."""


class ObstoreBucket:
    """A bucket behind S3, Google Cloud Storage or Azure, or what speaks like one of them.

    Parameters
    ----------
    url
        ``s3://bucket/prefix``, ``gs://…`` or ``az://…``.
    options
        Of `OPTIONS`.
    """

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        try:
            from obstore.store import from_url
        except ImportError as error:
            raise UsageError(f"{url} needs the package obstore; install ckstore[remote].") from error
        if _URL.fullmatch(url) is None:
            raise UsageError(
                f"The URL of a store is {url[:2]}://bucket/prefix, without ?, # and @; credentials come from the"
                " environment."
            )
        self.url = url
        plain = options.get("endpoint", "").startswith("http://")
        with self._explained(url):
            made: Any = from_url
            self._store: Any = made(
                url,
                client_options={"allow_http": True} if plain else None,
                retry_config={"retry_timeout": timedelta(seconds=_CLIENT_PATIENCE)},
                **check_options(options),
            )

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object, over one that is there."""
        import obstore

        with self._explained(name):
            obstore.put(self._store, name, data)

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write an object unless one is there."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._explained(name):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def read(self, name: str) -> bytes:
        """All of an object."""
        import obstore

        with self._explained(name, reads=True):
            return bytes(obstore.get(self._store, name).bytes())

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Ranges of an object."""
        import obstore

        starts, lengths = [offset for offset, _ in ranges], [length for _, length in ranges]
        try:
            with self._explained(name, reads=True):
                found = obstore.get_ranges(self._store, name, starts=starts, lengths=lengths, coalesce=GAP)
        except UnreachableError:
            # Servers refuse ranges behind the end, which asking again does not change.
            with self._explained(name, reads=True):
                size = obstore.head(self._store, name)["size"]
            if size >= max(map(sum, ranges), default=0):
                raise
            raise EOFError(f"{name} has fewer bytes than were asked for.") from None
        parts = [bytes(part) for part in found]
        if [len(part) for part in parts] != lengths:
            raise EOFError(f"{name} has fewer bytes than were asked for.")
        return parts

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Objects in order."""
        import obstore

        with self._explained(prefix):
            for batch in obstore.list(self._store, prefix.rstrip("/"), offset=after or None, chunk_size=1000):
                for found in batch:
                    yield Listed(found["path"], found["size"], found["last_modified"])

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        import obstore

        with self._explained(names[0] if names else ""):
            if names:
                obstore.delete(self._store, list(names))

    @contextmanager
    def _explained(self, name: str, *, reads: bool = False) -> Iterator[None]:
        """Turn what the client says into one sentence."""
        from obstore import exceptions

        _check_process(self.url)
        try:
            yield
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            # Asking again would not help, as it does where it is not known what happened.
            raise CkstoreError(
                f"{self.url} refused {name} ({_said(error)}); check the credentials in the environment"
                " and what they allow."
            ) from None
        except (FileNotFoundError, exceptions.BaseError) as error:
            if reads and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(name) from None
            # A bucket that is not there does not come by repeating.
            raise (CkstoreError if isinstance(error, FileNotFoundError) else UnreachableError)(
                f"{self.url} could not be used for {name} ({_said(error)}); check its address, the credentials in the"
                " environment, and the network."
            ) from None


def _said(error: BaseException) -> str:
    """Of what the client says the first line, which has no header in it, and no token."""
    return _QUERY.sub("", str(error).partition("\n")[0].split(" - Server returned")[0]).rstrip(". ")


def _check_process(url: str) -> None:
    """Raise `CkstoreError` in a process that was forked off one that has used a client: it would wait for ever."""
    if _process.setdefault("id", os.getpid()) != os.getpid():
        raise CkstoreError(
            f"{url} cannot be used in a process that was forked from one that has used an object store; start processes"
            " with the method spawn or forkserver."
        )


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Options for the client; raises `UsageError` for an unknown one, or a secret."""
    for name in options:
        if name not in OPTIONS:
            raise UsageError(
                f"There is no option {name} (only {', '.join(OPTIONS)}); credentials come from the environment."
            )
    if re.search("[?#@]", options.get("endpoint", "")):
        raise UsageError("An endpoint is an address, without ?, # and @; credentials come from the environment.")
    return dict(options)


def patiently(request: Callable[[], T]) -> T:
    """The answer to a request that may be repeated, once the object store gives one."""
    deadline, pause = time.monotonic() + PATIENCE, _PAUSE
    while True:
        try:
            return request()
        except UnreachableError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause *= 2 * (0.5 + secrets.randbelow(1000) / 1000)


def put_own(bucket: Bucket, name: str, data: bytes) -> bool:
    """Write an object whose bytes are like no other's; returns whether it is there now, and not another one.

    Raises
    ------
    UnreachableError
        Nobody knows whether it was written.
    """
    return patiently(lambda: _put_own_once(bucket, name, data))


def _put_own_once(bucket: Bucket, name: str, data: bytes) -> bool:
    return put_or_find(bucket, name, data, lambda: bucket.read(name)) in (None, data)


def put_or_find(bucket: Bucket, name: str, data: bytes, find: Callable[[], T]) -> T | None:
    """Write an object; None where it was written, else what `find` finds there, or `FileNotFoundError`.

    Whose an object is that is there, its bytes must say: a lost response makes our own look like another's. "Exists"
    can also mean that somebody else's request is under way, and that nothing is there (409 of S3).

    Raises
    ------
    UnreachableError
        It was not written, and nothing is there; or nobody knows.
    """
    failed = UnreachableError(f"{name} could not be written, and nothing is there; try again.")
    try:
        if bucket.put_absent(name, data):
            return None
    except UnreachableError as error:
        failed = error
    try:
        return find()
    except FileNotFoundError:
        raise failed from None


def prove(bucket: Bucket, url: str) -> None:
    """Raise `UsageError` unless an object store honours conditions and ranges: without them writers undo each other.

    It writes, reads and removes an object.
    """
    name = f"probe/{secrets.token_hex(16)}"
    try:
        lacks = _lack(bucket, name)
    except FileNotFoundError:
        lacks = "does not give back what was just written"
    finally:
        with suppress(CkstoreError):
            bucket.delete([name])
    if lacks:
        raise UsageError(f"{url} cannot hold a store: the server {lacks}; choose one that does, see docs/format.md.")


def _lack(bucket: Bucket, name: str) -> str:
    if not _put_own_once(bucket, name, b"first") or _put_own_once(bucket, name, b"other"):
        return "writes an object although one is there (put if absent, If-None-Match: *)"
    if bucket.read_ranges(name, [(1, 2), (4, 1)]) != [b"ir", b"t"]:
        return "does not give the ranges that were asked for"
    if name not in [item.name for item in bucket.list("probe/")]:
        return "does not list what was just written"
    return ""
