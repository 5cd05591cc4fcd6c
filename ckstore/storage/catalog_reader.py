"""Queries of the catalog: runs, versions, tags, packs, and the place of each object."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from msgspec import Meta, Struct

from ckstore.errors import NoStoreError, NotFoundError
from ckstore.storage import durable, root
from ckstore.storage.catalog_tables import LARGEST_ORIGIN, PACK_NAME, SEALED, USED, USES_BITS, bounded, seal
from ckstore.storage.connection import BUSY_TIMEOUT, Connection, Mode, damaged
from ckstore.storage.log_files import Follows
from ckstore.storage.names import Label, Name
from ckstore.storage.pack import PackInfo, PackName
from ckstore.storage.placements import Placements
from ckstore.storage.rows import (
    LEASE_ROWS,
    META_ROWS,
    PACK_ROWS,
    POLICY_ROWS,
    RESERVATION_ROWS,
    RUN_ROWS,
    SEAL_ROWS,
    TAG_ROWS,
    VERSION_COLUMNS,
    VERSION_ROWS,
    Claim,
    RunRow,
    RunSummary,
    Totals,
    VersionRow,
    indexed_values,
    metric_value,
)
from ckstore.storage.schema import (
    Bit,
    Id,
    Integer,
    Positive,
    Size,
    Text,
    Whole,
    Word,
    check,
    decode,
    decode_plain,
    rows,
)
from ckstore.storage.segments import SUFFIX, Place
from ckstore.storage.slots import ALL, Slots, among
from ckstore.storage.version_names import near_names, resolve

#: Row of `meta` with the highest number of any committed version.
LAST = "versions:last"
#: Row of `meta` with the time of the last change by `gc`.
COLLECTED = "collected"
#: Row of `meta` with the name of a record in the log, up to which nothing can be undone.
SWEPT = "collected:log"
#: Row of `meta` that says that versions lack objects: an ingest that stores these again does not know the versions.
INCOMPLETE = "collected:whole"
#: Row of `meta` with the number of versions since the last look that may have left rows of `likeness` or `origins`.
LEFT = "collected:left"
#: Row of `meta` with the bytes that only forgotten versions need, and the time until which they are kept.
KEPT = "collected:kept"
_KEPT = re.compile(r"(\d{1,15}) ([-0-9T:.Z]{27})")

T = TypeVar("T")

_NAMED = {
    "uid": "lower(hex(v.uid))",
    "run": bounded("r.name"),
    "pack": PACK_NAME,
    "metrics": f"v.metrics, {bounded('a.text', LARGEST_ORIGIN)}",
}
_COLUMNS = (_NAMED.get(name, f"v.{name}") for name in VERSION_COLUMNS)
#: Columns of a version and its checksum, and the tables of its names and origin, whose rows may be lost.
VERSION = f"{', '.join(_COLUMNS)}, v.seal"
NAMES = "LEFT JOIN runs r ON r.id = v.run LEFT JOIN packs p ON p.id = v.pack LEFT JOIN origins a ON a.id = v.origin"
#: Columns and checksum of a set's sum, and of a run with its sum; a query for the set repeats them in each row.
_SET = ", ".join(map(bounded, ("s.name", "s.rows", "s.total", "s.last", "s.bytes", "s.seal")))
_RUN = ", ".join(bounded(column.format("o.")) for column in (*SEALED["runs"], "{0}seal"))
_OF_SET, _OF_RUN = _SET.count(",") + 1, _RUN.count(",") + 1

_PACK = f"p.id, {PACK_NAME}, p.bytes, p.seal"
_PLACE = f"{PACK_NAME}, lower(hex(p.segment)), p.place, p.bytes"
_TAG = f"{bounded('t.name')}, t.version, t.seal"
_POLICY = f"{bounded('t.run')}, t.policy, t.seal"
META = f"{bounded('t.key')}, {bounded('t.value')}, t.seal"
_PLACES, _JOINED = rows(PackName, Id, Whole, Whole), rows(Id, Positive, Whole)
#: The condition of the index of packs with raw objects.
_RAW = "name LIKE '%.raw.zip'"
_STEPS = rows(Positive, Integer | None)
_SIZES = rows(Positive, Whole)
_NAMES = rows(PackName)
_OFFSETS = rows(PackName, Whole)
_DESCRIBED = rows(Whole, Id, PackName, Whole)
_NUMBER_ROWS = rows(Whole)
_COUNT_ROWS = rows(Label, Annotated[str, Meta(pattern=r"\A[0-9]{1,15}\Z")])
_NUMBERS = rows(Positive)
_SLOTS, _USES, _BASES = rows(Slots), rows(Positive, PackName, Slots | None, Bit), rows(PackName, PackName)
#: Distance of numbers within which a similar version is looked for.
_NEAR = 100

#: Versions with a band that count, and versions with most of some bands.
_ALIKE = 64
_NEAREST = 12
#: Number of versions that are read at once where the first ones may suffice.
_PAGE = 100
_TOTAL = rows(Size)
_USED, _USERS = rows(Whole, Whole), rows(Positive, Bit, Slots | None)
_ABOVE, _HELD = rows(PackName, Whole | None), rows(Whole, Positive)
_GLOBS = tuple[Word, ...]

_FIRST = "(SELECT min(number) FROM versions WHERE run = o.id AND superseded = {})"
_LOWEST = (
    "(SELECT number FROM versions WHERE run = o.id AND superseded = {} AND step IS NOT NULL ORDER BY step LIMIT 1)"
)
#: Runs with versions, and the versions with the lowest number and the lowest step.
_ENDS = (
    f"SELECT coalesce({_FIRST.format(0)}, {_FIRST.format(1)}, 0),"
    f" coalesce({_LOWEST.format(0)}, {_LOWEST.format(1)}, 0), {_RUN} FROM runs o WHERE o.versions AND "
)
_END_ROWS = rows(Whole, Whole)
#: Runs with one metric, or with each of theirs: the next name is found without the versions between.
_ONE_METRIC = "pairs(run, named, name) AS (SELECT o.id, o.name, ? FROM runs o WHERE {0})"
_ALL_METRICS = (
    "pairs(run, named, name) AS (SELECT o.id, o.name, (SELECT min(name) FROM metrics WHERE run = o.id)"
    " FROM runs o WHERE {0} UNION ALL SELECT run, named, (SELECT min(m.name) FROM metrics m WHERE m.run = pairs.run"
    " AND m.name > pairs.name) FROM pairs WHERE name IS NOT NULL)"
)
_OF_PAIR = "FROM metrics m WHERE m.run = x.run AND m.name = x.name"
#: Runs, metrics, the lowest or highest value, and the number of the first version with it.
_EXTREMES = "WITH RECURSIVE {} " + " UNION ALL ".join(
    f"SELECT {bounded('x.named')}, {bounded('x.name')}, '{end}', x.value,"
    f" (SELECT min(version) {_OF_PAIR} AND m.value = x.value)"
    f" FROM (SELECT run, named, name, (SELECT {end}(value) {_OF_PAIR}) AS value FROM pairs x) x"
    " WHERE x.value IS NOT NULL"
    for end in ("min", "max")
)
_EXTREME_ROWS = rows(Name, Text, Literal["min", "max"], float, Positive)
#: The metrics of all versions as text, and their index.
_METRICS = (
    f"SELECT 0, {bounded('o.name')}, NULL, v.metrics, v.number FROM versions v JOIN runs o ON o.id = v.run"
    f" WHERE NOT v.superseded UNION ALL SELECT 1, {bounded('o.name')}, {bounded('m.name')}, m.value, m.version"
    " FROM metrics m LEFT JOIN runs o ON o.id = m.run"
)
#: The runs of versions.
_RUNS_OF = f"SELECT v.number, {bounded('o.name')} FROM versions v JOIN runs o ON o.id = v.run WHERE v.number"
_RUN_OF_ROWS = rows(Positive, Name)


class Uses(NamedTuple):
    """All that names a pack in the catalog.

    Attributes
    ----------
    own
        Numbers of the versions whose manifests are in it.
    blobs
        Numbers of other versions with blobs there.
    objects
        Numbers of other versions with objects there, each with the text of at least their slots.
    above
        Packs that may have objects whose bases are there, with their column `held`.
    """

    own: list[int]
    blobs: list[int]
    objects: list[tuple[int, str]]
    above: dict[str, int | None]


class _Sum(NamedTuple):
    """The number of rows in a set, the sum of their checksums, and the numbers of its last and highest version.

    `more` is the highest version of a run, or the bytes of a set of packs or versions; the others are those of a run.
    """

    rows: int
    total: int
    last: int
    more: int = 0
    original_bytes: int = 0
    stored_bytes: int = 0

    @property
    def highest(self) -> int:
        """The number of the highest version of a run."""
        return self.more


class CatalogReader:
    """The queries of a catalog; `ckstore.storage.catalog.Catalog` describes the parameters."""

    #: Whether no other machine has a catalog of the store. If others have one, their claims are unknown here, and the
    #: name of a removed pack is never used again.
    is_only = True

    def __init__(self, store: Path, mode: Mode = "r", timeout: float = BUSY_TIMEOUT) -> None:
        self._path = store / root.CATALOG
        self._connection = Connection(self._path, mode, timeout, is_mirror=not self.is_only)
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
            return self._versions(self._set("versions", VERSION, f"versions v ON 1 {NAMES}", "v.number"))
        found = self._connection.rows(
            f"SELECT {VERSION}, {_RUN} FROM runs o LEFT JOIN versions v ON v.run = o.id {NAMES} WHERE o.name = ?"
            " ORDER BY v.number",
            [run],
        )
        if not found:
            raise self._unknown_run(run)
        return self._versions(self._whole(found, _OF_RUN, run))

    def _unknown_run(self, run: str) -> NotFoundError:
        near = near_names(run, [found.name for found in self.runs()])
        hint = f" (near: {', '.join(near)})" if near else ""
        return NotFoundError(f"Unknown run {run}{hint}; `ckstore runs` lists the runs.")

    def last_versions(self, count: int, run: str | None = None) -> list[VersionRow]:
        """Return the versions with the highest numbers, of one run or of all, by number."""
        self.latest(run)  # Raises `IntegrityError` if its row is lost.
        if run is None:
            return self._select("ORDER BY v.number DESC LIMIT ?", count)[::-1]
        if not self.has_run(run):
            raise self._unknown_run(run)
        own = "SELECT number FROM versions WHERE run = (SELECT id FROM runs WHERE name = ?) AND superseded"
        parts = (f"SELECT * FROM ({own} = {bit} ORDER BY number DESC LIMIT ?)" for bit in (0, 1))  # As the index is.
        where = f"WHERE v.number IN ({' UNION ALL '.join(parts)}) ORDER BY v.number DESC LIMIT ?"
        return self._select(where, run, count, run, count, count)[::-1]

    def oldest(self, count: int) -> list[VersionRow]:
        """Return the versions with the earliest times, superseded ones first."""
        return self._select("ORDER BY v.superseded DESC, v.created, v.number LIMIT ?", count)

    def totals(self) -> Totals:
        """Return the sums of all versions, runs, tags and packs."""
        sums = {row[0]: self._sum(row) for row in self._connection.rows(f"SELECT {_SET} FROM seals s")}
        if lost := {"versions", "runs", "tags", "packs"} - set(sums):
            raise damaged(self._path, f"the sum of {min(lost)} is missing")
        versions, runs, tags, packs = (sums[name] for name in ("versions", "runs", "tags", "packs"))
        return Totals(versions.rows, runs.rows, tags.rows, packs.rows, packs.more, versions.more)

    def hot(self, run: str | None = None) -> list[VersionRow]:
        """Return the hot versions of all runs, or of one, by number; raise `NotFoundError` for an unknown run."""
        found = self._versions(self._set("hot", VERSION, f"versions v ON v.hot {NAMES}", "v.number"))
        if run is not None and not self.has_run(run):
            raise self._unknown_run(run)
        return [row for row in found if run in (None, row.run)]

    def described(self) -> list[tuple[int, str, str, int]]:
        """Return number, id, pack and manifest offset of every version."""
        query = (
            f"SELECT v.number, lower(hex(v.uid)), {PACK_NAME}, v.manifest_offset"
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
        """Return the latest version of the store or of one run; None if there are none.

        Superseded versions count only if there are no others.
        """
        if run is not None:
            return self._of_run(run, "last")
        query = f"SELECT {VERSION}, {_SET} FROM seals s LEFT JOIN versions v ON v.number = s.last {NAMES}"
        return self._owned(self._connection.rows(f"{query} WHERE s.name = 'versions'"), _OF_SET, "last")

    def first(self, run: str) -> VersionRow | None:
        """Return the version of a run with the lowest number that is not superseded; None if there are none."""
        found = self._select("WHERE r.name = ? AND v.superseded = 0 ORDER BY v.number LIMIT 1", run)
        return self._meant(found, lambda row: (row.run, row.superseded) == (run, False))

    def highest(self, run: str) -> VersionRow | None:
        """Return the version of a run with the highest step; without steps, the latest.

        Superseded versions count only if there are no others.
        """
        return self._of_run(run, "highest")

    def at_step(self, run: str, step: int, *, superseded: bool = False) -> VersionRow | None:
        """Return the version of a run at a step, or None; with `superseded`, the latest superseded one."""
        found = self._select(
            f"WHERE r.name = ? AND v.step = ? AND v.superseded = {superseded:d} ORDER BY v.number DESC LIMIT 1",
            run, step,
        )  # fmt: skip
        return self._meant(found, lambda row: (row.run, row.step, row.superseded) == (run, step, superseded))

    def below(self, run: str, step: int, every: int = 1) -> VersionRow | None:
        """Return the version of a run with the highest step below one, or None; without superseded versions.

        Steps are multiples of `every`.
        """
        found = self._select(
            "WHERE r.name = ? AND v.step < ? AND v.step % ? = 0 AND v.superseded = 0 ORDER BY v.step DESC LIMIT 1",
            run, step, every,
        )  # fmt: skip
        return self._meant(found, lambda row: (row.run, row.superseded) == (run, False) and (row.step or 0) < step)

    def after(self, run: str, number: int) -> list[VersionRow]:
        """Return the versions of a run with larger numbers, by number, without superseded ones."""
        return self._select("WHERE r.name = ? AND v.superseded = 0 AND v.number > ? ORDER BY v.number", run, number)

    def without_step(self, run: str, nbytes: int) -> list[VersionRow]:
        """Return the versions of a run that have no step and this original size, newest first.

        Superseded versions are left out.
        """
        return self._select(
            "WHERE r.name = ? AND v.superseded = 0 AND v.step IS NULL AND v.original_bytes = ? ORDER BY v.number DESC",
            run, nbytes,
        )  # fmt: skip

    def hot_sizes(self, run: str, keep: int = 0) -> dict[int, int]:
        """Return the stored bytes of the hot versions of a run by number, without its `keep` latest versions."""
        query = (
            "SELECT v.number, v.stored_bytes FROM versions v INDEXED BY versions_hot JOIN runs r ON r.id = v.run"
            " WHERE v.hot AND r.name = ? AND v.number NOT IN (SELECT number FROM versions"
            " WHERE run = r.id AND superseded = 0 ORDER BY number DESC LIMIT ?) ORDER BY v.number"
        )
        return dict(self._connection.rows(query, [run, keep], _SIZES))

    def with_uid(self, prefix: str) -> list[VersionRow]:
        """Return the versions whose id has this hexadecimal prefix, by number."""
        first, last = (bytes.fromhex(prefix.ljust(40, digit)) for digit in "0f")
        return self._select("WHERE v.uid BETWEEN ? AND ? ORDER BY v.number", first, last)

    def resolve(self, spec: str | int) -> VersionRow:
        """Return the version with a name; see `version_names.resolve`."""
        return resolve(self, spec)

    def runs(self) -> list[RunRow]:
        """Return all runs in order of creation."""
        found = self._set("runs", _RUN, "runs o ON 1", "o.id", RUN_ROWS)
        numbers = [row[4] for row in found]
        steps = dict(self._connection.rows_of("SELECT number, step FROM versions WHERE number", numbers, _STEPS))
        return [RunRow(name, count, last or None, steps.get(last)) for _, name, count, _, last, *_ in found]

    def summaries(self, run: str | None = None) -> list[RunSummary]:
        """Return sums, ends and extreme metrics of all runs, or of one; raise `NotFoundError` for an unknown run."""
        known = [found.name for found in self.runs()]
        if run is not None and run not in known:
            raise self._unknown_run(run)
        found, rows = self._with_versions(
            partial(self._ends, run),
            lambda found: (found[0], found[1] or found[0], found[2][5]),
            lambda found, row: row.run == found[2][1],
        )
        extremes: dict[str, dict[str, dict[str, VersionRow]]] = {}
        for name, metric, end, version in self._extremes(run):
            extremes.setdefault(name, {}).setdefault(metric, {})[end] = version
        tags: dict[str, list[str]] = {}
        numbers = self.tags()
        runs = dict(self._connection.rows_of(_RUNS_OF, numbers.values(), _RUN_OF_ROWS))
        for tag, number in numbers.items():
            tags.setdefault(runs.get(number, ""), []).append(tag)
        return [
            RunSummary(
                name, count, size, stored, rows[first], rows[highest], rows.get(lowest), extremes.get(name, {}),
                tags.get(name, ()),
            )
            for first, lowest, (_, name, count, _, _, highest, size, stored) in found
        ]  # fmt: skip

    def extreme(self, metric: str, run: str | None, *, lowest: bool) -> VersionRow | None:
        """Return the version with the lowest or highest value of a metric, the first of equal ones, or None.

        Superseded versions are left out.
        """
        if run is None:
            self.runs()  # Raises `IntegrityError` if one is lost.
        wanted = "min" if lowest else "max"
        found = [row for _, _, end, row in self._extremes(run, metric) if end == wanted]
        sign = 1 if lowest else -1
        return min(found, key=lambda row: (sign * row.metrics[metric], row.number), default=None)

    def tags(self) -> dict[str, int]:
        """Return version numbers by tag, sorted by tag."""
        return dict(self._set("tags", _TAG, "tags t ON 1", "t.name", TAG_ROWS))

    def tagged(self, tag: str) -> int | None:
        """Return the number of the version with a tag, or None."""
        found = self._connection.sealed(f"SELECT {_TAG} FROM tags t WHERE name = ?", [tag], TAG_ROWS)
        return int(found[0][1]) if found else None

    def tags_of(self, number: int) -> list[str]:
        """Return the tags of a version, sorted."""
        query = f"SELECT {_TAG} FROM tags t WHERE version = ? ORDER BY name"
        return [tag for tag, _ in self._connection.sealed(query, [number], TAG_ROWS)]

    def alike(self, bands: Iterable[int]) -> list[int]:
        """Return the numbers of some present versions with these bands, those with most of them first.

        Of each band only the latest versions count.
        """
        found: Counter[int] = Counter()
        query = (
            "SELECT v.number FROM likeness l JOIN versions v ON v.number = l.version WHERE l.band = ?"
            f" ORDER BY l.version DESC LIMIT {_ALIKE}"
        )
        for band in bands:
            found.update(number for (number,) in self._connection.rows(query, [band], _NUMBERS))
        return sorted(found, key=lambda number: (found[number], number), reverse=True)[:_NEAREST]

    def nearest_dropped(self, run: str, number: int) -> VersionRow | None:
        """Return the version of a run with dropped tensors whose number is nearest; None if none is near."""
        found = self._select(
            "WHERE v.number BETWEEN ? AND ? AND r.name = ? AND v.dropped <> '[]'", number - _NEAR, number + _NEAR, run
        )
        return min(found, key=lambda row: abs(row.number - number), default=None)

    def has_run(self, run: str) -> bool:
        """Return whether there is a run of this name."""
        return bool(self._connection.sealed(f"SELECT {_RUN} FROM runs o WHERE o.name = ?", [run], RUN_ROWS))

    def followed(self, run: str) -> set[int]:
        """Return the numbers of a run's versions that are parents of other runs' versions."""
        query = (
            "SELECT DISTINCT v.number FROM versions v JOIN runs r ON r.id = v.run"
            " JOIN versions c ON c.parent = v.number WHERE r.name = ? AND c.run <> v.run"
        )
        return {number for (number,) in self._connection.rows(query, [run])}

    def packs(self) -> list[PackInfo]:
        """Return all packs in order of commit."""
        found = self._set("packs", _PACK, "packs p ON 1", "p.id", PACK_ROWS)
        return [PackInfo(name, nbytes) for _, name, nbytes in found]

    def pack_bytes(self, name: str) -> int | None:
        """Return the size of a pack; None if the catalog does not have it."""
        found = self._connection.sealed(f"SELECT {_PACK} FROM packs p WHERE name = ?", [name], PACK_ROWS)
        return int(found[0][2]) if found else None

    def segment_of(self, pack: str) -> Place | None:
        """Return the place of a pack in a segment; None if it is a file of its own, or unknown."""
        query = f"SELECT {_PLACE} FROM packs p WHERE name = ? AND segment IS NOT NULL"
        return next((_place(row)[1] for row in self._connection.rows(query, [pack], _PLACES)), None)

    def in_segments(self, names: Collection[str] | None = None) -> dict[str, Place]:
        """Return the places of packs in segments, by name; None asks for all, in order of commit."""
        query = f"SELECT {_PLACE} FROM packs p WHERE segment IS NOT NULL"
        if names is None:
            return dict(map(_place, self._connection.rows(f"{query} ORDER BY id", schema=_PLACES)))
        return dict(map(_place, self._connection.rows_of(f"{query} AND name", names, _PLACES)))

    def joined(self) -> dict[str, tuple[int, int]]:
        """Return the number of packs in each segment, and their bytes, by the segment's name."""
        query = "SELECT lower(hex(segment)), COUNT(*), SUM(bytes) FROM packs WHERE segment IS NOT NULL GROUP BY segment"
        return {digest + SUFFIX: (count, size) for digest, count, size in self._connection.rows(query, schema=_JOINED)}

    def small_packs(self, count: int) -> list[str]:
        """Return the first small packs, in order of commit, that are encoded and not in a segment.

        Those of hot versions are left out: they will be replaced.
        """
        query = (
            f"SELECT {PACK_NAME} FROM packs p WHERE segment IS NULL AND bytes < 262144 AND NOT {_RAW}"
            " AND id NOT IN (SELECT pack FROM versions WHERE hot) ORDER BY id LIMIT ?"
        )
        return [name for (name,) in self._connection.rows(query, [count], _NAMES)]

    def former_raw_packs(self, number: int) -> list[str]:
        """Return the packs with raw objects that a version uses, or none does, without other hot versions' own packs.

        Hot versions, which use all objects of their own, may share objects in these.
        """
        query = (
            f"SELECT {_PACK} FROM packs p WHERE {_RAW} AND id IN (SELECT pack FROM version_packs WHERE version = ?"
            f" UNION ALL SELECT id FROM packs WHERE {_RAW} AND uses = 0) AND NOT EXISTS"
            " (SELECT 1 FROM version_packs u JOIN versions v ON v.number = u.version"
            f" WHERE u.pack = p.id AND v.hot AND u.objects = '{ALL}' AND v.number <> ?)"
        )
        return [name for _, name, _ in self._connection.sealed(query, [number, number], PACK_ROWS)]

    def known_packs(self, names: Iterable[str]) -> set[str]:
        """Return the names of those packs that the catalog has."""
        query = f"SELECT {PACK_NAME} FROM packs p WHERE name"
        return {name for (name,) in self._connection.rows_of(query, names, _NAMES)}

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
            query = f"SELECT {META} FROM meta t WHERE key NOT IN ('store', ?) AND instr(key, ':') = 0"
            return dict(self._connection.sealed(query, [COLLECTED], META_ROWS))
        found = self._connection.rows_of(f"SELECT {META} FROM meta t WHERE key", names)
        return dict(self._connection.unsealed(found, META_ROWS))

    def own_packs(self, number: int) -> list[str]:
        """Return the names of the packs that a version was written to; the last one has its manifest."""
        # The pack of its raw objects was added immediately before.
        query = (
            f"SELECT {PACK_NAME} FROM packs p JOIN versions v ON p.id = v.pack"
            " OR p.id = v.pack - 1 AND p.name LIKE '%.raw.zip' WHERE v.number = ? ORDER BY p.id"
        )
        return [name for (name,) in self._connection.rows(query, [number], _NAMES)]

    def chain_packs(self, number: int) -> set[str]:
        """Return the names of the packs that restoring a version probably needs; others may be needed.

        They are the packs of the version and its blobs, and of as many ancestors as its chains are long.
        """
        query = (
            "WITH RECURSIVE line(parent, pack, depth) AS (SELECT parent, pack, depth FROM versions WHERE number = ?"
            " UNION ALL SELECT v.parent, v.pack, l.depth - 1 FROM line l JOIN versions v ON v.number = l.parent"
            f" WHERE l.depth > 0) SELECT {PACK_NAME} FROM packs p JOIN line l ON p.id = l.pack"
            f" UNION SELECT {PACK_NAME} FROM packs p JOIN version_packs r ON r.pack = p.id WHERE r.version = ?"
        )
        return {name for (name,) in self._connection.rows(query, [number, number], _NAMES)} | set(
            self.own_packs(number)
        )

    def manifest_offsets(self, names: Sequence[str]) -> dict[str, int]:
        """Return the offset of the manifest in each of these packs that has one, by name."""
        query = f"SELECT {PACK_NAME}, v.manifest_offset FROM packs p JOIN versions v ON v.pack = p.id WHERE p.name"
        return dict(self._connection.rows_of(query, names, _OFFSETS))

    def identity(self) -> str:
        """Return the random id of this catalog; a rebuilt catalog has another."""
        return self.moved_packs(["store"]).get("store", "")

    def collected(self) -> str:
        """Return the time at which `gc` last moved or removed an object; empty if never."""
        return self.moved_packs([COLLECTED]).get(COLLECTED, "")

    def swept(self) -> str:
        """Return the name of a record in the log, up to which nothing can be undone; empty if unknown."""
        return self._record_name(self.moved_packs([SWEPT]).get(SWEPT, ""))

    def _record_name(self, name: str) -> str:
        """Return the name of a record in the log, or nothing; raise `IntegrityError` for any other text."""
        try:
            check(name, Follows)
        except ValueError as error:
            raise damaged(self._path, error) from error
        return name

    def is_incomplete(self) -> bool:
        """Return whether versions lacked objects at the last recovery."""
        return INCOMPLETE in self.moved_packs([INCOMPLETE])

    def unswept(self) -> list[str]:
        """Return the packs that were added, or lost an object or a row that names them, since `gc` looked at them."""
        query = f"SELECT {PACK_NAME} FROM packs p WHERE held IS NULL ORDER BY id"
        return [name for (name,) in self._connection.rows(query, schema=_NAMES)]

    def held(self, besides: Collection[str] = ()) -> int:
        """Return the bytes of objects that only others' chains need, as of the last `gc`, without those of some packs.

        Packs that were changed since do not count.
        """
        [[total]] = self._connection.rows("SELECT TOTAL(held) FROM packs", schema=_TOTAL)
        query = "SELECT id, held FROM packs WHERE held > 0 AND name"
        return int(total) - int(sum(size for _, size in self._connection.rows_of(query, besides, _HELD)))

    def kept(self) -> tuple[int, str]:
        """Return the bytes that only forgotten versions need, as of the last collection, and until when."""
        match = _KEPT.fullmatch(self.moved_packs([KEPT]).get(KEPT, ""))
        return (0, "") if match is None else (int(match[1]), match[2])

    def uses_of(self, pack: str) -> Uses:
        """Return all that names a pack; raise `IntegrityError` if a row is missing or changed."""
        found = self._connection.rows("SELECT id, uses FROM packs WHERE name = ?", [pack], _USED)
        if not found:
            raise damaged(self._path, f"pack {pack} is missing")
        [[number, total]] = found
        own = self._connection.rows("SELECT number FROM versions WHERE pack = ?", [number], _NUMBERS)
        others = self._connection.rows(
            "SELECT version, blobs, NULLIF(objects, '') FROM version_packs WHERE pack = ? ORDER BY version",
            [number],
            _USERS,
        )
        above = self._connection.rows("SELECT pack FROM pack_bases WHERE base = ?", [number], _NUMBER_ROWS)
        sums = (
            *(seal(version) for (version,) in own),
            *(seal(number, blobs, slots or "") for number, blobs, slots in others),
        )
        if total != (sum(sums) + sum(seal(-pack) for (pack,) in above)) & USES_BITS:
            raise damaged(self._path, f"rows that name pack {pack} are missing or changed")
        names = self._connection.rows_of(
            f"SELECT {PACK_NAME}, held FROM packs p WHERE id", [pack for (pack,) in above], _ABOVE
        )
        return Uses(
            [version for (version,) in own],
            [version for version, blobs, _ in others if blobs],
            [(version, slots) for version, _, slots in others if slots],
            dict(names),
        )

    def used_slots(self, pack: str) -> list[str]:
        """Return the different sets of slots of a pack that versions may use besides its own, as texts."""
        found: list[str] = []
        last = ""
        while True:
            # Many versions use the same set, such as the frozen layers of a run: each is looked up once.
            query = (
                "SELECT r.objects FROM version_packs r WHERE r.pack = (SELECT id FROM packs WHERE name = ?)"
                " AND r.objects > ? ORDER BY r.objects LIMIT 1"
            )
            rows = self._connection.rows(query, [pack, last], _SLOTS)
            if not rows:
                return found
            if rows[0][0] <= last:
                raise damaged(self._path, "an index is out of order")
            found.append(last := rows[0][0])

    def users(self, pack: str, slots: Collection[int]) -> Iterator[int]:
        """Yield the numbers of the versions that may have an object in some slots of a pack, and maybe others.

        The caller may remove slots between two numbers.
        """
        query = (
            "SELECT r.version FROM version_packs r WHERE r.pack = (SELECT id FROM packs WHERE name = ?)"
            " AND r.objects = ? AND r.version > ? ORDER BY r.version LIMIT ?"
        )
        own = "SELECT v.number FROM versions v WHERE v.pack = (SELECT id FROM packs WHERE name = ?)"
        yield from (number for (number,) in self._connection.rows(own, [pack], _NUMBERS))
        for used in self.used_slots(pack):
            last = 0
            page: list[tuple[int]] = []
            while among(used, slots):
                if not page and not (page := self._connection.rows(query, [pack, used, last, _PAGE], _NUMBERS)[::-1]):
                    break
                [number] = page.pop()
                if number <= last:
                    raise damaged(self._path, "an index is out of order")
                yield (last := number)

    def packs_on(self, names: Iterable[str]) -> set[str]:
        """Return the names of the packs that may have objects whose bases are in some packs."""
        query = (
            f"SELECT {PACK_NAME} FROM packs b JOIN pack_bases l ON l.base = b.id"
            " JOIN packs p ON p.id = l.pack WHERE b.name"
        )
        return {name for (name,) in self._connection.rows_of(query, names, _NAMES)}

    def bases(self) -> set[tuple[str, str]]:
        """Return pairs of a pack, and one that may have bases of its objects, by name. Reads the whole table."""
        query = (
            f"SELECT {PACK_NAME}, {bounded('b.name')} FROM pack_bases l"
            " JOIN packs b ON b.id = l.base JOIN packs p ON p.id = l.pack"
        )
        return set(self._connection.rows(query, schema=_BASES))

    def uses(self, numbers: Collection[int]) -> dict[int, dict[str, tuple[str, int]]]:
        """Return the packs of versions, by number: the text of the slots of their objects, and whether they have blobs.

        A version's own pack counts.
        """
        found: dict[int, dict[str, tuple[str, int]]] = {number: {} for number in numbers}
        for query in (
            f"SELECT r.version, {PACK_NAME}, NULLIF(r.objects, ''), r.blobs FROM version_packs r JOIN packs p"
            " ON p.id = r.pack WHERE r.version",
            f"SELECT v.number, {PACK_NAME}, '*', 1 FROM versions v JOIN packs p ON p.id = v.pack WHERE v.number",
        ):
            for number, name, slots, blobs in self._connection.rows_of(query, numbers, _USES):
                found[number][name] = slots or "", blobs
        return found

    def original_bytes(self) -> int:
        """Return the bytes of the files of all versions."""
        [[total]] = self._connection.rows("SELECT TOTAL(original_bytes) FROM versions", schema=_TOTAL)
        return int(total)

    def state(self) -> tuple[int, int, int]:
        """Return a value that differs after any change of the catalog, by this process or another."""
        return self._connection.state()

    def policies(self) -> dict[str, str]:
        """Return the policies as text, by run; the store's under the empty name."""
        return dict(self._set("policies", _POLICY, "policies t ON 1", "t.run", POLICY_ROWS))

    def unreferenced_packs(self, names: Iterable[str] | None = None) -> list[PackInfo]:
        """Return the packs, of all or of some, without live data: no manifest, blob or object."""
        query = (
            f"SELECT {_PACK} FROM packs p WHERE p.id NOT IN (SELECT pack FROM objects)"
            " AND NOT EXISTS (SELECT 1 FROM versions v WHERE v.pack = p.id)"
            " AND NOT EXISTS (SELECT 1 FROM version_packs r WHERE r.pack = p.id AND r.blobs)"
        )
        rows = self._connection.rows
        asked = (
            rows(f"{query} ORDER BY p.id") if names is None else self._connection.rows_of(f"{query} AND name", names)
        )
        return [PackInfo(name, nbytes) for _, name, nbytes in self._connection.unsealed(asked, PACK_ROWS)]

    def last_number(self) -> int:
        """Return the highest version number that was ever committed."""
        [[present]] = self._connection.rows("SELECT COALESCE(MAX(number), 0) FROM versions", schema=_NUMBER_ROWS)
        return max(int(present), self._count(LAST))

    def _count(self, name: str) -> int:
        """Return the number in a row of `meta`; 0 if there is none."""
        found = self._connection.sealed(f"SELECT {META} FROM meta t WHERE key = ?", [name], _COUNT_ROWS)
        return int(found[0][1]) if found else 0

    def objects(self) -> int:
        """Return the number of objects."""
        return self._objects.count()

    def check(self) -> list[str]:
        """Return a sentence for each problem that SQLite finds in the file. Reads all of it."""
        found = [row[0] for row in self._connection.rows("PRAGMA main.integrity_check(10)") if row[0] != "ok"]
        refers = self._connection.rows("PRAGMA main.foreign_key_check")
        found += [f"a row of {row[0]} refers to nothing" for row in refers]
        if not self._are_metrics_right():
            found.append("rows of metrics are missing or changed")
        return [f"{self._path} is damaged ({problem}); run `ckstore recover` to rebuild it." for problem in found]

    def _are_metrics_right(self) -> bool:
        """Return whether the index of metrics is that of the versions."""
        indexed, known = set(), set()
        for is_index, run, metric, value, number in self._connection.rows(_METRICS):
            if is_index:
                indexed.add((run, metric, value, number))
                continue
            with suppress(ValueError, TypeError):  # A damaged row of a version is told where it is read.
                known |= {(run, *named, number) for named in indexed_values(decode_plain(value)).items()}
        return indexed == known

    def reservations(self) -> list[Claim]:
        """Return the reserved numbers of running and killed ingests."""
        query = f"SELECT number, pid, {bounded('host')}, created FROM reservations WHERE host <> '' ORDER BY number"
        return [Claim(*row) for row in self._connection.claims(query, RESERVATION_ROWS)]

    def reserved_numbers(self) -> set[int]:
        """Return the numbers of reservations, dropped ones included."""
        return {number for [number] in self._connection.claims("SELECT number FROM reservations", _NUMBERS)}

    def leases(self) -> list[Claim]:
        """Return the leases in force: of running processes on this host, and unexpired ones of other hosts."""
        host, now = durable.host(), durable.timestamp()
        return [
            claim
            for claim in self._claims()
            if (durable.is_running(claim.pid) if claim.host == host else claim.expires > now)
        ]

    def _claims(self) -> list[Claim]:
        found = self._connection.claims(
            f"SELECT id, pid, {bounded('host')}, created, {bounded('purpose')}, expires FROM leases"
            " ORDER BY created, id",
            LEASE_ROWS,
        )
        return [Claim(*row) for row in found]

    def prove_versions(self) -> None:
        """Raise `IntegrityError` unless every row of versions is as written. Makes no objects of them."""
        self._set("versions", VERSION, f"versions v ON 1 {NAMES}", "v.number")

    def prove(self) -> None:
        """Raise `IntegrityError` unless every row of versions, runs, packs, tags, policies and `meta` is as written.

        Changed, lost and repeated rows are found. Reads these tables whole.
        """
        self.versions()
        self.hot()
        self.runs()
        self.packs()
        self.tags()
        self.policies()
        self._set("meta", META, "meta t ON 1", "t.key", META_ROWS)
        for run, count, total, last in self._connection.rows(
            f"SELECT {bounded('o.name')}, o.versions, o.total, o.last FROM runs o"
            " LEFT JOIN versions v ON v.run = o.id GROUP BY o.id"
            " HAVING o.versions <> COUNT(v.number) OR o.total <> coalesce(SUM(v.seal), 0)"
            " OR o.original_bytes <> coalesce(SUM(v.original_bytes), 0)"
            " OR o.stored_bytes <> coalesce(SUM(v.stored_bytes), 0)"
            " OR o.last <> coalesce(MAX(v.number) FILTER (WHERE NOT v.superseded), MAX(v.number), 0)"
        ):
            raise damaged(self._path, f"run {run} has not the {count} versions up to {last} that sum up to {total}")
        for (name,) in self._connection.rows(
            f"SELECT {PACK_NAME} FROM packs p LEFT JOIN"
            f" (SELECT id, SUM(seal) AS total FROM ({USED}) GROUP BY id) USING (id)"
            f" WHERE uses <> coalesce(total, 0) & {USES_BITS}"
        ):
            raise damaged(self._path, f"rows that name pack {name} are missing or changed")

    def _select(self, tail: str, *parameters: Any) -> list[VersionRow]:
        return self._versions(self._connection.sealed(f"SELECT {VERSION} FROM versions v {NAMES} {tail}", parameters))

    def _versions(self, found: Sequence[Sequence[Any]]) -> list[VersionRow]:
        try:
            check([found], VERSION_ROWS)
            return [_version(row) for row in found]
        except ValueError as error:
            raise damaged(self._path, error) from error

    def _ends(self, run: str | None) -> list[tuple[int, int, Sequence[Any]]]:
        """Return the lowest number of runs, that of the lowest step or 0, and the runs with their sums."""
        condition, parameters = ("1", []) if run is None else ("o.name = ?", [run])
        found = self._connection.rows(_ENDS + condition, parameters)
        ends = self._connection.checked([row[:2] for row in found], _END_ROWS)
        sums = self._connection.unsealed([row[2:] for row in found], RUN_ROWS)
        return [(first, lowest, own) for (first, lowest), own in zip(ends, sums, strict=True)]

    def _extremes(self, run: str | None, metric: str | None = None) -> list[tuple[str, str, str, VersionRow]]:
        """Return names of runs and of metrics, and the versions with the lowest and the highest value of each."""
        pairs = (_ALL_METRICS if metric is None else _ONE_METRIC).format("1" if run is None else "o.name = ?")
        parameters = [name for name in (metric, run) if name is not None]

        def is_meant(found: Sequence[Any], row: VersionRow) -> bool:
            name, of, _, value, _ = found
            return not row.superseded and (row.run, metric_value(row.metrics.get(of))) == (name, value)

        query = partial(self._connection.rows, _EXTREMES.format(pairs), parameters, _EXTREME_ROWS)
        found, rows = self._with_versions(query, lambda found: found[-1:], is_meant)
        return [(name, of, end, rows[number]) for name, of, end, _, number in found]

    def _with_versions(
        self,
        query: Callable[[], list[T]],
        numbers: Callable[[T], Sequence[int]],
        is_meant: Callable[[T, VersionRow], bool],
    ) -> tuple[list[T], dict[int, VersionRow]]:
        """Return the rows of a query, and the versions that they name, by number.

        Another process may change or forget one between the two: only if the query names it again, it is damaged.
        """
        before: list[T] | None = None
        while True:
            found = query()
            named = [(row, number) for row in found for number in numbers(row)]
            versions = f"SELECT {VERSION} FROM versions v {NAMES} WHERE v.number"
            read = self._connection.unsealed(self._connection.rows_of(versions, (number for _, number in named)))
            rows = {row.number: row for row in self._versions(read)}
            wrong = [number for row, number in named if number not in rows or not is_meant(row, rows[number])]
            if not wrong:
                return found, rows
            if found == before:
                problem = "is named in place of another" if wrong[0] in rows else "is missing"
                raise damaged(self._path, f"version {wrong[0]} {problem}")
            before = found

    def _of_run(self, run: str, which: str) -> VersionRow | None:
        """Return the version that is the last or the highest one of a run."""
        query = f"SELECT {VERSION}, {_RUN} FROM runs o LEFT JOIN versions v ON v.number = o.{which} {NAMES}"
        found = self._owned(self._connection.rows(f"{query} WHERE o.name = ?", [run]), _OF_RUN, which)
        return self._meant([] if found is None else [found], lambda row: row.run == run)

    def _owned(self, found: Sequence[Sequence[Any]], owner: int, which: str) -> VersionRow | None:
        """Return the version in the row of a query, whose last columns name it as their last or highest one."""
        if not found:
            return None
        [row] = found
        if number := getattr(self._sum(row[-owner:]), which):
            if row[0] != number:
                raise damaged(self._path, f"version {number} is missing")
            return self._versions(self._connection.unsealed([row[:-owner]]))[0]
        return None

    def _meant(self, found: Sequence[VersionRow], is_meant: Callable[[VersionRow], bool]) -> VersionRow | None:
        """Return the row that an index found, if any; raise `IntegrityError` if it is not the one that was meant."""
        for row in found:
            if not is_meant(row):
                raise damaged(self._path, f"an index names version {row.number} in place of another")
            return row
        return None

    def _set(self, name: str, columns: str, source: str, order: str, schema: type[Struct] | None = None) -> list[Any]:
        """Return all rows of a set with a sum in `seals`; the last of the columns is their checksum."""
        query = f"SELECT {columns}, {_SET} FROM seals s LEFT JOIN {source} WHERE s.name = '{name}' ORDER BY {order}"
        found = self._connection.rows(query)
        if not found:
            raise damaged(self._path, f"the sum of {name} is missing")
        contents = self._whole(found, _OF_SET, name)
        return contents if schema is None else self._connection.checked(contents, schema)

    def _whole(self, found: Sequence[Sequence[Any]], owner: int, name: str) -> list[Any]:
        """Return the members in the rows of a query, without checksums; raise `IntegrityError` unless all are there."""
        expected = self._sum(found[0][-owner:])
        members = [row[:-owner] for row in found if row[0] is not None]
        contents = self._connection.unsealed(members)
        if (len(members), sum(row[-1] for row in members)) != (expected.rows, expected.total):
            raise damaged(self._path, f"rows of {name} are missing or repeated")
        return contents

    def _sum(self, row: Sequence[Any]) -> _Sum:
        """Return the sum in a row of `seals`, or of `runs`."""
        [values] = self._connection.unsealed([row], SEAL_ROWS if len(row) == _OF_SET else RUN_ROWS)
        return _Sum(*values[1 if len(row) == _OF_SET else 2 :])


def _place(row: Sequence[Any]) -> tuple[str, Place]:
    name, digest, offset, size = row
    return name, Place(digest + SUFFIX, offset, size)


def _version(row: Sequence[Any]) -> VersionRow:
    values = list(row)
    origin = values.pop(22)
    if values[0] == values[4]:
        raise ValueError(f"version {values[0]} is its own parent")
    values[16], values[18], values[19] = bool(values[16]), bool(values[18]), bool(values[19])
    values[20] = () if values[20] == "[]" else decode(values[20], _GLOBS)
    values[21] = {**decode_plain(values[21]), **({} if origin is None else decode_plain(origin))}
    return VersionRow(*values)
