"""The catalog of a store: runs, versions, tags, packs, and the place of each object; one SQLite file."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ckstore.errors import CkstoreError, ConflictError, NotFoundError
from ckstore.runtime.provenance import RESERVED
from ckstore.storage import change_log, durable, log_files, root
from ckstore.storage.catalog_claims import CatalogClaims
from ckstore.storage.catalog_reader import COLLECTED, INCOMPLETE, KEPT, LEFT, SWEPT
from ckstore.storage.catalog_tables import LARGEST_ORIGIN, PACK_NAME, SEALED
from ckstore.storage.connection import BUSY_TIMEOUT, Mode, create_file
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.names import check_name
from ckstore.storage.pack import RAW, PackEntry, PackInfo
from ckstore.storage.rows import VERSION_COLUMNS, Claim, Placement, RunRow, VersionRow, indexed_values, key
from ckstore.storage.segments import Place
from ckstore.storage.slots import ALL, among, to_text

C = TypeVar("C", bound="Catalog")
P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Catalog", "Claim", "Placement", "RunRow", "VersionRow", "key"]

#: Row of `meta` with the name of the last record in the log.
LOGGED = "log:last"
#: Joins the slots of a row with those of an existing one.
_WIDENED = (
    "ON CONFLICT (version, pack) DO UPDATE SET objects = CASE WHEN objects IN ('', excluded.objects)"
    f" THEN excluded.objects ELSE '{ALL}' END"
)
#: Statements that add and remove a row of `metrics`, given the name of its run and the other columns.
_ADDED = "INSERT OR IGNORE INTO metrics VALUES ((SELECT id FROM runs WHERE name = ?), ?, ?, ?)"
_REMOVED = (
    "DELETE FROM metrics WHERE run = (SELECT id FROM runs WHERE name = ?) AND name = ? AND value = ? AND version = ?"
)
NOTHING: Mapping[str, str] = MappingProxyType({})
#: Versions that `gc` reads for each one that went, to find rows that none of the others shares.
_LOOKS = 16
#: Seconds for which an open store need not ask for the commits of other machines.
RECENT = 1.0


def recorded(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Make a method that changes rows run in a transaction; other mirrors of a remote store repeat its call."""

    @wraps(method)
    def change(self: C, /, *arguments: P.args, **named: P.kwargs) -> T:
        with self.transaction():
            return self._made(method, arguments, named)

    return change


