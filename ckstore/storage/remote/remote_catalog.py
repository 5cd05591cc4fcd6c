"""The catalog of a mirror: its rows follow the log, and the put of a record commits a change."""

from __future__ import annotations

import inspect
import math
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ckstore.errors import CkstoreError, ConflictError, IntegrityError, ReadOnlyError
from ckstore.runtime.lru import Lru
from ckstore.storage import durable, root
from ckstore.storage.catalog import Catalog, recorded
from ckstore.storage.catalog_reader import INCOMPLETE, META, NAMES, SWEPT, VERSION
from ckstore.storage.catalog_tables import PACK_NAME, bounded
from ckstore.storage.connection import BUSY_TIMEOUT, WRITERS, WRITES, Mode, create_file
from ckstore.storage.pack import PackInfo
from ckstore.storage.remote import retries
from ckstore.storage.remote.calls import call_again, plain_call
from ckstore.storage.remote.mirror import EVERY, Mirror, needs_snapshot, put_snapshot
from ckstore.storage.remote.remote_log import BehindError, Head, RemoteLog
from ckstore.storage.rows import META_ROWS
from ckstore.storage.schema import FORMAT, refuse_later

T = TypeVar("T")

#: Row of `meta` with the mirror's position: number and digest of a record.
HEAD = "mirror:head"
#: Tables that are equal in all mirrors, except for the ids of rows.
_TABLES = {
    "versions": f"SELECT {VERSION} FROM versions v {NAMES} ORDER BY 1",
    "packs": f"SELECT {PACK_NAME}, bytes FROM packs p ORDER BY 1",
    "references": f"SELECT r.version, {PACK_NAME}, r.blobs, r.objects FROM version_packs r"
    " JOIN packs p ON p.id = r.pack"
    " ORDER BY 1, 2",
    "bases": f"SELECT {PACK_NAME}, {bounded('b.name')} FROM pack_bases l"
    " JOIN packs p ON p.id = l.pack JOIN packs b ON b.id = l.base"
    " ORDER BY 1, 2",
    "metrics": f"SELECT {bounded('o.name')}, {bounded('m.name')}, value, version FROM metrics m"
    " JOIN runs o ON o.id = m.run ORDER BY 1, 2, 3, 4",
    "likeness": "SELECT band, version FROM likeness ORDER BY 1, 2",
    "tags": f"SELECT {bounded('name')}, version FROM tags ORDER BY 1",
    "runs": f"SELECT {bounded('name')} FROM runs ORDER BY 1",
    "objects": f"SELECT o.key, {PACK_NAME}, o.slot FROM objects o JOIN packs p ON p.id = o.pack ORDER BY 1",
    "policies": f"SELECT {bounded('run')}, policy FROM policies ORDER BY 1",
    "collections": f"SELECT {META} FROM meta t"
    f" WHERE key NOT IN ('store', '{HEAD}', '{SWEPT}', '{INCOMPLETE}') ORDER BY 1",
}
#: Prefix of the rows of `meta` for removed packs; the pack's name follows.
GONE = "gone:"


