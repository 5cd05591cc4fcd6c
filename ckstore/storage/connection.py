"""A connection to the catalog's SQLite file: opening, locking, upgrades, and the meaning of its errors."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from threading import get_ident
from typing import Any, Literal
from urllib.parse import quote
from weakref import WeakMethod, finalize

from msgspec import Struct

from ckstore.errors import (
    CkstoreError,
    ClosedError,
    IntegrityError,
    LockedError,
    NoStoreError,
    ReadOnlyError,
)
from ckstore.runtime import access, forks
from ckstore.runtime.access import Explained
from ckstore.storage import catalog_tables, durable, root
from ckstore.storage.schema import FORMAT, Text, check, refuse_later, rows

#: Row of `meta` with the format version that writers must know; absent if it is that of readers, `user_version`.
WRITERS = "format:writers"
#: The verb of an error in a ckstore that does not know the format of writers.
WRITES = "only reads it and writes"
#: `CKST`, in SQLite's `application_id`.
APPLICATION = 0x434B5354
#: Seconds to wait for another process's lock.
BUSY_TIMEOUT = 30.0

_CACHE_KIB = 1 << 16
#: Number of values in one statement; SQLite's own limit on parameters is 32,766.
_AT_ONCE = 500
#: SQLite's errors for a catalog that ckstore did not write in this form: missing tables, endless recursion, long names.
_DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_TOOBIG,
)
#: Errors that `explained` turns into a sentence.
_ERRORS = (sqlite3.Error, UnicodeDecodeError)
#: Limit of a query in steps of SQLite's machine, some millions a second: pages of a damaged catalog may form
#: cycles, and have endless rows.
_STEPS, _STEPS_A_BYTE, _STEPS_AT_ONCE = 5_000_000, 20, 100_000
#: Schema of `sqlite_master`: type, name and SQL.
_MASTER = rows(Text, Text, Text | None)

#: Seconds between attempts to get a lock. After `_FAIR` seconds the pauses are short again, so that newcomers do not
#: overtake a process that has waited for long.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_FAIR = 5.0

Mode = Literal["r", "a"]


class Connection:
    """One connection for any number of threads, which take turns; they wait `timeout` seconds for other processes.

    Readers of a remote store write to its mirror, too.
    """

    def __init__(self, path: Path, mode: Mode, timeout: float = BUSY_TIMEOUT, *, is_mirror: bool = False) -> None:
        self.path = path
        self._directory, self._claims_path = path.parent, path.with_name(root.CLAIMS)
        # A path is turned into text at each use.
        self._place, self._file, self._claims_file = map(str, (self._directory, path, self._claims_path))
        self._explained = explained(path)
        self.mode = mode
        self._is_mirror = is_mirror
        self._timeout = timeout
        self._lock = forks.Lock()
        self._owner = 0  # The thread that holds a transaction.
        self._ends: list[Callable[[bool | None], None]] = []
        self._is_inherited = False
        self._size = self._claims = self._connected = 0
        self._has_triggers = False
        self._steps = -1
        with access.access_explained(path):
            if not path.is_file():
                raise NoStoreError(f"Catalog {path} is missing; run `ckstore recover` to rebuild it.")
        with self._lock:
            self._database = self._connect()
            self._closing = self._closed_in_time()
            forks.in_child(self._begin_child)
            try:
                if self._check_format() < FORMAT:
                    self._upgrade()
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        """Close the file; an open transaction is rolled back."""
        with self._lock:
            if not self._is_inherited:
                self._database.close()

    def _closed_in_time(self) -> finalize[[], Connection]:
        """Let the database be closed with this object; at the end of the process, threads may use both."""
        closing = finalize(self, self._database.close)
        closing.atexit = False
        return closing

    def _begin_child(self) -> None:
        """Leave connection and transaction to the parent; the next use opens another connection."""
        self._closing.detach()
        forks.leave(self._database)
        self._is_inherited = True
        self._owner = 0

    def rows(self, statement: str, parameters: Sequence[Any] = (), schema: type[Struct] | None = None) -> list[Any]:
        """Return all rows of a query as tuples of the schema; raise `IntegrityError` for an invalid row."""
        try:
            with self._lock:
                found = self._found(statement, parameters)
        except _ERRORS:
            with self._explained:  # Here, as entering it takes calls.
                raise
        return found if schema is None else self.checked(found, schema)

    def checked(self, found: list[Any], schema: type[Struct]) -> list[Any]:
        """Return rows of a schema; raise `IntegrityError` for an invalid one."""
        try:
            check([found], schema)
        except ValueError as error:
            raise damaged(self.path, error) from error
        return found

    def claims(self, query: str, schema: type[Struct]) -> list[Any]:
        """Return rows of the claims; of a store that is open for reading none if they cannot be read."""
        if self.mode == "a":
            return self.rows(query, schema=schema)
        path = self._claims_path.absolute()
        with suppress(sqlite3.Error, ValueError), self._lock:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
                found = database.execute(query).fetchall()
            check([found], schema)
            return found
        return []

    def sealed(self, query: str, parameters: Sequence[Any] = (), schema: type[Struct] | None = None) -> list[Any]:
        """Return all rows of a query without their last column, the checksum of the others.

        Raise `IntegrityError` for a row that does not match its checksum, or an invalid one.
        """
        return self.unsealed(self.rows(query, parameters), schema)

    def unsealed(self, found: Iterable[Sequence[Any]], schema: type[Struct] | None = None) -> list[Any]:
        """Return rows without their last column, the checksum of the others; raise `IntegrityError`."""
        contents = []
        for *values, checksum in found:
            if catalog_tables.seal(*values) != checksum:
                raise damaged(self.path, f"the row of {values[0]!r} does not match its checksum")
            contents.append(tuple(values))
        return contents if schema is None else self.checked(contents, schema)

    def rows_of(self, query: str, values: Iterable[Any], schema: type[Struct] | None = None) -> list[Any]:
        """Return the rows of a query, which ends with a column's name, for many values of that column, in any order."""
        # Sorted, so that neighbouring keys find the same page in the cache.
        wanted = sorted(set(values))
        found: list[Any] = []
        for start in range(0, len(wanted), _AT_ONCE):
            part = wanted[start : start + _AT_ONCE]
            found += self.rows(f"{query} IN ({','.join('?' * len(part))})", part, schema)
        return found

    def _found(self, statement: str, parameters: Sequence[Any]) -> list[Any]:
        if self._owner:
            return self._fetched(self._database, statement, parameters)
        with PlaceLock(self._place):
            if self._is_inherited or (not self._same_file() and self.path.is_file()):
                self._reopen()
            return self._fetched(self._database, statement, parameters)

    def _fetched(self, database: sqlite3.Connection, statement: str, parameters: Sequence[Any]) -> list[Any]:
        """Return all rows of a query, within a limit of steps."""
        self._steps = (_STEPS + _STEPS_A_BYTE * self._size) // _STEPS_AT_ONCE
        try:
            return database.execute(statement, parameters).fetchall()
        finally:
            self._steps = -1

    def state(self) -> tuple[int, int, int]:
        """Return a value that differs after any change of the file, by this connection or another."""
        [[changes]] = self.rows("PRAGMA data_version")
        return self._connected, changes, self._database.total_changes

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement inside the present transaction."""
        return self._run("execute", statement, parameters)

    def execute_many(self, statement: str, parameters: Collection[Sequence[Any]]) -> None:
        """Run a statement for each row of parameters."""
        if parameters:
            self._run("executemany", statement, parameters)

    def _run(self, method: str, statement: str, parameters: Collection[Any]) -> sqlite3.Cursor:
        try:
            with self._lock:
                if self._is_inherited:
                    forks.check()
                if not self._has_triggers:
                    self._add_triggers()
                cursor: sqlite3.Cursor = getattr(self._database, method)(statement, parameters)
                return cursor
        except _ERRORS:
            with self._explained:
                raise

    def transaction(self) -> AbstractContextManager[None]:
        """Hold the write lock from the first statement on; all or nothing. Joins a transaction of the same thread.

        Raises
        ------
        LockedError
            Another process holds the lock for longer than the timeout.
        ReadOnlyError
            The catalog is open for reading.
        """
        if self.mode != "a":
            raise ReadOnlyError(f"{self.path} is open for reading; open the store for writing.")
        joined: AbstractContextManager[Any] = self._lock  # Which takes no calls of Python.
        return joined if self._owner == get_ident() else self._transaction()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._begin()
            self._owner = get_ident()
            try:
                with self._explained:
                    self._refuse_later(self._database)  # It may have been upgraded since it was opened.
                yield
                durable.checkpoint("before-commit")
                forks.check()
                self.execute("COMMIT")
                durable.checkpoint("after-commit")
                self._end(is_committed=True)
            except BaseException:
                if not self._owner:
                    raise  # It is a parent's.
                if self._database.in_transaction:
                    self._end(is_committed=False)
                    self._database.execute("ROLLBACK")
                else:
                    self._owner = 0
                    self._end(is_committed=None)
                raise
            finally:
                self._owner = 0
                self._ends.clear()

    def at_end(self, call: Callable[[bool | None], None]) -> None:
        """Call a function at the end of the present transaction, before the lock is released if it failed.

        It is told whether the transaction was committed: None if SQLite ended it and Python was interrupted, or if
        SQLite rolled it back itself, as on a full disk.
        """
        self._ends.append(call)

    def _end(self, *, is_committed: bool | None) -> None:
        while self._ends:
            self._ends.pop()(is_committed)

    def _begin(self) -> None:
        begun = time.monotonic()
        deadline = begun + self._timeout
        pause = _FIRST_PAUSE
        while True:
            # SQLite would take the journal of another catalog at this path for one that a killed writer of this file
            # left, and delete it. So it must not wait for the lock of a file that may be replaced during the wait.
            with self._explained, PlaceLock(self._place):
                if self._is_inherited or not self._same_file():
                    self._reopen()
                self._database.execute("PRAGMA busy_timeout = 0")
                try:
                    if not self._has_triggers:
                        self._add_triggers()
                    self._database.execute("BEGIN IMMEDIATE")
                    return
                except sqlite3.OperationalError as error:
                    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                        raise
                finally:
                    self._database.execute(f"PRAGMA busy_timeout = {round(1000 * self._timeout)}")
            self._lock.release()  # A fork need not wait for another process.
            try:
                time.sleep(pause)
            finally:
                self._lock.acquire()
            pause = min(2 * pause, _LONGEST_PAUSE) if time.monotonic() < begun + _FAIR else _FIRST_PAUSE

    def _add_triggers(self) -> None:
        """Add the triggers before the first change: many connections are opened for writing, and read."""
        for trigger in chain.from_iterable(catalog_tables.TRIGGERS.values()):
            self._database.execute(trigger)
        self._has_triggers = True

    def _reopen(self) -> None:
        if not self.path.is_file():
            raise NoStoreError(f"Catalog {self.path} no longer exists; run `ckstore recover` to rebuild it.")
        before, is_inherited = self._database, self._is_inherited
        self._database = self._connect()
        self._closing.detach()
        self._closing = self._closed_in_time()
        self._is_inherited = False
        if not is_inherited:
            before.close()
        try:
            if self._check_format() < FORMAT:
                raise CkstoreError(f"{self.path} was replaced by one of an earlier format; open the store again.")
        except BaseException:
            self._inode = 0  # The next use checks it again.
            raise

    def _same_file(self) -> bool:
        try:
            status = os.stat(self._file)
            self._size = status.st_size
            is_same = status.st_ino == self._inode
            return is_same and (self.mode == "r" or os.stat(self._claims_file).st_ino == self._claims)
        except FileNotFoundError:
            return False

    def _connect(self) -> sqlite3.Connection:
        forks.check()
        with self._explained, PlaceLock(self._place):
            # Taken before opening: a replacement in between is then detected at the next check.
            inode = os.stat(self.path).st_ino
            database = self._connect_to_write() if self.mode == "a" else self._connect_read_only()
            self._inode = inode
            self._connected += 1
            self._has_triggers = False
            return database

    def _connect_to_write(self) -> sqlite3.Connection:
        database = self._open("mode=rw")
        try:
            self._refuse_later(database)  # Before the claims, which a later version may have in another form.
        except BaseException:
            database.close()
            raise
        database.execute("PRAGMA foreign_keys = ON")
        # EXTRA is FULL and an fsync of the directory once the journal is gone: with FULL, a power cut can bring
        # the journal back, and with it the state before a commit that was reported done.
        database.execute("PRAGMA synchronous = EXTRA")
        if sys.platform == "darwin":
            database.execute("PRAGMA fullfsync = ON")
        # A commit of many objects touches one page for each. With SQLite's default of 2 MB, these pages would be
        # written and synced twice: before the commit, and with it.
        database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        database.execute("PRAGMA temp_store = MEMORY")
        path = self._claims_path
        if not self._attach_claims(database, path) and not self._attach_claims(database, path):
            raise damaged(path, "it changes while it is opened")
        return database

    def _attach_claims(self, database: sqlite3.Connection, path: Path) -> bool:
        """Attach the claims of running processes; remove damaged ones, and return False.

        Nothing syncs their file: a loss of power ends the processes, too, and may leave some of its pages.
        """
        with suppress(FileExistsError):
            durable.new_file(path).close()
        self._claims = _inode(path)  # Before opening, as that of the catalog.
        is_attached = False
        try:
            database.execute("ATTACH ? AS claims", [f"file:{quote(str(path.absolute()))}?mode=rw"])
            is_attached = True
            database.execute("PRAGMA claims.synchronous = OFF")
            database.execute("PRAGMA claims.page_size = 512")
            for statement in catalog_tables.CLAIMS:
                database.execute(statement)
            are_ours = catalog_tables.are_claims(database.execute("SELECT type, name, sql FROM claims.sqlite_master"))
            if are_ours and database.execute("PRAGMA claims.integrity_check(1)").fetchall() == [("ok",)]:
                return True
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in (*_DAMAGED, sqlite3.SQLITE_ERROR):
                raise
        if _inode(path) == self._claims:  # Otherwise another process has made a new file, and may hold a lease in it.
            remove_claims(path.parent)
        if is_attached:
            database.execute("DETACH claims")
        return False

    def _connect_read_only(self) -> sqlite3.Connection:
        try:
            return self._open("mode=ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                raise
            failure = error
        if os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK):
            # A killed writer left a journal; only a writer may roll it back.
            self._open("mode=rw").close()
            return self._open("mode=ro")
        if self.path.with_name(self.path.name + "-journal").exists():
            raise CkstoreError(
                f"{self.path} was left in the middle of a change, and repairing it takes permission to write; open the"
                " store once where it can be written."
            ) from failure
        return self._open("immutable=1&mode=ro")

    def _open(self, query: str) -> sqlite3.Connection:
        database = sqlite3.connect(
            f"file:{quote(str(self.path.absolute()))}?{query}",
            uri=True,
            timeout=self._timeout,
            isolation_level=None,
            check_same_thread=False,
        )
        step = WeakMethod(self._step)  # A connection that its owner left open is closed with the owner.
        database.set_progress_handler(lambda: (call := step()) is not None and call(), _STEPS_AT_ONCE)
        add_seal(database)
        try:
            # SQLite opens the file at the first statement that needs it.
            database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        except BaseException:
            database.close()
            raise
        return database

    def _step(self) -> bool:
        """Return whether SQLite should abort: a query exceeds its limit of steps."""
        if self._steps < 0:
            return False
        self._steps -= 1
        return self._steps < 0

    def _check_format(self) -> int:
        """Return the format version of the file; raise an error if it is a later one, or no catalog."""
        application = self.rows("PRAGMA application_id")[0][0]
        if application != APPLICATION:
            raise IntegrityError(f"{self.path} is not a catalog of ckstore; run `ckstore recover` to rebuild it.")
        with self._explained:
            found = self._refuse_later(self._database)
        if found < FORMAT:
            return found
        master = self.rows("SELECT type, name, sql FROM sqlite_master", schema=_MASTER)
        odd = catalog_tables.odd_one(master)
        if odd is not None:
            with self._explained:
                if self._writers(self._database) > FORMAT:
                    odd = catalog_tables.odd_one(master, takes_plain=True)
        if odd is not None:
            raise IntegrityError(f"{self.path} has an unexpected {odd!r:.200}; run `ckstore recover` to rebuild it.")
        return found

    def _refuse_later(self, database: sqlite3.Connection) -> int:
        """Return the format version of the file; raise `FormatVersionError` for a later one than this ckstore's."""
        [found] = database.execute("PRAGMA user_version").fetchone()
        refuse_later(self.path, found, FORMAT)
        if self.mode == "a" and not self._is_mirror:
            refuse_later(self.path, self._writers(database), FORMAT, WRITES)
        return int(found)

    def _writers(self, database: sqlite3.Connection) -> int:
        """Return the format version that writers must know; 0 if it is that of readers."""
        found = self._fetched(database, "SELECT CAST(value AS INT) FROM meta WHERE key = ?", [WRITERS])
        return int(found[0][0]) if found else 0

    def _upgrade(self) -> None:
        """Replace the file by a copy with the present tables, which processes that know only the former ones notice."""
        if self.mode == "r":
            Connection(self.path, "a", self._timeout).close()
        else:
            temporary = durable.temporary_path(self._directory)
            self._has_triggers = True  # Those of the present tables.
            try:
                with self.transaction(), closing(self._open("mode=ro")) as source:
                    create_file(temporary, source)
                    with PlaceLock(self._directory, exclusive=True):
                        os.replace(temporary, self.path)
                        durable.sync_directory(self._directory)
            finally:
                temporary.unlink(missing_ok=True)
        self._reopen()