class Catalog(CatalogClaims):
    """The rows of one store. Threads take turns; processes that write wait for one another, for `timeout` seconds."""

    def __init__(self, store: Path, mode: Mode = "r", timeout: float = BUSY_TIMEOUT) -> None:
        super().__init__(store, mode, timeout)
        self._storage = DirectoryStorage(store)
        # Names of the records of the present transaction in the log, and of the last one of the transaction before.
        self._noted: list[str] = []
        self._follows = ""

    @classmethod
    def create(cls, store: Path, *, shared: bool = False) -> Self:
        """Create a store: its directories and an empty catalog, open for writing; with `shared`, for its group.

        Raise `ConflictError` if the path already has a store or other contents.
        """
        root.create_layout(store, shared=shared)
        path = store / root.CATALOG
        temporary = durable.temporary_path(store)
        try:
            create_file(temporary)
            if not durable.place_absent(temporary, path):
                raise ConflictError(f"{store} is already a store; use it as it is.")
            durable.sync_directory(store)
        finally:
            temporary.unlink(missing_ok=True)
        return cls(store, "a")

    def commit(self, change: Callable[[], T]) -> T:
        """Make a change in one transaction; in a remote store, repeat it if another writer committed first."""
        with self.transaction():
            return change()

    def note(self, record: Mapping[str, Any]) -> None:
        """Write a record of the change into the log, inside its transaction."""
        if not self._noted:
            self._connection.at_end(self._end_notes)
            self._follows = self.logged()
        self._noted.append(change_log.append(self._storage, record, self._follows, len(self._noted)))
        self._write(LOGGED, self._noted[-1])

    def _end_notes(self, is_committed: bool | None) -> None:
        noted, self._noted = self._noted, []
        if is_committed is None:
            with suppress(CkstoreError):
                is_committed = self.logged() != self._follows
        if is_committed is False:
            change_log.withdraw(self._storage, noted)

    def note_logged(self, name: str) -> None:
        """Record the last record in the log, of a catalog that was rebuilt from it."""
        with self.transaction():
            self._write(LOGGED, name)

    def logged(self) -> str:
        """Return the name of the last record that was committed; empty if there is none."""
        return self._record_name(self.moved_packs([LOGGED]).get(LOGGED, ""))

    def log_records(self, after: str = "") -> list[dict[str, Any]]:
        """Return the log's undamaged records of committed changes, in order; only those after a committed one."""
        return change_log.read_all(self._storage, after)[0]

    def undoable(self) -> list[Mapping[str, Any]]:
        """Return the records of forgotten versions that can come back, without changes that were interrupted."""
        last = self.logged()
        return change_log.undoable(
            record for record in self.log_records(self.swept()) if not self.is_only or log_files.name_of(record) <= last
        )

    def differences(self) -> list[str]:
        """Return a sentence for each damage of the log, and for each contradiction between it and the catalog."""
        tags, policies, logged = self.tags(), self.policies(), self.logged()
        marks = {row.uid: row.superseded for row in self.versions()}
        records, problems = change_log.read_all(self._storage)
        reserved, last = self.reserved_numbers(), self.last_number()

        def is_known(number: int) -> bool:
            return number <= last or number in reserved

        found = change_log.contradictions(records, logged, marks, tags, policies, self.collected(), is_known)
        return [*problems, *change_log.lost_last(records, problems, logged), *found]

    def refresh(self, within: float = 0.0) -> None:
        """Apply the changes of other mirrors of a remote store, unless done within the last `within` seconds."""

    def named_with(self, pack: str) -> tuple[Collection[int], Collection[str]] | None:
        """Return the keys and packs that the version of a pack names; None if only its manifest has them.

        These are the keys of its objects and of all objects that they are stored against, and the packs of its blobs.
        """
        return None

    def _made(self, method: Callable[..., T], arguments: tuple[Any, ...], named: dict[str, Any]) -> T:
        return method(self, *arguments, **named)

    @recorded
    def set_policy(self, run: str, text: str | None) -> None:
        """Set the policy of a run, or of the store under the empty name; None removes it."""
        self._connection.execute("DELETE FROM policies WHERE run = ?", [run])
        if text is not None:
            self._connection.execute("INSERT INTO policies (run, policy) VALUES (?, ?)", [run, text])

    @recorded
    def rename_run(self, run: str, name: str) -> None:
        """Give a run, and its policy, another name; the checksum of a version includes the name of its run.

        Raise `NotFoundError` for an unknown run, `ConflictError` if the name is taken.
        """
        self.versions(run)  # Raises `IntegrityError` for a damaged row, whose checksum would become right.
        check_name(name, "run")
        if self.has_run(name):
            raise ConflictError(f"There is a run {name} already; choose another name.")
        self._connection.execute("UPDATE runs SET name = ? WHERE name = ?", [name, run])
        self.set_policy(name, None)
        self._connection.execute("UPDATE policies SET run = ? WHERE run = ?", [name, run])
        columns = ", ".join(SEALED["versions"]).format("")
        self._connection.execute(
            f"UPDATE versions SET seal = seal({columns}) WHERE run = (SELECT id FROM runs WHERE name = ?)", [name]
        )
        self._connection.execute(
            "UPDATE seals SET total = (SELECT coalesce(SUM(seal), 0) FROM versions WHERE hot) WHERE name = 'hot'"
        )

    @recorded
    def commit_version(
        self,
        row: VersionRow,
        packs: Sequence[PackInfo],
        objects: Iterable[Placement],
        *,
        raw: Iterable[Placement] = (),
        references: Iterable[str] = (),
        uses: Mapping[str, str] = NOTHING,
        bases: Iterable[str] = (),
        replace: bool = False,
        requires: Sequence[int] = (),
        bands: Sequence[int] = (),
    ) -> None:
        """Make a version visible, in one transaction; do nothing if `recover` has already done so.

        Parameters
        ----------
        packs
            New packs, whose files are already in the store.
        objects
            Places of this version's objects. An existing key keeps its place, unless that is raw.
        raw
            Places of raw objects; they replace earlier raw places, but no encoded ones.
        references
            Names of other versions' packs that hold blobs of this one; the catalog must have them.
        uses
            Names of other packs that hold objects of this version, with their slots: see `places_of`.
        bases
            Names of the packs that hold the bases of the new objects.
        replace
            Forget the version at the same run and step; its children get its parent.
        requires
            Keys of older objects that this version refers to; they must still exist.
        bands
            Bands of its values, by which others find it.

        Raises
        ------
        ConflictError
            The version, or one at its run and step, exists; the version to replace is tagged; `gc` has removed an
            object that this version refers to; or its number was taken while the catalog was rebuilt.
        NotFoundError
            The parent does not exist.
        """
        there = self._select("WHERE v.number = ?", row.number)
        if there:
            if there[0].uid != row.uid:
                raise ConflictError(
                    f"Version number {row.number} was given to another version while the catalog was rebuilt;"
                    " ingest it again."
                )
            # A `recover` between the writing of the packs and this commit found the version, perhaps with some of them.
            self.add_packs(packs, bases)
            self._place_all(row, uses, list(objects), list(raw))
            self.release_number(row.number)
            return
        if self.with_uid(row.uid):
            raise ConflictError(f"Version {row.uid} already exists; name it by its id.")
        parent = row.parent
        if parent is not None:
            parent_row = self.version(parent)
        standing = None if row.step is None or row.superseded else self.at_step(row.run, row.step)
        if standing is not None:
            if not replace:
                raise ConflictError(
                    f"{row.run}@{row.step} is already version {standing.number};"
                    " choose another step or run, or replace it."
                )
            if parent == standing.number:
                parent = parent_row.parent
            self.forget_versions([standing.number])
        self.skip_numbers(row.number)
        self.require(requires)
        self.add_packs(packs, bases)
        self._connection.execute("INSERT OR IGNORE INTO runs (name) VALUES (?)", [row.run])
        self._insert_version(row, parent)
        self._refer(row, references)
        if self._place_all(row, uses, list(objects), list(raw)):
            self.note_swept({pack.name: 0 for pack in packs})
        self._connection.execute_many(
            "INSERT OR IGNORE INTO likeness VALUES (?, ?)", [(band, row.number) for band in bands]
        )
        self._connection.execute("DELETE FROM reservations WHERE number = ?", [row.number])

    def places_of(self, keys: Iterable[int]) -> dict[str, str]:
        """Return the packs that hold objects, with the text of their slots."""
        return _by_pack(self.find_objects(keys).values())

    def require(self, keys: Sequence[int]) -> None:
        """Raise `ConflictError` unless all of these objects exist."""
        self._objects.require(keys)

    @recorded
    def replace_version(self, row: VersionRow, references: Iterable[str], uses: Mapping[str, str]) -> None:
        """Replace the manifest of a version: its place, sizes, costs and fidelity.

        The catalog has its new pack already. `references` are the names of the packs that hold its blobs; `uses`, of
        those with its objects, with the slots.
        """
        [[pack]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [row.pack])
        self._connection.execute(
            "UPDATE versions SET pack = ?, manifest_offset = ?, manifest_length = ?, stored_bytes = ?, depth = ?,"
            " cost = ?, base = ?, fidelity = ?, hot = ?, dropped = ? WHERE number = ?",
            [pack, row.manifest_offset, row.manifest_length, row.stored_bytes, row.depth, row.cost, row.base,
             row.fidelity, row.hot, _json(row.dropped), row.number],
        )  # fmt: skip
        references = set(references)
        self._drop_uses(row, references, uses)
        self._refer(row, references)
        self._use(row, uses)

    def _drop_uses(self, row: VersionRow, references: Collection[str], uses: Mapping[str, str]) -> None:
        """Delete the rows of a version's packs that neither stay nor grow: `gc` looks at these packs."""
        query = (
            f"SELECT r.pack, {PACK_NAME}, r.blobs, r.objects FROM version_packs r JOIN packs p ON p.id = r.pack"
            " WHERE r.version = ?"
        )
        for pack, name, has_blobs, slots in self._connection.rows(query, [row.number]):
            stays = name in references or (name in uses and not has_blobs)
            if name == row.pack or not stays or slots == ALL or uses.get(name, "") != slots:
                self._connection.execute("DELETE FROM version_packs WHERE version = ? AND pack = ?", [row.number, pack])

    @recorded
    def use_packs(self, number: int, uses: Mapping[str, str]) -> None:
        """Add to the packs that hold objects of a version; they are given with the slots."""
        self._use(self.version(number), uses)

    @recorded
    def add_packs(self, packs: Sequence[PackInfo], bases: Iterable[str] = ()) -> None:
        """Add packs; existing ones stay unchanged. `bases` are the names of the packs with the last one's bases."""
        self._connection.execute_many(
            "INSERT OR IGNORE INTO packs (name, bytes) VALUES (?, ?)", [(pack.name, pack.bytes) for pack in packs]
        )
        self._connection.execute_many(
            "INSERT OR IGNORE INTO pack_bases SELECT b.id, p.id FROM packs b, packs p WHERE b.name = ? AND p.name = ?",
            [(base, packs[-1].name) for base in sorted(set(bases))],
        )

    def place_packs(self, places: Mapping[str, Place | None]) -> None:
        """Set the places of packs in segments; of those without one, the name says where they are."""
        with self.transaction():
            self._connection.execute_many(
                "UPDATE packs SET segment = ?, place = ? WHERE name = ?",
                [
                    (None, None, name) if place is None else (bytes.fromhex(place.segment[:40]), place.offset, name)
                    for name, place in places.items()
                ],
            )

    @recorded
    def move_objects(self, placements: Iterable[Placement]) -> None:
        """Set the places of objects, new or existing."""
        placements = list(placements)
        before = self.find_objects(number for number, _, _ in placements)
        self._objects.place(placements, displace=True)
        self._follow_objects(before, placements)

    @recorded
    def remove_objects(self, keys: Iterable[int]) -> int:
        """Remove the places of objects; return the number of removed keys."""
        return self._objects.remove(keys)

    @recorded
    def remove_packs(self, names: Iterable[str]) -> None:
        """Remove empty packs from the catalog; delete their files only afterwards.

        Raise `ConflictError` if a pack is still referred to.
        """
        names = list(names)
        removable = {pack.name for pack in self.unreferenced_packs(names)}
        for name in names:
            if name not in removable:
                raise ConflictError(f"Pack {name} is still referred to; look again for unreferenced packs.")
            self._delete_pack(name)
        self._connection.execute("DELETE FROM pack_bases WHERE pack NOT IN (SELECT id FROM packs)")

    @recorded
    def free_packs(self, names: Sequence[str], objects: Iterable[int], needed: Collection[int] = ()) -> list[str]:
        """Remove the packs that hold no other objects than these; return their names.

        A pack stays if it holds a blob of another version, or one of the `needed` objects.
        """
        inside = {number for number, (pack, _) in self.find_objects(objects).items() if pack in names}
        if not inside.isdisjoint(needed):
            return []
        self.remove_objects(inside)
        freed = []
        for name in names:
            if self.known_packs([name]) and not self.uses_of(name).blobs:
                self._delete_pack(name)
                freed.append(name)
        return freed

    def _delete_pack(self, name: str) -> None:
        for [[number]] in [self._connection.rows("SELECT id FROM packs WHERE name = ?", [name])]:
            self._connection.execute("DELETE FROM version_packs WHERE pack = ? AND NOT blobs", [number])
            self._connection.execute("DELETE FROM pack_bases WHERE base = ?", [number])
        self._connection.execute("DELETE FROM packs WHERE name = ?", [name])
        self._connection.execute("DELETE FROM meta WHERE value = ? AND value LIKE '%.zip'", [name])

    @recorded
    def replace_pack(self, former: str, pack: PackInfo, manifest: PackEntry) -> None:
        """Replace a pack: its manifests and blobs are in the new pack from now on.

        The former one stays in the catalog until `move_objects` has moved its objects.
        """
        self.add_packs([pack])
        [[before]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [former])
        [[after]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [pack.name])
        self._connection.execute(
            "UPDATE versions SET pack = ?, manifest_offset = ?, manifest_length = ? WHERE pack = ?",
            [after, manifest.offset, manifest.length, before],
        )
        self._connection.execute(
            "INSERT INTO version_packs SELECT version, ?, 1, '' FROM version_packs WHERE pack = ? AND blobs"
            " ON CONFLICT (version, pack) DO UPDATE SET blobs = 1",
            [after, before],
        )
        self._connection.execute("UPDATE version_packs SET blobs = 0 WHERE pack = ? AND blobs", [before])
        self.note_moved({former: pack.name})

    def note_moved(self, names: Mapping[str, str]) -> None:
        """Record the new names of packs that others refer to by their former names."""
        with self.transaction():
            for former, present in names.items():
                self._connection.execute(
                    "UPDATE meta SET value = ? WHERE value = ? AND value LIKE '%.zip'", [present, former]
                )
                self._write(former, present)

    @recorded
    def note_collected(self, when: str) -> None:
        """Record the time at which `gc` last moved or removed an object, so that other processes notice."""
        self._write(COLLECTED, when)
        # All versions are read once as many have gone that each of these takes a look at few.
        if _LOOKS * self._count(LEFT) >= self.totals().versions:
            self._connection.execute("DELETE FROM likeness WHERE version NOT IN (SELECT number FROM versions)")
            self._connection.execute("DELETE FROM origins WHERE id NOT IN (SELECT origin FROM versions WHERE origin)")
            self._connection.execute("DELETE FROM meta WHERE key = ?", [LEFT])

    def _leave(self, count: int) -> None:
        """Count versions that may leave rows behind, which others may share."""
        self._write(LEFT, str(self._count(LEFT) + count))

    def note_incomplete(self) -> None:
        """Record that versions lack objects."""
        self._write(INCOMPLETE, "1")

    def note_swept(self, held: Mapping[str, int], *, log: bool = False) -> None:
        """Record packs without garbage, with the bytes that only others' chains need.

        With `log`, the part of the log before the first version that can come back is not read for such any more.
        """
        with self.transaction():
            self._connection.execute_many(
                "UPDATE packs SET held = ? WHERE name = ?", [(size, name) for name, size in held.items()]
            )
            if log:
                first = next(iter(self.undoable()), None)
                self._write(SWEPT, self.logged() if first is None else first["follows"])

    def note_kept(self, nbytes: int, until: str) -> None:
        """Record the bytes that only forgotten versions need until a time, so that nobody collects in vain before."""
        if self.is_only:
            with self.transaction():
                self._write(KEPT, f"{nbytes} {until}")

    @recorded
    def note_gone(self, names: Sequence[str]) -> None:
        """Record the packs that will be deleted: no other writer of a remote store may refer to them."""

    def gone(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Return the packs of a remote store that are or will be deleted, each with the number of its record.

        None asks for all of them.
        """
        return {}

    @recorded
    def update_version(
        self,
        number: int,
        *,
        depth: int | None = None,
        cost: float | None = None,
        base: bool | None = None,
        stored_bytes: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Change the columns that thinning, rebasing or later metrics affect; raise `NotFoundError`."""
        values = {"depth": depth, "cost": cost, "base": base, "stored_bytes": stored_bytes}
        version = self.version(number)
        if metrics is not None:
            own, origin = self._divided(metrics, number)
            if self._connection.rows("SELECT 1 FROM versions WHERE number = ? AND origin <> ?", [number, origin or 0]):
                self._leave(1)
            self._connection.execute(
                "UPDATE versions SET metrics = ?, origin = ? WHERE number = ?", [own, origin, number]
            )
            self._index_metrics(version, _REMOVED)
            self._index_metrics(replace(version, metrics=metrics), _ADDED)
        for column, value in values.items():
            if value is not None:
                self._connection.execute(f"UPDATE versions SET {column} = ? WHERE number = ?", [value, number])

    @recorded
    def mark_versions(self, superseded: Iterable[int], present: Iterable[int]) -> None:
        """Mark versions as superseded, and others as present again."""
        # First the former, which may have the steps of the latter.
        for mark, numbers in ((True, superseded), (False, present)):
            for number in numbers:
                for row in self._select("WHERE v.number = ?", number):
                    self._index_metrics(row, _REMOVED)
                    self._connection.execute("UPDATE versions SET superseded = ? WHERE number = ?", [mark, number])
                    self._index_metrics(replace(row, superseded=mark), _ADDED)

    @recorded
    def forget_versions(self, numbers: Iterable[int]) -> None:
        """Remove versions from the catalog; their children get their parent. `gc` frees packs and objects.

        Raise `NotFoundError`, or `ConflictError` if a version is tagged.
        """
        numbers = list(numbers)
        self._leave(len(numbers))
        for number in numbers:
            version = self.version(number)
            self.check_untagged([number])
            self._index_metrics(version, _REMOVED)
            self._connection.execute("UPDATE versions SET parent = ? WHERE parent = ?", [version.parent, number])
            self._connection.execute("DELETE FROM versions WHERE number = ?", [number])

    @recorded
    def restore_version(
        self,
        row: VersionRow,
        references: Iterable[str],
        uses: Mapping[str, str],
        requires: Sequence[int],
        children: Iterable[int],
    ) -> None:
        """Make a forgotten version visible again, as the parent of `children`; see `commit_version`.

        Raise `ConflictError` if there is a version at its run and step, or `gc` has freed an object or a blob of it.
        """
        standing = None if row.step is None or row.superseded else self.at_step(row.run, row.step)
        if standing is not None:
            raise ConflictError(
                f"{row.run}@{row.step} is version {standing.number} now; `ckstore forget --prune` that one first."
            )
        if self.with_uid(row.uid) or self._select("WHERE v.number = ?", row.number):
            raise ConflictError(f"Version {row.uid} already exists; name it by its id.")
        self.require(requires)
        if not self.known_packs([row.pack]):
            raise ConflictError(f"The bytes of version {row.number} have been freed; ingest it again.")
        self._connection.execute("INSERT OR IGNORE INTO runs (name) VALUES (?)", [row.run])
        self._insert_version(row, row.parent)
        self._refer(row, references)
        self._use(row, uses)
        for child in children:
            self._connection.execute("UPDATE versions SET parent = ? WHERE number = ?", [row.number, child])

    def check_untagged(self, numbers: Iterable[int]) -> None:
        """Raise `ConflictError` if one of these versions is tagged."""
        wanted = set(numbers)
        for tag, number in self.tags().items():
            if number in wanted:
                raise ConflictError(
                    f"Version {number} is tagged {tag}; remove the tag first: `ckstore tag --delete {tag}`, or keep"
                    " tagged versions with --keep-tagged."
                )

    @recorded
    def remove_empty_runs(self) -> None:
        """Remove runs without versions."""
        self._connection.execute("DELETE FROM runs WHERE versions = 0")

    @recorded
    def set_tag(self, name: str, number: int) -> None:
        """Point a tag at a version; raise `NotFoundError`, or `UsageError` for an invalid name."""
        check_name(name, "tag")
        self.version(number)
        self._connection.execute(
            "INSERT INTO tags (name, version) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET version = excluded.version",
            [name, number],
        )

    @recorded
    def delete_tag(self, name: str) -> None:
        """Remove a tag; raise `NotFoundError`."""
        if not self._connection.execute("DELETE FROM tags WHERE name = ?", [name]).rowcount:
            raise NotFoundError(f"Unknown tag {name}; `ckstore tag` lists the tags.")

    def _place_all(
        self, row: VersionRow, uses: Mapping[str, str], objects: Sequence[Placement], raw: Sequence[Placement]
    ) -> bool:
        """Place the new objects of a version, note the packs of all its objects; return whether none was there."""
        self._use(row, uses)
        self._use(row, {place[1]: ALL for place in (*objects, *raw)})
        before = self._place_encoded(objects)
        self._use(row, _by_pack(place for place in before.values() if not place[0].endswith(RAW)))
        before_raw = self._place_raw(raw)
        self._use(row, _by_pack(place for place in before_raw.values() if not place[0].endswith(RAW)))
        return not before and not before_raw

    def _place_encoded(self, placements: Sequence[Placement]) -> Mapping[int, tuple[str, int]]:
        """Set the places of encoded objects, which take precedence over raw ones; return their former places."""
        present = self.find_objects(number for number, _, _ in placements)
        raw = {number: place for number, place in present.items() if place[0].endswith(RAW)}
        self._objects.remove(raw)
        self._objects.place(placements, displace=False)
        self._follow_objects(raw, placements)
        return present

    def _place_raw(self, placements: Sequence[Placement]) -> Mapping[int, tuple[str, int]]:
        """Set the places of raw objects; of several hot versions the last counts, since it is encoded last.

        Return their former places.
        """
        present = self.find_objects(number for number, _, _ in placements)
        encoded = {number: place for number, place in present.items() if not place[0].endswith(RAW)}
        placed = [place for place in placements if place[0] not in encoded]
        self._objects.place(placed, displace=True)
        self._follow_objects(present, placed)
        return present

    def _use(self, row: VersionRow, uses: Mapping[str, str]) -> None:
        """Add to the packs that hold objects of a version, besides its own."""
        self._connection.execute_many(
            f"INSERT INTO version_packs SELECT ?, id, 0, ? FROM packs WHERE name = ? {_WIDENED}",
            [(row.number, slots, pack) for pack, slots in sorted(uses.items()) if pack != row.pack],
        )

    def _follow_objects(self, before: Mapping[int, tuple[str, int]], placements: Iterable[Placement]) -> None:
        """Make the versions and packs that depend on objects depend on the packs that these were moved to."""
        moved: dict[tuple[str, str], dict[int, int]] = {}
        for number, pack, slot in placements:
            if number in before and before[number][0] != pack:
                moved.setdefault((before[number][0], pack), {})[before[number][1]] = slot
        for (former, present), slots in moved.items():
            [[old]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [former])
            [[new]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [present])
            add = "INSERT INTO version_packs SELECT {0}, ?, 0, ? FROM {1} WHERE pack = ?"
            self._connection.execute(
                f"{add.format('number', 'versions')} {_WIDENED}", [new, to_text(slots.values()), old]
            )
            for used in self.used_slots(former):
                if there := to_text(slots[slot] for slot in among(used, slots)):
                    self._connection.execute(
                        f"{add.format('version', 'version_packs')} AND objects = ? {_WIDENED}", [new, there, old, used]
                    )
            self._connection.execute("UPDATE packs SET held = NULL WHERE id = ?", [old])
            self._connection.execute(
                "INSERT OR IGNORE INTO pack_bases SELECT ?, pack FROM pack_bases WHERE base = ?", [new, old]
            )
            if not former.endswith(RAW):  # Objects may have bases in their own pack.
                self._connection.execute("INSERT OR IGNORE INTO pack_bases VALUES (?, ?)", [new, old])

    def _refer(self, row: VersionRow, packs: Iterable[str]) -> None:
        for pack in sorted({*packs} - {row.pack}):
            found = self._connection.rows("SELECT id FROM packs WHERE name = ?", [pack])
            if not found:
                raise ConflictError(
                    f"Pack {pack}, which version {row.number} refers to, was removed during the ingest;"
                    " ingest it again."
                )
            self._connection.execute(
                "INSERT INTO version_packs VALUES (?, ?, 1, '') ON CONFLICT (version, pack) DO UPDATE SET blobs = 1"
                " WHERE NOT blobs",
                [row.number, found[0][0]],
            )

    def _insert_version(self, row: VersionRow, parent: int | None) -> None:
        named = {"run": "(SELECT id FROM runs WHERE name = ?)", "pack": "(SELECT id FROM packs WHERE name = ?)"}
        columns = [*VERSION_COLUMNS, "origin"]
        marks = ", ".join(named.get(name, "?") for name in columns)
        metrics, origin = self._divided(row.metrics, parent)
        values = {
            **{name: getattr(row, name) for name in VERSION_COLUMNS}, "uid": bytes.fromhex(row.uid), "parent": parent,
            "dropped": _json(row.dropped), "metrics": metrics, "origin": origin,
        }  # fmt: skip
        self._connection.execute(
            f"INSERT INTO versions ({', '.join(columns)}) VALUES ({marks})", [values[name] for name in columns]
        )
        self._index_metrics(row, _ADDED)

    def _index_metrics(self, row: VersionRow, change: str) -> None:
        """Add the metrics of a version to their index, or remove them; superseded versions have none there."""
        if not row.superseded:
            values = indexed_values(row.metrics).items()
            self._connection.execute_many(change, [(row.run, *named, row.number) for named in values])

    def _divided(self, metrics: Mapping[str, Any], other: int | None) -> tuple[str, int | None]:
        """Return metrics as JSON, and the row of their origin: the one of another version if the two are equal."""
        text = _json({name: metrics[name] for name in RESERVED if name in metrics})
        if text == "{}" or len(text) > LARGEST_ORIGIN:
            return _json(dict(metrics)), None
        query = "SELECT o.id FROM versions v JOIN origins o ON o.id = v.origin WHERE v.number = ? AND o.text = ?"
        found = self._connection.rows(query, [other, text])
        if not found:
            self._connection.execute("INSERT INTO origins (text) VALUES (?)", [text])
            found = self._connection.rows("SELECT last_insert_rowid()")
        return _json({name: value for name, value in metrics.items() if name not in RESERVED}), found[0][0]


def _by_pack(places: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Return the slots of places as text, by the name of their pack."""
    found: dict[str, list[int]] = {}
    for pack, slot in places:
        found.setdefault(pack, []).append(slot)
    return {pack: to_text(slots) for pack, slots in found.items()}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
