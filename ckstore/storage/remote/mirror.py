"""Mirrors: their directories, stores behind URLs, and the snapshots that new mirrors start from."""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from blake3 import blake3
from msgspec import Meta

from ckstore.errors import (
    CkstoreError,
    ConflictError,
    IntegrityError,
    NoStoreError,
    UnreachableError,
)
from ckstore.runtime import forks
from ckstore.storage import durable, root, zstd
from ckstore.storage.connection import WRITES, Mode, create_file
from ckstore.storage.interface import Storage
from ckstore.storage.remote.bucket import ObstoreBucket
from ckstore.storage.remote.hub import SCHEME, HubRepository
from ckstore.storage.remote.remote_log import FORMAT_FIELD, RemoteLog, StoreId
from ckstore.storage.remote.retries import RetryingStorage, patiently, prove, put_own
from ckstore.storage.schema import FORMAT, Positive, canonical_json, check, decode, expanded_limit, fields, refuse_later

#: The object that makes a prefix a store.
ROOT = "ckstore.json"
#: The environment variable that names the directory of mirrors.
VARIABLE = "CKSTORE_CACHE"
#: Smallest number of records between two snapshots of the catalog.
EVERY = 256
_LEVEL = 6
#: Largest permissions of the directories of mirrors: all processes that use a mirror write to it.
_MODE = 0o770
#: Number of names in one response to a list.
_LISTED = 1000

_Options = Mapping[str, str] | None
_Snapshot = Annotated[str, Meta(pattern=r"\Asnapshots/[0-9a-f]{32}/[0-9]{12}-[0-9a-f]{40}\Z")]
_ROOT = fields({"format": Positive, "store": StoreId}, {"snapshot": _Snapshot | None, "writers": Positive})
_REMEMBERED = fields({"store": StoreId, "options": dict[str, Any]})


@dataclass(frozen=True, slots=True)
class Mirror:
    """A remote store, as this machine sees it: its bucket, the options of its client, and the mirror's directory."""

    url: str
    options: Mapping[str, str]
    storage: Storage
    path: Path
    log: RemoteLog


def cache_directory(given: Path | None = None) -> Path:
    """Return the directory of mirrors: the given one, `$CKSTORE_CACHE`, or `ckstore` in the user's cache."""
    if given is not None:
        return given.expanduser().absolute()
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "ckstore"


def create(url: str, options: _Options = None, cache: Path | None = None) -> Mirror:
    """Create a store behind a URL, after a proof that the server can hold one.

    Raises
    ------
    ConflictError
        A store exists there, or above or below it.
    UsageError
        The server ignores conditions or ranges.
    """
    url = url.rstrip("/")
    bucket = _place(url, options or {})
    _check_alone(bucket, url)
    prove(bucket, url)
    with _usable(cache) as directory:
        durable.new_directory(directory, _MODE)
        _check_closed(directory)
        TemporaryDirectory(dir=directory).cleanup()
    store = secrets.token_hex(16)
    data = canonical_json({"format": FORMAT, "store": store})
    if not put_own(bucket, ROOT, data):
        raise ConflictError(f"{url} is already a store; choose another one or use it as it is.")
    return _mirror(url, options or {}, RetryingStorage(bucket), store, cache, None)


def find(
    url: str, options: _Options = None, cache: Path | None = None, *, mode: Mode = "a", from_log: bool = False
) -> Mirror:
    """Return the mirror of the store behind a URL; a new one starts from the last snapshot.

    With `from_log` it starts empty, under the id that the store has now. Raise `NoStoreError` if the URL has no store,
    `FormatVersionError` if that is of a later ckstore.
    """
    url = url.rstrip("/")
    with _usable(cache) as directory:
        _check_closed(directory, _note(url, cache).parent)
    remembered = _remembered(url, cache)
    options = {**(remembered[1] if remembered else {}), **(options or {})}
    storage = RetryingStorage(_place(url, options))
    if not from_log and remembered is not None and _is_followed(_directory(url, remembered[0], cache)):
        return _mirror(url, options, storage, remembered[0], cache, None)
    try:
        said = _root(storage, url, mode)
    except FileNotFoundError:
        if url == os.environ.get(root.VARIABLE, "").rstrip("/"):
            raise NoStoreError(
                f"${root.VARIABLE} names {url}, which is not a store; correct it or run `ckstore init {url}`."
            ) from None
        raise NoStoreError(f"{url} is not a store; run `ckstore init {url}`.") from None
    return _mirror(url, options, storage, said["store"], cache, None if from_log else said.get("snapshot"))


