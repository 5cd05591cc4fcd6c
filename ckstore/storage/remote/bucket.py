"""A store's place in an object store: S3, Google Cloud Storage, Azure, or a server with one of their APIs."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ckstore.errors import CkstoreError, UnreachableError, UsageError
from ckstore.runtime import forks
from ckstore.storage.interface import Listed

#: Clients would parse ? and # as the end of the name, and the part before @ as credentials.
_URL = re.compile(r"(s3|gs|az)://[A-Za-z0-9._$-]+(/[^?#]*)?")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^?#@\s]*)?", re.IGNORECASE)
#: Signed URLs contain a token.
_QUERY = re.compile(r"\?\S*")
#: Error code in a server's response.
_CODE = re.compile(r"<Code>(\w+)</Code>")
#: Requests for the role of the machine, sent if the environment has no credentials, and the messages for incomplete
#: credentials.
_LACKING = re.compile(
    "/latest/(api/token|meta-data/)|/computeMetadata/|/metadata/identity/|Missing (AccessKeyId|SecretAccessKey)"
    "|Account must be specified"
)
#: Messages of errors that a retry cannot fix.
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_ELSEWHERE = re.compile("Received redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed")
_DENIED = re.compile(r"status code: 40[13]\b|code: AccessDenied|<Code>(ExpiredToken|InvalidToken)</Code>")
#: The client's messages for an address without a server.
_NO_SERVER = {"ConnectionRefused": "connection refused", "dns error": "no host of that name", "BadScheme": "not https"}
_ADDRESS = re.compile(r"https?://[^/\s]+")
#: Some servers send a refusal to limit the rate of requests.
_BUSY = re.compile("SlowDown|[rR]ateLimitExceeded")
#: Variables in which each kind of client first looks for credentials.
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
#: Variables with the address of a server.
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}

#: Options without secrets; credentials come from the environment, as each kind of client expects them.
OPTIONS = (
    "endpoint", "region", "skip_signature", "virtual_hosted_style_request", "account_name", "allow_http", "bandwidth",
)  # fmt: skip

#: The price of a byte that is read over a link: a saving of one stored byte justifies reading three more.
READ_PRICE = 1 / 3
#: Bytes of a file that are sent at once, if the bandwidth is limited.
_PIECE = 1 << 18
#: Seconds of retries by the client itself, for a request or one part of a pack.
_CLIENT_PATIENCE = 10

#: Number of forks up to the process that runs the clients' threads; None before the first client.
_process: dict[str, int] = {}


class ForeignNameError(CkstoreError):
    """An object's name cannot be read by any client, which hides the names listed with it."""


class NoServerError(UnreachableError):
    """No server has ever answered at an address; a retry would not help."""


