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
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ckstore.errors import CkstoreError, UnreachableError, UsageError
from ckstore.runtime import forks

T = TypeVar("T")

#: Clients would take what follows ? and # for something else than names, and what stands before @ for credentials.
_URL = re.compile(r"(s3|gs|az)://[A-Za-z0-9._$-]+(/[^?#]*)?")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^?#@\s]*)?", re.IGNORECASE)
#: What is signed with a token has it in its address.
_QUERY = re.compile(r"\?\S*")
#: How a server names what is wrong.
_CODE = re.compile(r"<Code>(\w+)</Code>")
#: Where the client asks for the role of the machine once the environment has no credentials, and what it says where
#: the environment has some of them.
_LACKING = re.compile(
    "/latest/(api/token|meta-data/)|/computeMetadata/|/metadata/identity/|Missing (AccessKeyId|SecretAccessKey)"
    "|Account must be specified"
)
#: What the client and servers say where asking again would not help.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_ELSEWHERE = re.compile("Received redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
_DENIED = re.compile(r"status code: 40[13]\b|code: AccessDenied|<Code>(ExpiredToken|InvalidToken)</Code>")
#: How the client says that there is no server at an address.
_NO_SERVER = {"ConnectionRefused": "connection refused", "dns error": "no host of that name", "BadScheme": "not https"}
_ADDRESS = re.compile(r"https?://[^/\s]+")
#: Some servers refuse those who ask too often, too.
_BUSY = re.compile("SlowDown|[rR]ateLimitExceeded")
#: The variables of the environment in which each kind looks for credentials first.
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
#: And the address of a server.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}

#: Options that are not secrets; credentials come from the environment, as the clients of each kind look for them.
OPTIONS = ("endpoint", "region", "skip_signature", "virtual_hosted_style_request", "account_name", "allow_http")

#: Bytes between two ranges that are read as one.
GAP = 1 << 20
#: Seconds for which a request that may have got lost is tried again, and the first pause.
PATIENCE = 60.0
_PAUSE = 0.05
#: Seconds for which the client itself repeats a request, or one part of a pack, before it says that it failed.
_CLIENT_PATIENCE = 10

#: The forks until the process whose threads carry out the clients' requests, once there was one.
_process: dict[str, int] = {}


class ForeignNameError(CkstoreError):
    """Some object has a name that no client reads, and names that are listed with it cannot be told."""