def _root(storage: Storage, url: str, mode: Mode) -> dict[str, Any]:
    """Return the object that makes a prefix a store; raise `FormatVersionError` for one of a later ckstore."""
    try:
        said: dict[str, Any] = decode(storage.read(ROOT), dict[str, Any])
        check(said, FORMAT_FIELD)
        if said["format"] <= FORMAT:
            check(said, _ROOT)
    except ValueError as error:
        raise IntegrityError(f"{url}/{ROOT} is damaged ({error}); restore it from a copy.") from error
    refuse_later(url, said["format"], FORMAT)
    if mode == "a":
        refuse_later(url, said.get("writers", 0), FORMAT, WRITES)
    return said


def _is_followed(path: Path) -> bool:
    """Return whether a mirror has records, which will prove at the next refresh that the store is the same."""
    return (path / root.CATALOG).is_file() and any(name.isdigit() for name in os.listdir(path / root.LOG))


def needs_snapshot(number: int) -> bool:
    """Return whether a snapshot follows a record: after every 256th, from 4,096 on after n/16 to n/8 more.

    Neither a record's share of the snapshots nor the share of the log that follows one grows with the log.
    """
    return number % max(EVERY, 1 << max(number.bit_length() - 4, 0)) == 0


def put_snapshot(mirror: Mirror, number: int) -> None:
    """Put the mirror's catalog as a snapshot at record `number`, for new mirrors."""
    temporary = durable.temporary_path(mirror.path)
    try:
        durable.new_file(temporary).close()
        with forks.Lock(), closing(sqlite3.connect(mirror.path / root.CATALOG)) as database:
            database.execute("VACUUM INTO ?", [str(temporary)])
        with forks.Lock(), closing(sqlite3.connect(temporary, isolation_level=None)) as database:
            head = database.execute("SELECT value FROM meta WHERE key = 'mirror:head'").fetchone()
        if head is None or int(head[0].partition(" ")[0]) < number:
            return
        data = temporary.read_bytes()
    finally:
        temporary.unlink(missing_ok=True)
    packed = len(data).to_bytes(8, "little") + zstd.compress(data, _LEVEL)
    name = f"snapshots/{mirror.log.store}/{number:012d}-{blake3(packed).hexdigest(length=20)}"
    said = _root(mirror.storage, mirror.url, "a")
    if said["store"] != mirror.log.store:
        return  # Another store has replaced this one.
    mirror.storage.put(name, packed)
    mirror.storage.put(ROOT, canonical_json({**said, "snapshot": name}))


def _mirror(
    url: str, options: Mapping[str, str], storage: Storage, store: str, cache: Path | None, snapshot: str | None
) -> Mirror:
    path = _directory(url, store, cache)
    lines = path / root.LOG
    log = RemoteLog(storage, store, lines)
    with _usable(cache):
        for directory in (path, lines, path / root.PACKS):
            durable.new_directory(directory, _MODE)
        _check_closed(path.parent, path, *(entry for entry in path.iterdir() if entry.is_dir()))
        if not (path / root.MIRROR).exists():
            durable.touch(path / root.MIRROR)
        if not (path / root.CATALOG).is_file():
            temporary = durable.temporary_path(path)
            if snapshot is not None:
                log.prefetch(_number(snapshot))
            try:
                if snapshot is None or not _fetch(storage, snapshot, temporary):
                    create_file(temporary)
                # If two processes create one mirror, the first one counts: both are equal.
                with suppress(FileExistsError):
                    os.link(temporary, path / root.CATALOG)
            finally:
                temporary.unlink(missing_ok=True)
        _remember(url, store, options, cache)
    return Mirror(url, options, storage, path, log)