class RemoteCatalog(Catalog):
    """The rows of a remote store, in the mirror, which itself is always writable."""

    is_only = False

    def __init__(self, mirror: Mirror, mode: Mode = "r") -> None:
        # Other processes of the mirror hold its lock while they put a record, or check for one.
        super().__init__(mirror.path, "a", BUSY_TIMEOUT + 2 * retries.PATIENCE)
        self._mirror = mirror
        self._log = mirror.log
        self._mode = mode
        self._calls: list[Any] | None = None
        self._notes: list[Mapping[str, Any]] = []
        self._within = False
        self._heard = -math.inf
        self._named: Lru[str, tuple[Collection[int], Collection[str]]] = Lru(EVERY)
        self._read: Lru[tuple[int, Head], list[dict[str, Any]]] = Lru(1)

    def refresh(self, within: float = 0.0) -> None:
        """Apply the records of others; takes one request if there are none."""
        asked = time.monotonic()
        if self._heard + within > asked:
            return
        while records := self._log.after(self._head()):
            if self._follow(records):
                break
        self._check_writer()
        self._heard = asked

    def _check_writer(self) -> None:
        """Raise `FormatVersionError` in a writer whose format is earlier than that of others."""
        if self._mode == "a":
            refuse_later(self._mirror.url, self._count(WRITERS), FORMAT, WRITES)

    def commit(self, change: Callable[[], T]) -> T:
        """Make a change and put its record; if another record came first, apply that and repeat the change."""
        lost = 0
        while True:
            try:
                with self._transaction(lost=lost):
                    return change()
            except BehindError as error:
                self._follow(error.records)
                lost += 1

    def _follow(self, records: Sequence[tuple[Head, Mapping[str, Any]]]) -> bool:
        """Apply records; return False if they do not follow the head: another process of this mirror was first.

        Raise `BehindError` during a change, which is based on rows that the records would alter.
        """
        with super().transaction():
            if self._calls is not None:
                raise BehindError(records=records)
            first = records[0][1]
            if Head(first["number"] - 1, first["before"]) != self._head():
                return False
            for made, record in records:
                self._apply(made, record)
                if record.get("writers", 0) > self._count(WRITERS):
                    self._write(WRITERS, str(record["writers"]))
                self._set_head(made)
        return True

    def log_records(self, after: str = "") -> list[dict[str, Any]]:
        """Return the notes in the records that the mirror has applied; only those after the record of a name."""
        number, last = int(after[:12] or 0), self._head()
        found = self._read.get((number, last))
        if found is None:
            found = [
                {
                    **note,
                    "sequence": head.number,
                    "created": record["created"],
                    "follows": _name(number, record["before"]),
                }
                for number, (head, record) in enumerate(self._log.between(number, last), number)
                for note in record["notes"]
            ]
            self._read.put((number, last), found)
        return list(found)

    def logged(self) -> str:
        """Return a name of the last record that the mirror has applied."""
        head = self._head()
        return _name(head.number, head.digest)

    def is_incomplete(self) -> bool:
        """Return whether versions may lack objects: a pack was lost."""
        later = self.log_records(self.swept())
        return super().is_incomplete() or any(record["change"] == "lost" for record in later)

    def note_swept(self, held: Mapping[str, int], *, log: bool = False) -> None:
        """As for a local catalog, in this mirror alone."""
        with self.transaction():
            if log and self.is_incomplete():
                self.note_incomplete()
            super().note_swept(held, log=log)

    def _records(self, first: Head) -> list[tuple[Head, dict[str, Any]]]:
        """Return the records after `first` that the mirror has applied."""
        last = self._head().number
        return [(made, record) for made, record in self._log.after(first) if made.number <= last]

    def differences(self) -> list[str]:
        """Return a sentence for each table that differs from the log, which is read from the first record on.

        Other names in the log are reported, too. Records that the mirror has not applied yet are ignored.
        """
        with TemporaryDirectory(prefix="ckstore-") as directory:
            path = Path(directory)
            create_file(path / root.CATALOG)
            (path / root.LOG).mkdir()
            log = RemoteLog(self._mirror.storage, self._log.store, path / root.LOG)
            with RemoteCatalog(replace(self._mirror, path=path, log=log)) as again:
                while True:
                    if records := self._records(again._head()):
                        again._follow(records)
                    with super().transaction():
                        if self._head().number > again._head().number:
                            continue  # Another thread or process of the mirror has applied records.
                        return [*self._told_otherwise(again), *self._log.strays()]

    def _told_otherwise(self, again: RemoteCatalog) -> Iterator[str]:
        for table, query in _TABLES.items():
            if self._connection.rows(query) != again._connection.rows(query):
                yield f"The mirror's {table} differ from the log; run `ckstore recover` to rebuild it."

    def note(self, record: Mapping[str, Any]) -> None:
        """Add a note with the reason of the change to the record."""
        self._notes.append(dict(record))

    def transaction(self) -> AbstractContextManager[None]:
        """As for a local catalog; changes for all are committed with a record."""
        return self._transaction()

    @contextmanager
    def _transaction(self, *, lost: int = 0) -> Iterator[None]:
        made = None
        with super().transaction():
            if self._calls is not None:
                yield
                return
            self._check_writer()
            self._calls, self._notes = [], []
            created = durable.timestamp()  # No later than the times in its calls.
            try:
                yield
                if self._calls:
                    if self._mode == "r":
                        raise ReadOnlyError(f"{self._mirror.url} is open for reading; open the store for writing.")
                    made = self._log.append(self._head(), self._calls, self._notes, created, lost=lost)
                    self._set_head(made)
            finally:
                self._calls = None
        if made is not None and needs_snapshot(made.number):
            with suppress(
                CkstoreError, OSError, ValueError, sqlite3.Error
            ):  # Ignored, since the change is already committed.
                put_snapshot(self._mirror, made.number)

    def free_number(self, number: int) -> int:
        """Return the number, or the next free one if others have committed it, or a later one."""
        highest = self.last_number()
        if number > highest:
            return number
        self.release_number(number)
        return highest + 1

    def add_packs(self, packs: Sequence[PackInfo], bases: Iterable[str] = ()) -> None:
        """As for a local catalog; raise `ConflictError` for a pack that `gc` has removed before its commit."""
        for pack in packs:
            if self._connection.rows("SELECT 1 FROM meta WHERE key = ?", [GONE + pack.name]):
                raise ConflictError(f"Pack {pack.name} was removed by `gc` before it was committed; ingest it again.")
        super().add_packs(packs, bases)

    @recorded
    def note_gone(self, names: Sequence[str]) -> None:
        """Forbid later records to refer to these packs."""
        for name in names:
            self._write(GONE + name, str(self._head().number + 1))

    def gone(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Return the removed packs, each with the number of its record."""
        if names is None:
            query = f"SELECT {META} FROM meta t WHERE substr(key, 1, ?) = ?"
            found = self._connection.sealed(query, [len(GONE), GONE], META_ROWS)
        else:
            found = list(self.moved_packs([GONE + name for name in names]).items())
        return {name.removeprefix(GONE): int(number) for name, number in found if number.isdigit()}

    def _made(self, method: Callable[..., T], arguments: tuple[Any, ...], named: dict[str, Any]) -> T:
        """Make a call and record it, without the calls that it makes itself."""
        if self._within or self._calls is None:
            return method(self, *arguments, **named)
        bound = inspect.signature(method).bind(self, *arguments, **named)
        bound.apply_defaults()
        given = {name: _lasting(value) for name, value in bound.arguments.items() if name != "self"}
        self._calls.append(plain_call(method.__name__, given))
        self._within = True
        try:
            return method(self, **given)
        finally:
            self._within = False

    def _apply(self, head: Head, record: Mapping[str, Any]) -> None:
        self._within = True
        try:
            for name, arguments in record["calls"]:
                call_again(self, name, arguments)
                if name == "commit_version":
                    self._notice(arguments)
        except CkstoreError as error:
            raise IntegrityError(
                f"Record {head.number} of the log does not fit the records before it ({error}); run `ckstore recover`."
            ) from error
        finally:
            self._within = False

    def _notice(self, arguments: Mapping[str, Any]) -> None:
        """Remember the packs and keys that a version of others names."""
        places = [place for kind in ("objects", "raw") for place in arguments.get(kind, ())]
        keys = {number for _, numbers, _ in places for number in numbers}
        keys.update(arguments.get("requires", ()))
        for pack, *_ in arguments["packs"]:
            self._named.put(pack, (keys, frozenset(arguments.get("references", ()))))

    def named_with(self, pack: str) -> tuple[Collection[int], Collection[str]] | None:
        """As for a local catalog; for packs of the last versions of others."""
        return self._named.get(pack)

    def _head(self) -> Head:
        found = self._connection.sealed(f"SELECT {META} FROM meta t WHERE key = ?", [HEAD], META_ROWS)
        if not found:
            return Head()
        number, _, digest = found[0][1].partition(" ")
        if re.fullmatch("[0-9]{1,12}", number) is None or len(digest) != 40:
            raise IntegrityError(f"{self._path} is damaged; run `ckstore recover` to rebuild it.")
        return Head(int(number), digest)

    def _set_head(self, head: Head) -> None:
        self._write(HEAD, f"{head.number} {head.digest}")


def _name(number: int, digest: str) -> str:
    """Return a name of a record, as those of a directory's log; empty before the first one."""
    return f"{number:012d}-{digest[:16]}" if number else ""


def _lasting(value: Any) -> Any:
    """Return an argument that can be iterated twice."""
    if value is None or isinstance(value, (str, int, float, Mapping, Sequence)) or not isinstance(value, Iterable):
        return value
    return list(value)
