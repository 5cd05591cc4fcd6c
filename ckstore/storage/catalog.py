"""The index of a store: runs, versions, tags, packs, and where the object of an id is; one SQLite file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ckstore.errors import ConflictError, NotFoundError
from ckstore.storage import durable, log, root
from ckstore.storage.catalog_claims import CatalogClaims
from ckstore.storage.catalog_reader import COLLECTED, POLICY
from ckstore.storage.connection import create_file
from ckstore.storage.names import check_tag
from ckstore.storage.pack import RAW
from ckstore.storage.rows import Claim, PackRow, Placement, RunRow, Totals, VersionRow, key

C = TypeVar("C", bound="Catalog")
P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["Catalog", "Claim", "PackRow", "Placement", "RunRow", "Totals", "VersionRow", "key"]

#: Seconds for which a store that stays open need not ask again what other machines have committed.
RECENT = 1.0


def recorded(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """A change of rows, in a transaction: what other copies of a remote store's catalog have to make as well."""

    @wraps(method)
    def change(self: C, /, *arguments: P.args, **named: P.kwargs) -> T:
        with self.transaction():
            return self._made(method, arguments, named)

    return change


class Catalog(CatalogClaims):
    """The rows of one store. Safe for threads, which take turns; for processes, writers of which wait for each other.

    Parameters
    ----------
    store : Path
        The store's directory.
    mode : "r" or "a"
        Read only, or read and write.
    timeout : float
        Seconds to wait for another process's lock before `LockedError`.
    """

    @classmethod
    def create(cls, store: Path) -> Self:
        """Make a store: its directories and an empty catalog, open for writing.

        Raises
        ------
        ConflictError
            Something is there already.
        """
        root.create_layout(store)
        path = store / root.CATALOG
        temporary = durable.temporary_path(store)
        try:
            create_file(temporary)
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise ConflictError(f"{store} is already a store; use it as it is.") from None
            except OSError:
                # A file system without hard links: two processes that make one store at once is not worth more.
                os.replace(temporary, path)
            durable.sync_directory(store)
        finally:
            temporary.unlink(missing_ok=True)
        return cls(store, "a")

    def commit(self, change: Callable[[], T]) -> T:
        """Make a change in one transaction; it is called again where another writer of a remote store came first."""
        with self.transaction():
            return change()

    def note(self, record: Mapping[str, Any]) -> None:
        """Write into the log what is changed, inside of the transaction that changes it."""
        log.append(self._path.parent, record)

    def records(self) -> list[dict[str, Any]]:
        """The log's records, in order; raises `IntegrityError` where one is damaged."""
        return log.read_all(self._path.parent)

    def whole_records(self) -> list[dict[str, Any]]:
        """The log's records that are not damaged, in order."""
        return log.read_whole(self._path.parent)[0]

    @property
    def follows_log(self) -> bool:
        """Whether every change is in the log, ingests too: then nothing that was committed can be missing here."""
        return False

    def differences(self) -> list[str]:
        """A sentence for each table of a mirror that is not what the log makes of it; of a local catalog none."""
        return []

    def refresh(self, within: float = 0.0) -> None:
        """Take over what other mirrors of a remote store have changed, unless that was done so many seconds ago."""

    def named_with(self, pack: str) -> tuple[Collection[int], Collection[str]] | None:
        """What the version that a pack came with names; None where only manifests say it.

        Keys of its objects and of all that these are stored against, and packs of its blobs.
        """
        return None

    def _made(self, method: Callable[..., T], arguments: tuple[Any, ...], named: dict[str, Any]) -> T:
        return method(self, *arguments, **named)

    @recorded
    def set_policy(self, run: str, text: str | None) -> None:
        """Set or, with None, remove what `policies` says of a run, or of the store under the empty name."""
        self._connection.execute("DELETE FROM meta WHERE key = ?", [POLICY + run])
        if text is not None:
            self._connection.execute("INSERT INTO meta VALUES (?, ?)", [POLICY + run, text])

    @recorded
    def commit_version(
        self,
        row: VersionRow,
        packs: Sequence[Any],
        lattices: Iterable[Placement],
        contents: Iterable[Placement],
        *,
        raw: Iterable[Placement] = (),
        references: Iterable[str] = (),
        replace: bool = False,
        requires_lattices: Sequence[int] = (),
        requires_contents: Sequence[int] = (),
    ) -> None:
        """Make a version visible, in one transaction. One that `recover` made visible already is left as it is.

        Parameters
        ----------
        row : VersionRow
            Its run is made if there is none of that name.
        packs : sequence of PackInfo
            Packs that are not in the catalog yet; they lie in the store already.
        lattices, contents : iterable of (key, pack name, slot)
            Where the objects of this version are. A key that is there already keeps its place, unless that is raw.
        raw : iterable of (key, pack name, slot)
            Where objects are that are stored as they are: from now on, unless they are encoded somewhere.
        references : iterable of str
            Names of the packs of other versions in which blobs of this one are: they must be in the catalog.
        replace : bool
            Forget the version that is at the same run and step; its children get its parent.
        requires_lattices, requires_contents : sequence of int
            Keys of older objects that this version refers to: they must still be there.

        Raises
        ------
        ConflictError
            The version, or one at its run and step, is there already, the version it would replace is tagged, a `gc`
            removed what this version refers to, or its number was given to another version while the catalog was
            rebuilt.
        NotFoundError
            The parent is gone.
        """
        there = self._select("WHERE v.number = ?", row.number)
        if there:
            if there[0].uid != row.uid:
                raise ConflictError(
                    f"Version number {row.number} was given to another version while the catalog was rebuilt;"
                    " ingest it again."
                )
            # Between the packs and this commit a `recover` ran, and found the version in them.
            self.release_number(row.number)
            return
        if self.with_uid(row.uid):
            raise ConflictError(f"Version {row.uid} is there already; name it by its id.")
        parent = row.parent
        if parent is not None:
            parent_row = self.version(parent)
        standing = None if row.step is None else self.at_step(row.run, row.step)
        if standing is not None:
            if not replace:
                raise ConflictError(
                    f"{row.run}@{row.step} is version {standing.number} already; use --replace to replace it."
                )
            if parent == standing.number:
                parent = parent_row.parent
            self.forget_versions([standing.number])
        self.require(requires_lattices, requires_contents)
        self.add_packs(packs)
        self._connection.execute("INSERT OR IGNORE INTO runs (name) VALUES (?)", [row.run])
        self._insert_version(row, parent)
        self._refer(row.number, {row.pack, *references})
        self._place_encoded(list(lattices))
        self._contents.place(contents, displace=False)
        self._place_raw(list(raw))
        self._connection.execute("DELETE FROM reservations WHERE number = ?", [row.number])

    def require(self, lattices: Sequence[int], contents: Sequence[int]) -> None:
        """Raise `ConflictError` unless all of these keys are there; what was raw may be encoded by now."""
        self._contents.require({*lattices} - self._lattices.find(lattices).keys())
        self._contents.require(contents)

    @recorded
    def replace_version(self, row: VersionRow, references: Iterable[str]) -> None:
        """Let another manifest say what a version is: its place, sizes, costs and fidelity.

        Parameters
        ----------
        row : VersionRow
            Of a version that is there; its pack is known already.
        references : iterable of str
            Names of the packs in which blobs of it are.
        """
        [[pack]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [row.pack])
        self._connection.execute(
            "UPDATE versions SET pack = ?, manifest_offset = ?, manifest_length = ?, stored_bytes = ?, depth = ?,"
            " cost = ?, base = ?, fidelity = ?, hot = ?, dropped = ? WHERE number = ?",
            [pack, row.manifest_offset, row.manifest_length, row.stored_bytes, row.depth, row.cost, row.base,
             row.fidelity, row.hot, _json(row.dropped), row.number],
        )  # fmt: skip
        self._connection.execute("DELETE FROM version_packs WHERE version = ?", [row.number])
        self._refer(row.number, {row.pack, *references})

    @recorded
    def add_packs(self, packs: Sequence[Any]) -> None:
        """Make packs (`PackInfo`) known; those that are known already stay as they are."""
        self._connection.execute_many(
            "INSERT OR IGNORE INTO packs (name, kind, bytes) VALUES (?, ?, ?)",
            [(pack.name, pack.kind, pack.bytes) for pack in packs],
        )

    @recorded
    def move_lattices(self, placements: Iterable[Placement]) -> None:
        """Say where lattices are from now on (`rebase`), whether they were known or not."""
        self._lattices.place(placements, displace=True)

    @recorded
    def move_contents(self, placements: Iterable[Placement]) -> None:
        """Say where contents are from now on (re-anchored exact layers), whether they were known or not."""
        self._contents.place(placements, displace=True)

    @recorded
    def remove_lattices(self, keys: Iterable[int]) -> int:
        """Forget where lattices are; returns how many were known."""
        return self._lattices.remove(keys)

    @recorded
    def remove_contents(self, keys: Iterable[int]) -> int:
        """Forget where contents are (`thin`); returns how many were known."""
        return self._contents.remove(keys)

    @recorded
    def remove_packs(self, names: Iterable[str]) -> None:
        """Forget packs that hold nothing any more; remove their files afterwards, never before.

        Raises
        ------
        ConflictError
            One of them is still referred to.
        """
        removable = {pack.name for pack in self.unreferenced_packs()}
        for name in names:
            if name not in removable:
                raise ConflictError(f"Pack {name} is still referred to; look which are free again.")
            self._connection.execute("DELETE FROM packs WHERE name = ?", [name])
            self._connection.execute("DELETE FROM meta WHERE value = ?", [name])

    @recorded
    def free_packs(self, names: Sequence[str], lattices: Iterable[int], needed: Collection[int] = ()) -> list[str]:
        """Forget packs that hold nothing but these lattices, and manifests; returns those that were forgotten.

        A pack that another version needs stays: one that has a blob of it, or one of the lattices that are `needed`.
        """
        inside = {number for number, (pack, _) in self.find_lattices(lattices).items() if pack in names}
        if not inside.isdisjoint(needed):
            return []
        self.remove_lattices(inside)
        freed = []
        for name in names:
            used = "SELECT 1 FROM version_packs r JOIN packs p ON p.id = r.pack WHERE p.name = ? LIMIT 1"
            if not self._connection.rows(used, [name]):
                self._connection.execute("DELETE FROM packs WHERE name = ?", [name])
                self._connection.execute("DELETE FROM meta WHERE value = ?", [name])
                freed.append(name)
        return freed

    @recorded
    def replace_pack(self, former: str, pack: Any, manifest: Any) -> None:
        """Put a pack in the place of another one: the manifests and blobs of that are in this from now on.

        Parameters
        ----------
        former : str
            A pack in the catalog. It stays there; what objects of it are in the new one is for `move_lattices` and
            `move_contents` to say.
        pack : PackInfo
            A pack that lies in the store.
        manifest : Entry
            Where its manifest lies.
        """
        self.add_packs([pack])
        [[before]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [former])
        [[after]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [pack.name])
        self._connection.execute(
            "UPDATE versions SET pack = ?, manifest_offset = ?, manifest_length = ? WHERE pack = ?",
            [after, manifest.offset, manifest.length, before],
        )
        self._connection.execute(
            "INSERT OR IGNORE INTO version_packs SELECT version, ? FROM version_packs WHERE pack = ?",
            [after, before],
        )
        self._connection.execute("DELETE FROM version_packs WHERE pack = ?", [before])
        self.note_moved({former: pack.name})

    def note_moved(self, names: Mapping[str, str]) -> None:
        """Remember the present names of packs that others refer to by former ones."""
        with self.transaction():
            for former, present in names.items():
                self._connection.execute("UPDATE meta SET value = ? WHERE value = ?", [present, former])
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [former, present])

    @recorded
    def note_collected(self, when: str) -> None:
        """Remember when `gc` moved or removed something, so that others notice."""
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [COLLECTED, when])

    @recorded
    def note_gone(self, names: Sequence[str]) -> None:
        """Say which packs go: other writers of a remote store may be about to refer to them."""

    def gone(self) -> dict[str, int]:
        """Packs of a remote store that are to be deleted or were, and which record says so."""
        return {}

    @recorded
    def update_version(
        self,
        number: int,
        *,
        fidelity: str | None = None,
        depth: int | None = None,
        cost: float | None = None,
        base: bool | None = None,
        stored_bytes: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Change what thinning, rebasing or metrics that come later change in a version; raises `NotFoundError`."""
        values = {
            "fidelity": fidelity, "depth": depth, "cost": cost, "base": base, "stored_bytes": stored_bytes,
            "metrics": None if metrics is None else _json(dict(metrics)),
        }  # fmt: skip
        self.version(number)
        for column, value in values.items():
            if value is not None:
                self._connection.execute(f"UPDATE versions SET {column} = ? WHERE number = ?", [value, number])

    @recorded
    def forget_versions(self, numbers: Iterable[int]) -> None:
        """Remove versions from the catalog; their children get their parent. Packs and objects stay for `gc`.

        Raises
        ------
        NotFoundError
        ConflictError
            One of them is tagged.
        """
        for number in numbers:
            version = self.version(number)
            self.check_untagged([number])
            self._connection.execute("UPDATE versions SET parent = ? WHERE parent = ?", [version.parent, number])
            self._connection.execute("DELETE FROM versions WHERE number = ?", [number])

    def check_untagged(self, numbers: Iterable[int]) -> None:
        """Raise `ConflictError` where one of these versions is tagged."""
        wanted = set(numbers)
        for tag, number in self.tags().items():
            if number in wanted:
                raise ConflictError(
                    f"Version {number} is tagged {tag}; remove the tag first: `ckstore tag --delete {tag}`."
                )

    @recorded
    def remove_empty_runs(self) -> None:
        """Forget the runs that have no version."""
        self._connection.execute("DELETE FROM runs WHERE id NOT IN (SELECT run FROM versions)")

    @recorded
    def set_tag(self, name: str, number: int) -> None:
        """Let a tag mean a version, whatever it meant before; raises `NotFoundError`, `UsageError` for a bad name."""
        check_tag(name)
        self.version(number)
        self._connection.execute("INSERT OR REPLACE INTO tags VALUES (?, ?)", [name, number])

    @recorded
    def delete_tag(self, name: str) -> None:
        """Remove a tag; raises `NotFoundError`."""
        if not self._connection.execute("DELETE FROM tags WHERE name = ?", [name]).rowcount:
            raise NotFoundError(f"There is no tag {name}; see `ckstore tag` for those there are.")

    def _place_encoded(self, placements: Sequence[Placement]) -> None:
        """What is raw goes with its hot version: as soon as an object is encoded, that is where it is."""
        present = self.find_lattices(number for number, _, _ in placements)
        self._lattices.remove(number for number, (pack, _) in present.items() if pack.endswith(RAW))
        self._lattices.place(placements, displace=False)

    def _place_raw(self, placements: Sequence[Placement]) -> None:
        """Several hot versions may hold an object: the last one's is what counts, since it is encoded last."""
        present = self.find_lattices(number for number, _, _ in placements)
        encoded = {number for number, (pack, _) in present.items() if not pack.endswith(RAW)}
        self._lattices.place([place for place in placements if place[0] not in encoded], displace=True)

    def _refer(self, number: int, packs: set[str]) -> None:
        for pack in sorted(packs):
            found = self._connection.rows("SELECT id FROM packs WHERE name = ?", [pack])
            if not found:
                raise ConflictError(
                    f"Pack {pack}, which version {number} refers to, was removed meanwhile; ingest it again."
                )
            self._connection.execute("INSERT INTO version_packs VALUES (?, ?)", [number, found[0][0]])

    def _insert_version(self, row: VersionRow, parent: int | None) -> None:
        marks = ", ".join("?" * 17)
        self._connection.execute(
            "INSERT INTO versions (number, uid, run, pack, step, parent, created, manifest_offset, manifest_length,"
            " original_bytes, stored_bytes, elements, tensors, files, depth, cost, base, fidelity, hot, dropped,"
            " metrics, source)"
            " VALUES (?, ?, (SELECT id FROM runs WHERE name = ?), (SELECT id FROM packs WHERE name = ?),"
            f" {marks}, ?)",
            [
                *(row.number, row.uid, row.run, row.pack, row.step, parent, row.created),
                *(row.manifest_offset, row.manifest_length, row.original_bytes, row.stored_bytes, row.elements),
                *(row.tensors, row.files, row.depth, row.cost, row.base, row.fidelity, row.hot),
                *(_json(row.dropped), _json(dict(row.metrics)), row.source),
            ],
        )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
