"""The index of a store: runs, versions, tags, packs, and where the object of an id is; one SQLite file."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckstore.errors import ConflictError, IntegrityError, NoStoreError, NotFoundError
from ckstore.storage import durable, root
from ckstore.storage.connection import BUSY_TIMEOUT, Connection, Mode, create_file
from ckstore.storage.names import check_tag, resolve
from ckstore.storage.placements import Placements
from ckstore.storage.rows import Claim, PackRow, Placement, RunRow, Totals, VersionRow, key

__all__ = ["Catalog", "Claim", "PackRow", "Placement", "RunRow", "Totals", "VersionRow", "key", "replace_catalog"]

_COLUMNS = (
    "v.number, v.uid, r.name, v.step, v.parent, v.created, p.name, v.manifest_offset, v.manifest_length,"
    " v.original_bytes, v.stored_bytes, v.elements, v.tensors, v.files, v.depth, v.cost, v.base, v.fidelity,"
    " v.metrics, v.source"
)
#: The row of `meta` that says when `gc` last changed something.
_COLLECTED = "collected"
#: Rows of `meta` that say how faithful versions are to be begin so, and end with the run's name, if any.
_POLICY = "policy:"
#: For how long the lease of a process on another host counts: nobody here can see whether it still runs.
LEASE_SECONDS = 7 * 24 * 3600.0

_SELECT = f"SELECT {_COLUMNS} FROM versions v JOIN runs r ON r.id = v.run JOIN packs p ON p.id = v.pack"


class Catalog:
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

    def __init__(self, store: Path, mode: Mode = "r", timeout: float = BUSY_TIMEOUT) -> None:
        self._path = store / root.CATALOG
        self._connection = Connection(self._path, mode, timeout)
        self._lattices = Placements(self._connection, "lattices")
        self._contents = Placements(self._connection, "contents")

    @classmethod
    def open(cls, store: Path, mode: Mode = "r", timeout: float = BUSY_TIMEOUT) -> Self:
        """Open the catalog of a store.

        Raises
        ------
        NoStoreError
            The directory is not a store.
        LockedError, IntegrityError, FormatVersionError
        """
        if not root.is_store(store):
            raise NoStoreError(f"{store} is not a store; run `ckstore init`, or name another one with --store.")
        return cls(store, mode, timeout)

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

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Several changes as one: `BEGIN IMMEDIATE`, then all or nothing. Every method below joins it."""
        return self._connection.transaction()

    # Reading

    def versions(self, run: str | None = None) -> list[VersionRow]:
        """All versions by number, or those of one run; raises `NotFoundError` for an unknown run."""
        if run is None:
            return self._select("ORDER BY v.number")
        found = self._select("WHERE r.name = ? ORDER BY v.number", run)
        if not found and not self._connection.rows("SELECT 1 FROM runs WHERE name = ?", [run]):
            raise NotFoundError(f"There is no run {run}; see `ckstore log` for those there are.")
        return found

    def version(self, number: int) -> VersionRow:
        """The version of a number; raises `NotFoundError`."""
        found = self._select("WHERE v.number = ?", number)
        if not found:
            raise NotFoundError(f"There is no version {number}; see `ckstore log` for those there are.")
        return found[0]

    def children(self, number: int) -> list[VersionRow]:
        """The versions whose parent this is, by number."""
        return self._select("WHERE v.parent = ? ORDER BY v.number", number)

    def latest(self, run: str | None = None) -> VersionRow | None:
        """The version that was ingested last, of all or of one run; None where there is none."""
        tail = "ORDER BY v.number DESC LIMIT 1"
        found = self._select(tail) if run is None else self._select(f"WHERE r.name = ? {tail}", run)
        return found[0] if found else None

    def highest(self, run: str) -> VersionRow | None:
        """The version of a run with the highest step; where none has a step, the one that was ingested last."""
        # SQLite takes NULL for the least of all values.
        found = self._select("WHERE r.name = ? ORDER BY v.step DESC, v.number DESC LIMIT 1", run)
        return found[0] if found else None

    def at_step(self, run: str, step: int) -> VersionRow | None:
        """The version of a run at a step; None where there is none."""
        found = self._select("WHERE r.name = ? AND v.step = ?", run, step)
        return found[0] if found else None

    def with_uid(self, prefix: str) -> list[VersionRow]:
        """The versions whose id begins with these hexadecimal characters, by number."""
        return self._select("WHERE v.uid >= ? AND v.uid < ? ORDER BY v.number", prefix, prefix + "g")

    def resolve(self, spec: str | int) -> VersionRow:
        """The version that a name means; see `names.resolve`."""
        return resolve(self, spec)

    def runs(self) -> list[RunRow]:
        """All runs in the order in which they began."""
        rows = self._connection.rows(
            "SELECT r.name, r.created, COUNT(v.number), MAX(v.number) FROM runs r"
            " LEFT JOIN versions v ON v.run = r.id GROUP BY r.id ORDER BY r.id"
        )
        steps = dict(self._connection.rows("SELECT number, step FROM versions"))
        return [RunRow(name, created, count, latest, steps.get(latest)) for name, created, count, latest in rows]

    def tags(self) -> dict[str, int]:
        """Version numbers by tag, sorted by tag."""
        return dict(self._connection.rows("SELECT name, version FROM tags ORDER BY name"))

    def packs(self) -> list[PackRow]:
        """All packs in the order in which they were committed."""
        rows = self._connection.rows("SELECT name, kind, bytes, created FROM packs ORDER BY id")
        return [PackRow(*row) for row in rows]

    def has_packs(self, names: Iterable[str]) -> bool:
        """Whether all of these packs are there."""
        wanted = sorted(set(names))
        marks = ", ".join("?" * len(wanted))
        found = self._connection.rows(f"SELECT COUNT(*) FROM packs WHERE name IN ({marks})", wanted)
        return bool(found[0][0] == len(wanted))

    def find_lattices(self, keys: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Pack name and slot of the present encoding, for those keys of lattice ids that are there."""
        return self._lattices.find(keys)

    def find_contents(self, keys: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Pack name and slot of the exact layer or record, for those keys of content ids that are there."""
        return self._contents.find(keys)

    def lattices_in(self, pack: str) -> list[tuple[int, int]]:
        """(key, slot) of every lattice whose present encoding is in a pack. Reads the whole table."""
        return self._lattices.within(pack)

    def contents_in(self, pack: str) -> list[tuple[int, int]]:
        """(key, slot) of every content that is in a pack. Reads the whole table."""
        return self._contents.within(pack)

    def placed_lattices(self) -> dict[str, dict[int, int]]:
        """The keys of all lattices by slot, for each pack by name. Reads the whole table."""
        return self._lattices.by_pack()

    def placed_contents(self) -> dict[str, dict[int, int]]:
        """The keys of all contents by slot, for each pack by name. Reads the whole table."""
        return self._contents.by_pack()

    def moved_packs(self, names: Iterable[str]) -> dict[str, str]:
        """The present names of those packs that `gc` has put others in the place of."""
        wanted = sorted(set(names))
        marks = ", ".join("?" * len(wanted))
        return dict(self._connection.rows(f"SELECT key, value FROM meta WHERE key IN ({marks})", wanted))

    def collected(self) -> str:
        """When `gc` last moved or removed something; empty where it never did."""
        return self.moved_packs([_COLLECTED]).get(_COLLECTED, "")

    def policies(self) -> dict[str, str]:
        """How faithful versions are to be, as the text that was set, by run; of the store under the empty name."""
        rows = self._connection.rows("SELECT key, value FROM meta WHERE substr(key, 1, ?) = ?", [len(_POLICY), _POLICY])
        return {key.removeprefix(_POLICY): value for key, value in rows}

    def set_policy(self, run: str, text: str | None) -> None:
        """Set or, with None, remove what `policies` says of a run, or of the store under the empty name."""
        with self.transaction():
            self._connection.execute("DELETE FROM meta WHERE key = ?", [_POLICY + run])
            if text is not None:
                self._connection.execute("INSERT INTO meta VALUES (?, ?)", [_POLICY + run, text])

    def unreferenced_packs(self) -> list[PackRow]:
        """Packs with nothing that a version needs: no manifest, no blob, no lattice and no content."""
        rows = self._connection.rows(
            "SELECT name, kind, bytes, created FROM packs WHERE id NOT IN"
            " (SELECT pack FROM versions UNION SELECT pack FROM version_packs"
            " UNION SELECT pack FROM lattices UNION SELECT pack FROM contents) ORDER BY id"
        )
        return [PackRow(*row) for row in rows]

    def last_number(self) -> int:
        """The highest version number that was ever handed out, as far as this catalog knows."""
        [[versions, handed_out]] = self._connection.rows(
            "SELECT COALESCE((SELECT MAX(number) FROM versions), 0),"
            " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'reservations'), 0)"
        )
        return int(max(versions, handed_out))

    def totals(self) -> Totals:
        """Sums for `stats`."""
        [versions] = self._connection.rows(
            "SELECT COUNT(*), TOTAL(original_bytes), TOTAL(stored_bytes), TOTAL(elements) FROM versions"
        )
        [counts] = self._connection.rows("SELECT (SELECT COUNT(*) FROM runs), (SELECT COUNT(*) FROM tags)")
        kinds = {
            kind: (count, size)
            for kind, count, size in self._connection.rows("SELECT kind, COUNT(*), SUM(bytes) FROM packs GROUP BY kind")
        }
        coarse, exact = kinds.get("coarse", (0, 0)), kinds.get("exact", (0, 0))
        return Totals(
            versions=versions[0],
            runs=counts[0],
            tags=counts[1],
            original_bytes=int(versions[1]),
            stored_bytes=int(versions[2]),
            elements=int(versions[3]),
            coarse_packs=coarse[0],
            coarse_bytes=coarse[1],
            exact_packs=exact[0],
            exact_bytes=exact[1],
            lattices=self._lattices.count(),
            contents=self._contents.count(),
            catalog_bytes=self._path.stat().st_size,
        )

    def check(self) -> list[str]:
        """A sentence for each thing that SQLite itself finds wrong with the file. Reads all of it."""
        found = [row[0] for row in self._connection.rows("PRAGMA integrity_check(10)") if row[0] != "ok"]
        found += [f"a row of {row[0]} refers to nothing" for row in self._connection.rows("PRAGMA foreign_key_check")]
        return [f"{self._path} is damaged ({problem}); run `ckstore recover` to rebuild it." for problem in found]

    # Writing

    def reserve_number(self) -> int:
        """A version number that nobody else gets, ever. Reservations of processes that are gone are dropped."""
        with self.transaction():
            host = socket.gethostname()
            for claim in self.reservations():
                if claim.host == host and not durable.is_running(claim.pid):
                    self._connection.execute("DELETE FROM reservations WHERE number = ?", [claim.number])
            # A rebuilt catalog has versions but no memory of numbers.
            self._connection.execute(
                "INSERT INTO reservations SELECT 1 + MAX(COALESCE((SELECT MAX(number) FROM versions), 0),"
                " COALESCE((SELECT seq FROM sqlite_sequence WHERE name = 'reservations'), 0)), ?, ?, ?",
                [os.getpid(), host, durable.timestamp()],
            )
            return int(self._connection.rows("SELECT last_insert_rowid()")[0][0])

    def reservations(self) -> list[Claim]:
        """The numbers that are reserved and not committed: ingests under way, or killed ones."""
        rows = self._connection.rows("SELECT number, pid, host, created FROM reservations ORDER BY number")
        return [Claim(*row) for row in rows]

    def skip_numbers(self, last: int) -> None:
        """Hand out no number up to and with `last` from now on."""
        with self.transaction():
            # An explicit number moves the table's own count on.
            self._connection.execute(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?)",
                [last, os.getpid(), socket.gethostname(), durable.timestamp()],
            )
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [last])

    def release_number(self, number: int) -> None:
        """Give up a reservation; the number is not handed out again."""
        with self.transaction():
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [number])

    def commit_version(
        self,
        row: VersionRow,
        packs: Sequence[Any],
        lattices: Iterable[Placement],
        contents: Iterable[Placement],
        *,
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
            Where the objects of this version are. A key that is there already keeps its place.
        references : iterable of str
            Names of the packs of other versions in which blobs of this one are: they must be in the catalog.
        replace : bool
            Forget the version that is at the same run and step; its children get its parent.
        requires_lattices, requires_contents : sequence of int
            Keys of older objects that this version refers to: they must still be there.

        Raises
        ------
        ConflictError
            There is a version at that run and step already, the version it would replace is tagged, a `gc` removed what
            this version refers to, or its number was given to another version while the catalog was rebuilt.
        NotFoundError
            The parent is gone.
        """
        with self.transaction():
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
            self._lattices.require(requires_lattices)
            self._contents.require(requires_contents)
            self.add_packs(packs)
            self._connection.execute("INSERT OR IGNORE INTO runs (name, created) VALUES (?, ?)", [row.run, row.created])
            self._insert_version(row, parent)
            self._refer(row.number, {row.pack, *references})
            self._lattices.place(lattices, displace=False)
            self._contents.place(contents, displace=False)
            self._connection.execute("DELETE FROM reservations WHERE number = ?", [row.number])

    def replace_version(self, row: VersionRow, references: Iterable[str]) -> None:
        """Let another manifest say what a version is: its place, sizes, costs and fidelity.

        Parameters
        ----------
        row : VersionRow
            Of a version that is there; its pack is known already.
        references : iterable of str
            Names of the packs in which blobs of it are.
        """
        with self.transaction():
            [[pack]] = self._connection.rows("SELECT id FROM packs WHERE name = ?", [row.pack])
            self._connection.execute(
                "UPDATE versions SET pack = ?, manifest_offset = ?, manifest_length = ?, stored_bytes = ?, depth = ?,"
                " cost = ?, base = ?, fidelity = ? WHERE number = ?",
                [pack, row.manifest_offset, row.manifest_length, row.stored_bytes, row.depth, row.cost, row.base,
                 row.fidelity, row.number],
            )  # fmt: skip
            self._connection.execute("DELETE FROM version_packs WHERE version = ?", [row.number])
            self._refer(row.number, {row.pack, *references})

    def add_packs(self, packs: Sequence[Any]) -> None:
        """Make packs (`PackInfo`) known; those that are known already stay as they are."""
        created = durable.timestamp()
        with self.transaction():
            self._connection.execute_many(
                "INSERT OR IGNORE INTO packs (name, kind, bytes, created) VALUES (?, ?, ?, ?)",
                [(pack.name, pack.kind, pack.bytes, created) for pack in packs],
            )

    def move_lattices(self, placements: Iterable[Placement]) -> None:
        """Say where lattices are from now on (`rebase`), whether they were known or not."""
        with self.transaction():
            self._lattices.place(placements, displace=True)

    def move_contents(self, placements: Iterable[Placement]) -> None:
        """Say where contents are from now on (re-anchored exact layers), whether they were known or not."""
        with self.transaction():
            self._contents.place(placements, displace=True)

    def remove_lattices(self, keys: Iterable[int]) -> int:
        """Forget where lattices are; returns how many were known."""
        with self.transaction():
            return self._lattices.remove(keys)

    def remove_contents(self, keys: Iterable[int]) -> int:
        """Forget where contents are (`thin`); returns how many were known."""
        with self.transaction():
            return self._contents.remove(keys)

    def remove_packs(self, names: Iterable[str]) -> None:
        """Forget packs that hold nothing any more; remove their files afterwards, never before.

        Raises
        ------
        ConflictError
            One of them is still referred to.
        """
        with self.transaction():
            removable = {pack.name for pack in self.unreferenced_packs()}
            for name in names:
                if name not in removable:
                    raise ConflictError(f"Pack {name} is still referred to; look which are free again.")
                self._connection.execute("DELETE FROM packs WHERE name = ?", [name])
                self._connection.execute("DELETE FROM meta WHERE value = ?", [name])

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
        with self.transaction():
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

    def note_collected(self, when: str) -> None:
        """Remember when `gc` moved or removed something, so that others notice."""
        with self.transaction():
            self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [_COLLECTED, when])

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
            "metrics": None if metrics is None else _metrics_text(metrics),
        }  # fmt: skip
        with self.transaction():
            self.version(number)
            for column, value in values.items():
                if value is not None:
                    self._connection.execute(f"UPDATE versions SET {column} = ? WHERE number = ?", [value, number])

    def forget_versions(self, numbers: Iterable[int]) -> None:
        """Remove versions from the catalog; their children get their parent. Packs and objects stay for `gc`.

        Raises
        ------
        NotFoundError
        ConflictError
            One of them is tagged.
        """
        with self.transaction():
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

    def remove_empty_runs(self) -> None:
        """Forget the runs that have no version."""
        with self.transaction():
            self._connection.execute("DELETE FROM runs WHERE id NOT IN (SELECT run FROM versions)")

    def set_tag(self, name: str, number: int) -> None:
        """Let a tag mean a version, whatever it meant before; raises `NotFoundError`, `UsageError` for a bad name."""
        check_tag(name)
        with self.transaction():
            self.version(number)
            self._connection.execute("INSERT OR REPLACE INTO tags VALUES (?, ?)", [name, number])

    def delete_tag(self, name: str) -> None:
        """Remove a tag; raises `NotFoundError`."""
        with self.transaction():
            if not self._connection.execute("DELETE FROM tags WHERE name = ?", [name]).rowcount:
                raise NotFoundError(f"There is no tag {name}; see `ckstore tag` for those there are.")

    @contextmanager
    def lease(self, purpose: str, seconds: float = LEASE_SECONDS) -> Iterator[int]:
        """Hold a lease while the block runs: `gc` removes nothing while somebody else holds one.

        It counts for as long as the process runs. Leases of processes of this host that are gone are dropped.

        Parameters
        ----------
        purpose : str
            What is being done, for messages.
        seconds : float
            After which the lease no longer counts on other hosts, which cannot see whether its holder runs.
        """
        expires = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        host = socket.gethostname()
        # At random: a holder that was not there when the catalog was rebuilt must not end another one's lease.
        number = secrets.randbits(62)
        with self.transaction():
            for claim in self._claims():
                if claim.host == host and not durable.is_running(claim.pid):
                    self._connection.execute("DELETE FROM leases WHERE id = ?", [claim.number])
            self._connection.execute(
                "INSERT INTO leases (id, purpose, pid, host, created, expires) VALUES (?, ?, ?, ?, ?, ?)",
                [number, purpose, os.getpid(), host, durable.timestamp(), expires],
            )
        try:
            yield number
        finally:
            try:
                self._end_lease(number)
            except BaseException:
                # Interrupted: `gc` would wait for it as long as this process runs.
                self._end_lease(number)
                raise

    def _end_lease(self, number: int) -> None:
        with self.transaction():
            self._connection.execute("DELETE FROM leases WHERE id = ?", [number])

    def leases(self) -> list[Claim]:
        """The leases that are held: by processes of this host that run, and on other hosts until they expire."""
        host, now = socket.gethostname(), durable.timestamp()
        return [
            claim
            for claim in self._claims()
            if (durable.is_running(claim.pid) if claim.host == host else claim.expires > now)
        ]

    def take_over_claims(self, present: Catalog) -> None:
        """Copy the reservations and leases of the catalog in whose place this one comes: their holders go on."""
        with self.transaction():
            self._connection.execute_many(
                "INSERT OR IGNORE INTO reservations VALUES (?, ?, ?, ?)",
                [(claim.number, claim.pid, claim.host, claim.created) for claim in present.reservations()],
            )
            self._connection.execute_many(
                "INSERT OR IGNORE INTO leases (id, pid, host, created, purpose, expires) VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (claim.number, claim.pid, claim.host, claim.created, claim.purpose, claim.expires)
                    for claim in present.leases()
                ],
            )

    def _claims(self) -> list[Claim]:
        rows = self._connection.rows("SELECT id, pid, host, created, purpose, expires FROM leases ORDER BY created, id")
        return [Claim(*row) for row in rows]

    def _select(self, tail: str, *parameters: Any) -> list[VersionRow]:
        rows = self._connection.rows(f"{_SELECT} {tail}", parameters)
        try:
            return [_version(row) for row in rows]
        except (ValueError, TypeError) as error:
            raise IntegrityError(f"{self._path} is damaged ({error}); run `ckstore recover` to rebuild it.") from error

    def _refer(self, number: int, packs: set[str]) -> None:
        for pack in sorted(packs):
            found = self._connection.rows("SELECT id FROM packs WHERE name = ?", [pack])
            if not found:
                raise ConflictError(
                    f"Pack {pack}, which version {number} refers to, was removed meanwhile; ingest it again."
                )
            self._connection.execute("INSERT INTO version_packs VALUES (?, ?)", [number, found[0][0]])

    def _insert_version(self, row: VersionRow, parent: int | None) -> None:
        marks = ", ".join("?" * 15)
        self._connection.execute(
            "INSERT INTO versions (number, uid, run, pack, step, parent, created, manifest_offset, manifest_length,"
            " original_bytes, stored_bytes, elements, tensors, files, depth, cost, base, fidelity, metrics, source)"
            " VALUES (?, ?, (SELECT id FROM runs WHERE name = ?), (SELECT id FROM packs WHERE name = ?),"
            f" {marks}, ?)",
            [
                *(row.number, row.uid, row.run, row.pack, row.step, parent, row.created),
                *(row.manifest_offset, row.manifest_length, row.original_bytes, row.stored_bytes, row.elements),
                *(row.tensors, row.files, row.depth, row.cost, row.base, row.fidelity),
                *(_metrics_text(row.metrics), row.source),
            ],
        )


def replace_catalog(store: Path, build: Callable[[Catalog, Catalog | None], None]) -> None:
    """Build a catalog beside the present one and put it in its place at once; nobody else writes meanwhile.

    Parameters
    ----------
    store : Path
        The store's directory.
    build : callable
        Fills the empty catalog that it is given first; where it raises, the present catalog stays. The second one is
        the present catalog, None where it is gone or cannot be opened; what it says may be damaged all the same.

    Raises
    ------
    LockedError
        Another process is writing to the present catalog.
    """
    beside = durable.temporary_path(store)
    beside.mkdir()
    try:
        create_file(beside / root.CATALOG)
        # From before the packs are listed: a version that is committed after that would not be in the new catalog.
        with _writers_kept_out(store) as present:
            with Catalog(beside, "a") as catalog, catalog.transaction():
                build(catalog, present)
            durable.checkpoint("catalog-built")
            if present is None:
                # It would be taken for the journal of the catalog that comes now.
                (store / (root.CATALOG + "-journal")).unlink(missing_ok=True)
            os.replace(beside / root.CATALOG, store / root.CATALOG)
            durable.sync_directory(store)
    finally:
        for name in (root.CATALOG, root.CATALOG + "-journal"):
            (beside / name).unlink(missing_ok=True)
        with suppress(OSError):
            beside.rmdir()


@contextmanager
def _writers_kept_out(store: Path) -> Iterator[Catalog | None]:
    """Hold the write lock of the present catalog; None where it cannot be written to, by nobody."""
    with ExitStack() as stack:
        present: Catalog | None = None
        try:
            present = stack.enter_context(Catalog(store, "a"))
            stack.enter_context(present.transaction())
        except (IntegrityError, NoStoreError):
            present = None
        yield present


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    return json.dumps(dict(metrics), separators=(",", ":"))


def _version(row: Sequence[Any]) -> VersionRow:
    values = list(row)
    values[16] = bool(values[16])
    values[18] = json.loads(values[18])
    return VersionRow(*values)