def _number(snapshot: str) -> int:
    """Return the number of a snapshot's record, from its name."""
    return int(snapshot.rpartition("/")[2].partition("-")[0])


def _place(url: str, options: Mapping[str, str]) -> ObstoreBucket | HubRepository:
    return (HubRepository if url.startswith(SCHEME) else ObstoreBucket)(url, options)


def _check_alone(bucket: ObstoreBucket | HubRepository, url: str) -> None:
    """Raise `ConflictError` if a store lies above or below: each would take the other's objects for its own.

    The search below covers the names in one response to a list; a store that it misses is rare.
    """
    for above in bucket.above():
        try:
            RetryingStorage(above).read(ROOT)
        except UnreachableError:
            raise
        except (CkstoreError, FileNotFoundError):
            continue  # Credentials may be limited to the prefix.
        raise ConflictError(f"{url} lies inside the store {above.url}; choose another prefix.")
    for item in patiently(lambda: list(islice(bucket.list(""), _LISTED))):
        if item.name.endswith(f"/{ROOT}"):
            below = f"{url}/{item.name.removesuffix(f'/{ROOT}')}"
            raise ConflictError(f"The store {below} lies inside {url}; choose another prefix.")


def _check_closed(*directories: Path) -> None:
    """Raise `CkstoreError` if everyone may write to a directory of the cache: mirrors are believed."""
    for directory in directories if os.name == "posix" else ():
        with suppress(FileNotFoundError):
            if directory.stat().st_mode & stat.S_IWOTH:
                raise CkstoreError(
                    f"Everyone may write to the cache {directory}; run `chmod o-w {directory}`, or name another"
                    f" directory with ${VARIABLE} or cache=."
                )


@contextmanager
def _usable(cache: Path | None) -> Iterator[Path]:
    """Yield the directory of mirrors; turn errors of its use into one sentence with the remedy."""
    directory = cache_directory(cache)
    try:
        yield directory
    except CkstoreError:
        raise
    except OSError as error:
        raise CkstoreError(
            f"The cache {directory} cannot be used ({error.strerror or error}); name another directory with"
            f" ${VARIABLE} or cache=."
        ) from error


def _fetch(storage: Storage, name: str, path: Path) -> bool:
    """Write a snapshot's catalog to a path; return False if it is missing or damaged, since the log has everything."""
    try:
        data = storage.read(name)
    except FileNotFoundError:
        return False
    length = int.from_bytes(data[:8], "little")
    if blake3(data).hexdigest(length=20) != name.rpartition("-")[2] or length > expanded_limit(len(data)):
        return False
    with suppress(ValueError):
        catalog = zstd.expand(data[8:], length)
        with durable.new_file(path) as file:
            file.write(catalog)
        return True
    return False


def _remembered(url: str, cache: Path | None) -> tuple[str, dict[str, str]] | None:
    """Return id and options of the store behind a URL at its last use from this machine."""
    try:
        said = decode(_note(url, cache).read_bytes(), _REMEMBERED)
    except (OSError, ValueError):
        return None
    return said["store"], {str(name): str(value) for name, value in said["options"].items()}


def _remember(url: str, store: str, options: Mapping[str, str], cache: Path | None) -> None:
    path = _note(url, cache)
    data = canonical_json({"url": url, "store": store, "options": dict(options)})
    with suppress(OSError):
        if path.exists() and path.read_bytes() == data:
            return
    durable.new_directory(path.parent, _MODE)
    durable.write_cached(path, data)


def _note(url: str, cache: Path | None) -> Path:
    return cache_directory(cache) / "urls" / f"{_short(url)}.json"


def _directory(url: str, store: str, cache: Path | None) -> Path:
    """Return the directory of a store's mirror: a copied bucket has the same id, but its own changes."""
    return cache_directory(cache) / f"{store}-{_short(url)}"


def _short(url: str) -> str:
    return str(blake3(url.encode()).hexdigest(length=20))