class PlaceLock:
    """Keeps a store's catalog in its place during a block; if `exclusive`, keeps others from using that place.

    For short blocks only. Does nothing on file systems that cannot lock a directory.
    """

    __slots__ = ("_descriptor", "_directory", "_exclusive")

    def __init__(self, directory: str | os.PathLike[str], *, exclusive: bool = False) -> None:
        self._directory = directory
        self._exclusive = exclusive

    def __enter__(self) -> None:
        self._descriptor = -1
        try:
            import fcntl

            self._descriptor = forks.open_unshared(self._directory, os.O_RDONLY)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX if self._exclusive else fcntl.LOCK_SH)
        except (ImportError, OSError):
            pass
        except BaseException:  # An interrupt of the wait.
            self.__exit__()
            raise

    def __exit__(self, *_error: object) -> None:
        if self._descriptor >= 0:
            forks.close_unshared(self._descriptor)


def _inode(path: str | Path) -> int:
    """Return the inode of a file; 0 if it is missing."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


def remove_claims(store: Path) -> None:
    """Remove damaged claims."""
    for name in (root.CLAIMS, root.CLAIMS + "-journal"):
        (store / name).unlink(missing_ok=True)


def add_seal(database: sqlite3.Connection) -> None:
    """Add the function that the triggers of the tables call."""
    database.create_function("seal", -1, catalog_tables.seal, deterministic=True)


def create_file(path: Path, source: sqlite3.Connection | None = None) -> None:
    """Create an empty catalog, or a copy of one with the present tables, at a free path, durably."""
    from ckstore.storage.migrations import migrate

    forks.check()
    durable.new_file(path).close()  # SQLite would ignore the umask. Its journals get the permissions of this file.
    with forks.Lock(), closing(sqlite3.connect(path, isolation_level=None)) as database, explained(path):
        database.execute("PRAGMA page_size = 512")
        if source is not None:
            source.backup(database)
        add_seal(database)
        database.execute(f"PRAGMA application_id = {APPLICATION}")
        database.execute("BEGIN IMMEDIATE")
        migrate(database, FORMAT)
        database.execute("COMMIT")


def closed_error() -> ClosedError:
    """Return the error for a closed store."""
    return ClosedError("The store is closed; open it again, and read from it before it is closed.")


def damaged(path: Path, reason: object) -> IntegrityError:
    """Return the error for a damaged catalog."""
    return IntegrityError(f"{path} is damaged ({reason}); run `ckstore recover` to rebuild it.")


def explained(path: Path) -> Explained:
    """Turn SQLite's error in a block into one sentence with the remedy."""
    return Explained(_explanation, path)


def _explanation(error: BaseException, path: Path) -> CkstoreError | None:
    if isinstance(error, UnicodeDecodeError):  # in SQLite's own message, which quotes the schema
        return damaged(path, error)
    if isinstance(error, sqlite3.ProgrammingError):
        return closed_error() if "closed database" in str(error) else None
    if not isinstance(error, sqlite3.DatabaseError):
        return None
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LockedError(f"{path} is locked by another process; wait for it to end and try again.")
    # ckstore's statements are valid: a missing table, or a name that is not UTF-8 (0: found by Python), means that
    # the file is damaged.
    odd = isinstance(error, sqlite3.OperationalError) and code in (0, sqlite3.SQLITE_ERROR)
    if odd or code in _DAMAGED:
        return damaged(path, error)
    if code == sqlite3.SQLITE_FULL:
        return durable.full_error(path.parent, 1 << 20)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        problem = access.unusable(path) if code != sqlite3.SQLITE_IOERR else None
        return problem or CkstoreError(f"{path} cannot be used ({error}); check its permissions and the disk.")
    return None