class NoServerError(UnreachableError):
    """There is no server at an address that never answered; asking again would not help."""


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
        """The objects whose names begin with a prefix that ends in a slash, in order, from behind a name on.

        Raises
        ------
        ForeignNameError
            One of them has a name such as `a/../b`.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, those that are not there as well."""

    def above(self, name: str) -> str | None:
        """The URL of a prefix above this one that has an object of this name, if any is seen."""


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
                f"The URL of a store is {url[:2]}://bucket/prefix, with the plain name of a bucket and without ?, #"
                " and @; credentials come from the environment."
            )
        for part in url.rstrip("/").split("/")[3:]:
            if part in ("", ".", ".."):
                found = f"the part {part}" if part else "an empty part (//)"
                raise UsageError(f"The prefix of {url} has {found}; leave it out.")
        self.url = url
        self._options = options
        self._answered = False
        given = check_options(options)
        # Whoever names an address of http asks for http.
        plain = any(address.lower().startswith("http:") for address in _endpoints(url[:2], options))
        allowed = given.pop("allow_http", "true" if plain else None)
        with self._explained(url):
            made: Any = from_url
            self._store: Any = made(
                url,
                client_options=None if allowed is None else {"allow_http": allowed},
                retry_config={"retry_timeout": timedelta(seconds=_CLIENT_PATIENCE)},
                **given,
            )
        self._answered = False  # Nothing was asked for yet.

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

        if not names:
            return
        with self._explained(names[0]):
            try:
                obstore.delete(self._store, list(names))
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                # Google Cloud Storage and Azure end at a name that is gone.
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, [name])

    def above(self, name: str) -> str | None:
        """The nearest prefix to the bucket that has an object of this name."""
        parts = self.url.split("/")
        for end in range(3, len(parts)):
            bucket = ObstoreBucket("/".join(parts[:end]), self._options)
            try:
                patiently(partial(bucket.read, name))
            except UnreachableError:
                raise
            except (CkstoreError, FileNotFoundError):
                continue  # Credentials may be for the prefix alone.
            return bucket.url
        return None

    @contextmanager
    def _explained(self, name: str, *, reads: bool = False) -> Iterator[None]:
        """Turn what the client says into one sentence."""
        from obstore import exceptions

        _check_process(self.url)
        try:
            yield
            self._answered = True
        except (FileNotFoundError, exceptions.BaseError) as error:
            if reads and isinstance(error, FileNotFoundError):
                self._answered = True
                raise FileNotFoundError(name) from None
            if isinstance(error, exceptions.InvalidPathError):
                raise ForeignNameError(
                    f"{self.url} cannot be listed below {name}: it has an object of a name that ckstore never writes"
                    f" ({_said(error)}); delete that object."
                ) from None
            final = self._final(name, error)
            if final:
                raise CkstoreError(final) from None
            why = (
                None if self._answered else next((why for said, why in _NO_SERVER.items() if said in str(error)), None)
            )
            if why is not None:
                address = _ADDRESS.search(str(error))
                raise NoServerError(
                    f"{address[0] if address else self.url} cannot be reached ({why}); start the server, or correct its"
                    f" address: the option endpoint, or {' or '.join(_ENDPOINTS[self.url[:2]])} in the environment."
                ) from None
            raise UnreachableError(
                f"{self.url} could not be used for {name} ({_said(error)}); check its address, the credentials in the"
                " environment, and the network."
            ) from None

    def _final(self, name: str, error: Exception) -> str | None:
        """What to say where asking again would not help, as it does where it is not known what happened."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        text = str(error)
        if _LACKING.search(text):
            # The service that knows the role of the machine may be away for a moment, too.
            variables = _VARIABLES[self.url[:2]]
            return None if self._answered else f"There are no credentials for {self.url}; set {variables}."
        if isinstance(error, FileNotFoundError) or _NO_BUCKET.search(text):
            bucket = self.url.split("/")[2]
            return f"There is no bucket {bucket}, or these credentials may not see it; make it first."
        if _ELSEWHERE.search(text):
            return f"The bucket of {self.url} is in another region ({_said(error)}); set AWS_REGION to that one."
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or _DENIED.search(text)
        if denied and not _BUSY.search(text):
            return (
                f"{self.url} refused {name} ({_said(error)}); check the credentials in the environment"
                " and what they allow."
            )
        return None


def _said(error: BaseException) -> str:
    """Of what the client says the first line, which has no header in it, and no token; and the server's code."""
    text = _QUERY.sub("", str(error).partition("\n")[0].split(" - Server returned")[0]).rstrip(". ")
    code = _CODE.search(str(error))
    return f"{text}: {code[1]}" if code else text


def _check_process(url: str) -> None:
    """Raise `CkstoreError` in a process that was forked off one that has used a client: it would wait for ever."""
    if _process.setdefault("generation", forks.generation()) != forks.generation():
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
    allowed = options.get("allow_http", "true")
    if allowed not in ("true", "false"):
        raise UsageError(f"The option allow_http is true or false, not {allowed}.")
    return dict(options)


def _endpoints(kind: str, options: Mapping[str, str]) -> list[str]:
    """The addresses of servers that the environment and the options name; raises `UsageError` for what is none."""
    named = {f"${variable}": os.environ[variable] for variable in _ENDPOINTS[kind] if variable in os.environ}
    if "endpoint" in options:
        named["the option endpoint"] = options["endpoint"]
    for source, address in named.items():
        if _ENDPOINT.fullmatch(address) is None:
            raise UsageError(
                f"An endpoint is an address, without ?, # and @, such as https://minio.example:9000; correct {source}"
                " (credentials come from other variables)."
            )
    return list(named.values())


def patiently(request: Callable[[], T]) -> T:
    """The answer to a request that may be repeated, once the object store gives one."""
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
