"""Queries of the catalog: runs, versions, tags, packs, and the place of each object."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckstore.errors import NoStoreError, NotFoundError
from ckstore.storage import durable, root
from ckstore.storage.connection import BUSY_TIMEOUT, Connection, Mode, believed
from ckstore.storage.pack import PACK_NAME, PackInfo
from ckstore.storage.placements import Placements
from ckstore.storage.rows import (
    LEASE_ROWS,
    META_ROWS,
    PACK_ROWS,
    RESERVATION_ROWS,
    RUN_ROWS,
    TAG_ROWS,
    VERSION_COLUMNS,
    VERSION_ROWS,
    Claim,
    RunRow,
    VersionRow,
)
from ckstore.storage.schema import HIGHEST, ID, LOWEST, items, optional, plain_object, read_json, rows, text, whole
from ckstore.storage.version_names import resolve

#: Row of `meta` with the time of the last change by `gc`.
COLLECTED = "collected"
#: Prefix of the rows of `meta` with policies; the run's name, if any, follows.
POLICY = "policy:"

_COLUMNS = (
    {"uid": "lower(hex(v.uid))", "run": "r.name", "pack": "p.name"}.get(name, f"v.{name}") for name in VERSION_COLUMNS
)
#: Query of all versions, without order.
VERSIONS = f"SELECT {', '.join(_COLUMNS)} FROM versions v JOIN runs r ON r.id = v.run JOIN packs p ON p.id = v.pack"

_GLOBS = items(text(1))
_STEP_ROWS = rows(whole(1), optional(whole(LOWEST, HIGHEST)))
_NAMES = rows(PACK_NAME)
_OFFSETS = rows(PACK_NAME, whole())
_DESCRIBED = rows(whole(), ID, PACK_NAME, whole())
_SIZE_ROWS = rows(whole())
_NUMBER_ROWS = rows(whole(), whole())


class CatalogReader:
    """The queries of a catalog; `ckstore.storage.catalog.Catalog` describes the parameters."""

    def __init__(self, store: Path, mode: Mode = "r", timeout: float = BUSY_TIMEOUT) -> None:
        self._path = store / root.CATALOG
        self._connection = Connection(self._path, mode, timeout)
        self._objects = Placements(self._connection)

    @classmethod
    def open(cls, store: Path, mode: Mode = "r", timeout: float = BUSY_TIMEOUT) -> Self:
        """Open the catalog of a store.

        Raises
        ------
        NoStoreError
            The directory is not a store.
        LockedError, IntegrityError, FormatVersionError
        UsageError
            The directory is the mirror of a remote store.
        """
        if not root.is_store(store):
            raise NoStoreError(f"{store} is not a store; run `ckstore init`, or name another directory.")
        root.check_no_mirror(store)
        return cls(store, mode, timeout)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def versions(self, run: str | None = None) -> list[VersionRow]:
        """Return all versions by number, or those of one run; raise `NotFoundError` for an unknown run."""
        if run is None:
            return self._select("ORDER BY v.number")
        found = self._select("WHERE r.name = ? ORDER BY v.number", run)
        if not found and not self._connection.rows("SELECT 1 FROM runs WHERE name = ?", [run]):
            raise NotFoundError(f"Unknown run {run}; `ckstore log` lists the runs.")
        return found

    def described(self) -> list[tuple[int, str, str, int]]:
        """Return number, id, pack and manifest offset of every version."""
        query = (
            "SELECT v.number, lower(hex(v.uid)), p.name, v.manifest_offset"
            " FROM versions v JOIN packs p ON p.id = v.pack"
        )
        return self._connection.rows(query, schema=_DESCRIBED)

    def version(self, number: int) -> VersionRow:
        """Return the version with a number; raise `NotFoundError`."""
        found = self._select("WHERE v.number = ?", number)
        if not found:
            raise NotFoundError(f"Unknown version {number}; `ckstore log` lists the versions.")
        return found[0]

    def free_number(self, number: int) -> int:
        """Return the number to commit a version with: a remote store may have used the reserved one."""
        return number

    def children(self, number: int) -> list[VersionRow]:
        """Return the children of a version, by number."""
        return self._select("WHERE v.parent = ? ORDER BY v.number", number)

    def latest(self, run: str | None = None) -> VersionRow | None:
        """Return the latest version of the store or of one run; None if there are none."""
        tail = "ORDER BY v.number DESC LIMIT 1"
        found = self._select(tail) if run is None else self._select(f"WHERE r.name = ? {tail}", run)
        return found[0] if found else None

    def highest(self, run: str) -> VersionRow | None:
        """Return the version of a run with the highest step; without steps, the latest."""
        # NULL sorts below all values.
        found = self._select("WHERE r.name = ? ORDER BY v.step DESC, v.number DESC LIMIT 1", run)
        return found[0] if found else None

    def at_step(self, run: str, step: int) -> VersionRow | None:
        """Return the version of a run at a step, or None."""
        found = self._select("WHERE r.name = ? AND v.step = ?", run, step)
        return found[0] if found else None

    def without_step(self, run: str, nbytes: int) -> list[VersionRow]:
        """Return the versions of a run that have no step and this original size, newest first."""
        return self._select(
            "WHERE r.name = ? AND v.step IS NULL AND v.original_bytes = ? ORDER BY v.number DESC", run, nbytes
        )

    def hot_versions(self, run: str, keep: int = 0) -> list[VersionRow]:
        """Return the hot versions of a run by number, without its `keep` latest versions."""
        latest = "SELECT number FROM versions WHERE run = v.run ORDER BY number DESC LIMIT ?"
        return self._select(f"WHERE r.name = ? AND v.hot AND v.number NOT IN ({latest}) ORDER BY v.number", run, keep)

    def with_uid(self, prefix: str) -> list[VersionRow]:
        """Return the versions whose id has this hexadecimal prefix, by number."""
        first, last = (bytes.fromhex(prefix.ljust(40, digit)) for digit in "0f")
        return self._select("WHERE v.uid BETWEEN ? AND ? ORDER BY v.number", first, last)

    def resolve(self, spec: str | int) -> VersionRow:
        """Return the version with a name; see `version_names.resolve`."""
        return resolve(self, spec)

    def runs(self) -> list[RunRow]:
        """Return all runs in order of creation."""
        found = self._connection.rows(
            "SELECT r.name, COUNT(v.number), MAX(v.number) FROM runs r"
            " LEFT JOIN versions v ON v.run = r.id GROUP BY r.id ORDER BY r.id",
            schema=RUN_ROWS,
        )
        steps = dict(self._connection.rows("SELECT number, step FROM versions", schema=_STEP_ROWS))
        return [RunRow(name, count, latest, steps.get(latest)) for name, count, latest in found]

    def tags(self) -> dict[str, int]:
        """Return version numbers by tag, sorted by tag."""
        return dict(self._connection.rows("SELECT name, version FROM tags ORDER BY name", schema=TAG_ROWS))

    def packs(self) -> list[PackInfo]:
        """Return all packs in order of commit."""
        found = self._connection.rows("SELECT name, bytes, kind FROM packs ORDER BY id", schema=PACK_ROWS)
        return [PackInfo(*row) for row in found]

    def pack_bytes(self, name: str) -> int | None:
        """Return the size of a pack; None if the catalog does not have it."""
        found = self._connection.rows("SELECT bytes FROM packs WHERE name = ?", [name], _SIZE_ROWS)
        return int(found[0][0]) if found else None

    def raw_packs(self) -> list[str]:
        """Return the names of the packs with raw objects."""
        return [name for (name,) in self._connection.rows("SELECT name FROM packs WHERE kind = 'raw'", schema=_NAMES)]

    def has_packs(self, names: Iterable[str]) -> bool:
        """Return whether the catalog has all of these packs."""
        wanted = set(names)
        return len(self._connection.rows_of("SELECT name FROM packs WHERE name", wanted)) == len(wanted)

    def find_objects(self, keys: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Return pack name and slot of each known object, by key."""
        return self._objects.find(keys)

    def objects_in(self, pack: str) -> list[tuple[int, int]]:
        """Return (key, slot) of every object in a pack. Reads the whole table."""
        return self._objects.within(pack)

    def placed_objects(self) -> dict[str, dict[int, int]]:
        """Return the keys of all objects by slot, for each pack by name. Reads the whole table."""
        return self._objects.by_pack()

    def moved_packs(self, names: Iterable[str] | None) -> dict[str, str]:
        """Return the new names of packs that `gc` has rewritten; None asks for all."""
        if names is None:
            query = "SELECT key, value FROM meta WHERE key NOT IN ('store', ?) AND instr(key, ':') = 0"
            return dict(self._connection.rows(query, [COLLECTED], META_ROWS))
        return dict(self._connection.rows_of("SELECT key, value FROM meta WHERE key", names, META_ROWS))

    def references(self, number: int) -> set[str]:
        """Return the names of the packs with a version's manifest and blobs."""
        query = "SELECT p.name FROM version_packs r JOIN packs p ON p.id = r.pack WHERE r.version = ?"
        return {name for (name,) in self._connection.rows(query, [number], _NAMES)}

    def own_packs(self, number: int) -> list[str]:
        """Return the names of the packs that a version was written to; the last one has its manifest."""
        # The pack of its raw objects was added immediately before.
        query = (
            "SELECT p.name FROM packs p JOIN versions v ON p.id = v.pack OR p.id = v.pack - 1 AND p.kind = 'raw'"
            " WHERE v.number = ? ORDER BY p.id"
        )
        return [name for (name,) in self._connection.rows(query, [number], _NAMES)]

    def chain_packs(self, number: int) -> set[str]:
        """Return the names of the packs that restoring a version probably needs; others may be needed.

        They are the packs of the version and its blobs, and of as many ancestors as its chains are long.
        """
        query = (
            "WITH RECURSIVE line(parent, pack, depth) AS (SELECT parent, pack, depth FROM versions WHERE number = ?1"
            " UNION ALL SELECT v.parent, v.pack, l.depth - 1 FROM line l JOIN versions v ON v.number = l.parent"
            " WHERE l.depth > 0) SELECT p.name FROM packs p JOIN line l ON p.id = l.pack"
            " UNION SELECT p.name FROM packs p JOIN version_packs r ON r.pack = p.id WHERE r.version = ?1"
        )
        return {name for (name,) in self._connection.rows(query, [number], _NAMES)} | set(self.own_packs(number))

    def manifest_offsets(self, names: Sequence[str]) -> dict[str, int]:
        """Return the offset of the manifest in each of these packs that has one, by name."""
        query = "SELECT p.name, v.manifest_offset FROM packs p JOIN versions v ON v.pack = p.id WHERE p.name"
        return dict(self._connection.rows_of(query, names, _OFFSETS))

    def identity(self) -> str:
        """Return the random id of this catalog; a rebuilt catalog has another."""
        found = self._connection.rows("SELECT value FROM meta WHERE key = 'store'", schema=rows(text()))
        return str(found[0][0]) if found else ""

    def collected(self) -> str:
        """Return the time at which `gc` last moved or removed an object; empty if never."""
        return self.moved_packs([COLLECTED]).get(COLLECTED, "")

    def state(self) -> tuple[int, int, int]:
        """Return a value that differs after any change of the catalog, by this process or another."""
        return self._connection.state()

    def policies(self) -> dict[str, str]:
        """Return the policies as text, by run; the store's under the empty name."""
        found = self._connection.rows(
            "SELECT key, value FROM meta WHERE substr(key, 1, ?) = ?", [len(POLICY), POLICY], META_ROWS
        )
        return {key.removeprefix(POLICY): value for key, value in found}

    def unreferenced_packs(self) -> list[PackInfo]:
        """Return the packs without live data: no manifest, blob or object."""
        found = self._connection.rows(
            "SELECT name, bytes, kind FROM packs WHERE id NOT IN"
            " (SELECT pack FROM versions UNION SELECT pack FROM version_packs"
            " UNION SELECT pack FROM objects) ORDER BY id",
            schema=PACK_ROWS,
        )
        return [PackInfo(*row) for row in found]

    def last_number(self) -> int:
        """Return the highest version number that this catalog has assigned."""
        [[versions, handed_out]] = self._connection.rows(
            "SELECT COALESCE((SELECT MAX(number) FROM versions), 0),"
            " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'reservations'), 0)",
            schema=_NUMBER_ROWS,
        )
        return int(max(versions, handed_out))

    def objects(self) -> int:
        """Return the number of objects."""
        return self._objects.count()

    def check(self) -> list[str]:
        """Return a sentence for each problem that SQLite finds in the file. Reads all of it."""
        found = [row[0] for row in self._connection.rows("PRAGMA integrity_check(10)") if row[0] != "ok"]
        found += [f"a row of {row[0]} refers to nothing" for row in self._connection.rows("PRAGMA foreign_key_check")]
        return [f"{self._path} is damaged ({problem}); run `ckstore recover` to rebuild it." for problem in found]

    def reservations(self) -> list[Claim]:
        """Return the reserved numbers without a version: of ingests in flight, or of killed ones."""
        found = self._connection.rows(
            "SELECT number, pid, host, created FROM reservations ORDER BY number", schema=RESERVATION_ROWS
        )
        return [Claim(*row) for row in found]

    def leases(self) -> list[Claim]:
        """Return the leases in force: of running processes on this host, and unexpired ones of other hosts."""
        host, now = socket.gethostname(), durable.timestamp()
        return [
            claim
            for claim in self._claims()
            if (durable.is_running(claim.pid) if claim.host == host else claim.expires > now)
        ]

    def _claims(self) -> list[Claim]:
        found = self._connection.rows(
            "SELECT id, pid, host, created, purpose, expires FROM leases ORDER BY created, id", schema=LEASE_ROWS
        )
        return [Claim(*row) for row in found]

    def _select(self, tail: str, *parameters: Any) -> list[VersionRow]:
        found = self._connection.rows(f"{VERSIONS} {tail}", parameters, VERSION_ROWS)
        with believed(self._path):
            return [_version(row) for row in found]


def _version(row: Sequence[Any]) -> VersionRow:
    values = list(row)
    if values[0] == values[4]:
        raise ValueError(f"version {values[0]} is its own parent")
    values[16], values[18] = bool(values[16]), bool(values[18])
    values[19] = tuple(read_json(values[19], _GLOBS))
    values[20] = read_json(values[20], plain_object)
    return VersionRow(*values)