class ObstoreBucket:
    """A bucket on S3, Google Cloud Storage or Azure, or on a server with one of their APIs.

    The URL is ``s3://bucket/prefix``, ``gs://…`` or ``az://…``; the options are listed in `OPTIONS`.
    """

    read_price = READ_PRICE

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
        # An http address allows http.
        plain = any(address.lower().startswith("http:") for address in _endpoints(url[:2], options))
        allowed = given.pop("allow_http", "true" if plain else None)
        rate = given.pop("bandwidth", None)
        self._pace = None if rate is None else _Pace(float(rate))
        with self._explained(url):
            made: Any = from_url
            self._store: Any = made(
                url,
                client_options=None if allowed is None else {"allow_http": allowed},
                retry_config={"retry_timeout": timedelta(seconds=_CLIENT_PATIENCE)},
                **given,
            )
        self._answered = False  # Whether the server has ever answered.

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object; overwrite an existing one."""
        import obstore

        paced = data if self._pace is None or not isinstance(data, Path) else self._pace.pieces(data)
        with self._explained(name):
            obstore.put(self._store, name, paced)

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write an object if absent."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._explained(name):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        import obstore

        with self._explained(name, reads=True):
            return bytes(obstore.get(self._store, name).bytes())

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of an object."""
        import obstore

        try:
            with self._explained(name, reads=True):
                found = bytes(obstore.get_range(self._store, name, start=offset, length=length))
        except UnreachableError:
            # Servers refuse ranges after the end; a retry would not help.
            with self._explained(name, reads=True):
                size = obstore.head(self._store, name)["size"]
            if size >= offset + length:
                raise
            found = b""
        if len(found) != length:
            raise EOFError(f"{name} is shorter than the requested range.")
        return found

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Yield objects in order."""
        import obstore

        with self._explained(prefix):
            for batch in obstore.list(self._store, prefix.rstrip("/"), offset=after or None, chunk_size=1000):
                for found in batch:
                    yield Listed(found["path"], found["size"], found["last_modified"])

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        import obstore

        if not names:
            return
        with self._explained(names[0]):
            try:
                obstore.delete(self._store, list(names))
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                # Google Cloud Storage and Azure stop at a missing name.
                for name in names:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, [name])

    def above(self) -> Iterator[ObstoreBucket]:
        """Yield the places of all prefixes above this one, the shortest first."""
        parts = self.url.split("/")
        for end in range(3, len(parts)):
            yield ObstoreBucket("/".join(parts[:end]), self._options)

    @contextmanager
    def _explained(self, name: str, *, reads: bool = False) -> Iterator[None]:
        """Turn the client's error into one sentence."""
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
                    f"{self.url} cannot be listed below {name}: it has an object with a name that ckstore never writes"
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
        """Return the message for an error that a retry cannot fix; None for an unknown outcome."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        text = str(error)
        if _LACKING.search(text):
            # The service for the machine's role may be unavailable for a moment, too.
            variables = _VARIABLES[self.url[:2]]
            return None if self._answered else f"No credentials found for {self.url}; set {variables}."
        if isinstance(error, FileNotFoundError) or _NO_BUCKET.search(text):
            bucket = self.url.split("/")[2]
            return f"Bucket {bucket} does not exist, or these credentials may not see it; create it first."
        if _ELSEWHERE.search(text):
            return f"The bucket of {self.url} is in another region ({_said(error)}); set AWS_REGION to that one."
        denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or _DENIED.search(text)
        if denied and not _BUSY.search(text):
            return (
                f"{self.url} refused {name} ({_said(error)}); check the credentials in the environment"
                " and their permissions."
            )
        return None


class _Pace:
    """Limits the bytes a second of all files that are sent."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def pieces(self, path: Path) -> Iterator[bytes]:
        """Yield the bytes of a file, each piece when it is due."""
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                with self._lock:
                    begin = max(time.monotonic(), self._free)
                    self._free = begin + len(piece) / self._rate
                time.sleep(max(begin - time.monotonic(), 0.0))
                yield piece


def _said(error: BaseException) -> str:
    """Return the first line of the client's message, without headers and tokens, and the server's code."""
    text = _QUERY.sub("", str(error).partition("\n")[0].split(" - Server returned")[0]).rstrip(". ")
    code = _CODE.search(str(error))
    return f"{text}: {code[1]}" if code else text


def _check_process(url: str) -> None:
    """Raise `CkstoreError` in a process forked from one that has used a client: it would wait forever."""
    if _process.setdefault("generation", forks.generation()) != forks.generation():
        raise CkstoreError(
            f"{url} cannot be used in a process that was forked from one that has used an object store; start processes"
            " with the method spawn or forkserver."
        )


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return options for the client; raise `UsageError` for an unknown option or a secret."""
    for name in options:
        if name not in OPTIONS:
            raise UsageError(
                f"Unknown option {name} (only {', '.join(OPTIONS)}); credentials come from the environment."
            )
    allowed = options.get("allow_http", "true")
    if allowed not in ("true", "false"):
        raise UsageError(f"The option allow_http must be true or false, not {allowed}.")
    rate = options.get("bandwidth", "1")
    if re.fullmatch("[0-9]{1,15}", rate) is None or int(rate) == 0:
        raise UsageError(f"The option bandwidth is a number of bytes a second, not {rate}.")
    return dict(options)


def _endpoints(kind: str, options: Mapping[str, str]) -> list[str]:
    """Return the servers' addresses in the environment and the options; raise `UsageError` for an invalid one."""
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
