"""Operations on one version cost as much in a store of many versions: calls, SQLite's instructions, read rows."""

from __future__ import annotations

import cProfile
import json
import pstats
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import ckstore
from ckstore.cli.program import run
from ckstore.intake import watching
from ckstore.intake.intake import Batch, Intake
from ckstore.objects.resolver import CatalogResolver
from ckstore.policy import Fidelity, Policy, Retention
from ckstore.retention.forget import forget
from ckstore.retention.retain import outlived, over_quota, retain
from ckstore.scanning.watched import Watched
from ckstore.storage.connection import Connection
from ckstore.storage.segments import COUNT, size_of
from ckstore.writing.drop import drop
from ckstore.writing.encode import encode
from ckstore.writing.request import IngestOptions
from tests.catalog_edits import edit, sign, without_triggers
from tests.checkpoints import settled

pytestmark = pytest.mark.local

RUNS = 10
#: More calls than in the small store: a delta or a page more.
TOLERANCE = 1.05
#: Instructions of SQLite to open the catalog once more, as other threads do.
CONNECTION = 5000
#: Statements that read a whole table, with the reason.
WHOLE = {
    r"FROM seals s$": "a row for each table",
    r"WITH RECURSIVE pairs": "`runs` and `best:METRIC`: two rows for each run and metric",
    r"WHERE o.versions AND|LEFT JOIN runs o ON 1": "`runs` and `best:METRIC`: two rows for each run",
    r"LEFT JOIN policies t": "the policies of runs",
    r"LEFT JOIN tags t": "before a version is forgotten or replaced, no tag may be missing",
    r"FROM leases": "one for each process that writes",
    r"FROM reservations": "one for each ingest in flight",
    r"FROM (claims.)?sqlite_master": "no rows of the store",
}


_CONNECT = sqlite3.connect


class _Counting(sqlite3.Connection):
    """A connection whose instructions are counted, and which is interrupted by nobody."""

    def set_progress_handler(self, *arguments: object) -> None:  # type: ignore[override]
        """Keep the present one."""


@dataclass
class Counted:
    """Costs of an operation: calls of Python functions, instructions of SQLite, and statements that scan a table."""

    calls: int = 0
    instructions: int = 0
    scans: set[str] = field(default_factory=set)


class Counter:
    """Counts the work of SQLite in every catalog that is opened."""

    def __init__(self) -> None:
        self.ticks = 0
        self.statements: set[str] = set()

    def tick(self) -> int:
        """Count ten instructions."""
        self.ticks += 1
        return 0

    def count(self, catalog: Path, operation: Callable[[], object]) -> Counted:
        """Return the costs of an operation."""
        self.ticks = 0
        self.statements.clear()
        profile = cProfile.Profile()
        profile.enable()
        try:
            operation()
        finally:
            profile.disable()
        found = Counted(pstats.Stats(profile).total_calls, 10 * self.ticks)  # type: ignore[attr-defined]
        asked = sorted(self.statements)
        with closing(_CONNECT(catalog)) as database:
            database.execute("ATTACH ? AS claims", [str(catalog.with_name("claims.sqlite"))])
            for statement in asked:
                if re.match(r"\s*(SELECT|UPDATE|DELETE|WITH)", statement) and "temp." not in statement:
                    plan = database.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
                    if any(re.match(r"SCAN (?!\w+ USING .*INDEX (versions_hot|packs_small))", row[3]) for row in plan):
                        found.scans.add(statement)
        return found


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    counter = Counter()

    def counted(*arguments: object, **named: object) -> sqlite3.Connection:
        database: _Counting = _CONNECT(*arguments, factory=_Counting, **named)  # type: ignore[call-overload]
        super(_Counting, database).set_progress_handler(counter.tick, 10)
        database.set_trace_callback(counter.statements.add)
        return database

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", counted)
        yield counter


def grown(place: Path, versions: int, hot: int = 9, runs: int = RUNS) -> None:
    """Make a store with four real versions at the end of this many others, whose packs are missing."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(8000, generator=generator), torch.randn(70000, generator=generator)
    with ckstore.init(place) as store:
        for step in range(4):
            weight = weight + 1e-4 * torch.randn(8000, generator=generator)
            store.ingest({"w": weight, "bias": bias + step}, run="r0", step=10**6 + step, hot=hot)
        store.tag(f"r0@{10**6 + 1}", "best")
        store.encode(f"r0@{10**6 + 2}")
        bands = store[f"r0@{10**6}"]._stored.document.bands
    add_versions(place / "catalog.sqlite", versions, runs, bands)


def add_versions(catalog: Path, versions: int, runs: int, bands: Sequence[int], *, in_segments: bool = True) -> None:
    """Add rows of versions with lower numbers than those in a catalog, whose second version they copy."""
    with without_triggers(catalog) as database:
        database.execute("PRAGMA foreign_keys = OFF")
        for table, column in (
            ("versions", "number"), ("versions", "parent"), ("version_packs", "version"), ("tags", "version"),
            ("likeness", "version"),
        ):  # fmt: skip
            database.execute(f"UPDATE {table} SET {column} = {column} + {versions}")
        database.row_factory = sqlite3.Row
        row = dict(database.execute(f"SELECT * FROM versions WHERE number = {versions + 2}").fetchone())
        pack = dict(database.execute(f"SELECT * FROM packs WHERE id = {row['pack']}").fetchone())
        for run in range(1, runs):
            database.execute("INSERT INTO runs (id, name) VALUES (?, ?)", [run + 1, f"r{run}"])
        for number in range(1, versions + 1):
            digest = sha1(str(number).encode())
            # In a segment, as small packs of a long run are.
            pack |= {
                "id": 1000 + number,
                "name": f"{digest.hexdigest()}.zip",
                "held": 0,
                "segment": digest.digest() if in_segments else None,
                "place": 100 if in_segments else None,
            }
            row |= {
                "number": number, "uid": digest.digest(), "run": 1 + number % runs, "step": number, "parent": None,
                "pack": pack["id"], "hot": 0, "metrics": json.dumps({"loss": number / 7}),
            }  # fmt: skip
            for table, values in (("packs", pack), ("versions", row)):
                named = ", ".join(f":{name}" for name in values)
                database.execute(f"INSERT INTO {table} VALUES ({named})", values)
            database.executemany("INSERT INTO likeness VALUES (?, ?)", [(band, number) for band in bands])
            database.execute("INSERT INTO metrics VALUES (?, 'loss', ?, ?)", [row["run"], number / 7, number])
            if number % (versions // 5) == 0:
                database.execute("INSERT INTO tags (name, version) VALUES (?, ?)", [f"tag {number}", number])
        sign(database)


def operations(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield operations that name one version, each under its name."""
    last = 10**6
    weight = torch.randn(8000, generator=torch.Generator().manual_seed(1))
    with ckstore.open(place) as store:
        store.ingest({"w": weight, "bias": weight.repeat(9)}, run="r0", step=last + 4, hot=0)
        yield "ingest", lambda: store.ingest({"w": weight + 1e-4}, run="r0", step=last + 5, hot=0)
        yield "hot ingest", lambda: store.ingest({"w": weight + 2e-4}, run="r0", step=last + 6, hot=9)
        yield "replace", lambda: store.ingest({"w": weight + 3e-4}, run="r0", step=last + 6, replace=True, hot=9)
        yield "encode", lambda: store.encode(run="r0")
        yield "thin", lambda: store.thin(f"r0@{last}")
        yield "rebase", lambda: store.rebase(f"r0@{last + 3}")
        yield "drop", lambda: drop(store._repository, [store._catalog.resolve(f"r0@{last + 4}")], ["bias"])
        yield "tag", lambda: store.tag(f"r0@{last + 1}", "second")
        yield "untag", lambda: store.untag("second")
        yield "metric", lambda: store.set_metrics(f"r0@{last + 1}", {"loss": 0.5})
        yield "latest", lambda: store["latest"].step
        yield "tagged", lambda: store["best"].tags
        yield "slice", lambda: store[f"r0@{last + 2}"]["w"][5:7]
        yield "state dict", lambda: store[f"r0@{last + 3}"].state_dict()
        yield "length", lambda: len(store)
        yield "best", lambda: store["best:loss"].step
        yield "best of a run", lambda: store["r0@most:loss"].step
        yield "runs", lambda: store._catalog.summaries()
        yield "forget", lambda: store.forget(f"r0@{last + 2}")
        store.set_policy(Policy(retention=Retention(keep_last=3, keep_every=7)), "r9")
        yield "outlived", lambda: outlived(store._repository, "r9", last)
        for step in range(4):
            store.ingest({"w": weight + step}, run="kept", step=step, hot=0)
        for left in (3, 2):
            store.set_policy(Policy(retention=Retention(keep_last=left)), "kept")
            if left == 3:  # All rows are proved, once a minute.
                assert len(retain(store._repository, "kept").forgotten) == 1
        yield "retain", lambda: retain(store._repository, "kept")
        monkeypatch.setattr(watching, "_ALIKE", 8)  # The small store has ten versions of a run.
        watched = Watched([place], settle=0)
        watcher = watching._Watcher(
            Intake(store._repository), watched, Batch(IngestOptions(run="r0"), deletes=True), None, 10
        )
        np.save(place / f"step{last + 7}.npy", weight)
        watched.look(0)
        [ready] = watched.look(1)
        yield "watch", lambda: [*watcher.store_all([ready], threading.Event())]
        generator = torch.Generator().manual_seed(0)
        _, alike = torch.randn(8000, generator=generator), torch.randn(70_000, generator=generator) + 1e-3
        yield "new run", lambda: store.ingest({"bias": alike}, run="new", hot=0)

    def opened() -> object:
        with ckstore.open(place) as store:
            return store["r0"].number

    yield "open", opened


def test_the_number_of_versions_does_not_matter(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: dict[int, dict[str, Counted]] = {}
    for versions in (100, 10_000):
        place = tmp_path / str(versions)
        grown(place, versions)
        found[versions] = {
            name: counter.count(place / "catalog.sqlite", operation)
            for name, operation in operations(place, monkeypatch)
        }
    few, many = found[100], found[10_000]
    for name in few:
        print(f"{name:12}", few[name].calls, many[name].calls, few[name].instructions, many[name].instructions)
    scans = {statement for counted in many.values() for statement in counted.scans}
    assert not [statement for statement in scans if not any(re.search(known, statement) for known in WHOLE)]
    for name in few:
        assert many[name].calls <= TOLERANCE * few[name].calls, name
        assert many[name].instructions <= TOLERANCE * few[name].instructions + CONNECTION, name


@pytest.mark.parametrize("fidelity", ["exact", "coarse"])
def test_the_number_of_hot_versions_does_not_matter(fidelity: Fidelity, counter: Counter, tmp_path: Path) -> None:
    """A thread that encodes reads none of the versions that wait, or it would fall behind further."""
    found = []
    for waiting in (4, 64):
        with ckstore.init(tmp_path / str(waiting)) as store:
            store.set_policy(Policy(fidelity))
            for step in range(waiting + 2):
                run = "r" if step < 2 else f"other{step % 2}"
                store.ingest({"w": torch.full((900,), step / 7)}, run=run, step=step, hot=99)
            settled(store)  # Its thread looks at the policies.
            encode(store._repository, [store._catalog.version(1)])
            operation = partial(encode, store._repository, [store._catalog.version(2)])
            found.append(counter.count(store.path / "catalog.sqlite", operation))
            assert store._catalog.hot_sizes("r") == {}
    few, many = found
    print(few.calls, many.calls, few.instructions, many.instructions)
    assert many.calls <= TOLERANCE * few.calls
    assert many.instructions <= TOLERANCE * few.instructions
    assert {scan for scan in many.scans if not any(re.search(known, scan) for known in WHOLE)} == set()


def frozen(place: Path, versions: int, scale: float) -> ckstore.Store:
    """Make a store of one run whose versions share a tensor, each encoded; another tensor moves at some scale."""
    generator = torch.Generator().manual_seed(0)
    weight, frozen = torch.randn(70_000, generator=generator), torch.randn(70_000, generator=generator)
    store = ckstore.init(place)
    for step in range(versions):
        weight = weight + scale * torch.randn(70_000, generator=generator)
        store.ingest({"weight": weight, "frozen": frozen}, run="a", step=step, hot=0)
    return store


def read_by(operation: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the numbers of the versions whose documents an operation reads."""
    found: set[int] = set()
    document = CatalogResolver.document

    def noted(self: CatalogResolver, row: ckstore.VersionRow) -> object:
        found.add(row.number)
        return document(self, row)

    with monkeypatch.context() as patched:
        patched.setattr(CatalogResolver, "document", noted)
        operation()
    return found


@pytest.mark.parametrize(("step", "scale"), [(4, 1e-3), (0, 1e3)])
def test_the_number_of_versions_that_share_an_object_does_not_matter(
    step: int, scale: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every version uses the first pack, for the frozen tensor; few need the other tensor in a pack."""
    found: dict[str, list[set[int]]] = {"rebase": [], "thin": []}
    for versions in (9, 18):
        with frozen(tmp_path / str(versions), versions, scale) as store:
            assert store.verify().problems == []
            found["rebase"].append(read_by(lambda: store.rebase("a@5"), monkeypatch))
            found["thin"].append(read_by(lambda: store.thin(f"a@{step}"), monkeypatch))
            assert store.verify().problems == []
            assert [row.fidelity for row in store._catalog.versions()].count("coarse") == 1
    for few, many in found.values():
        assert few == many


@pytest.mark.parametrize("statement", ["UPDATE version_packs SET objects = ''", "DELETE FROM pack_bases"])
def test_verify_compares_the_packs_that_versions_depend_on(statement: str, tmp_path: Path) -> None:
    with frozen(tmp_path / "store", 3, 1e-3) as store:
        assert store.verify().problems == []
    edit(tmp_path / "store" / "catalog.sqlite", statement)
    with ckstore.open(tmp_path / "store") as store:
        assert store.verify().problems
    assert ckstore.recover(tmp_path / "store").problems == []
    with ckstore.open(tmp_path / "store") as store:
        assert store.verify().problems == []


def joined(place: Path, versions: int) -> ckstore.Store:
    """Open such a store of one run; the segments of the missing packs are there, without contents."""
    grown(place, versions, hot=0, runs=1)
    edit(
        place / "catalog.sqlite",
        f"UPDATE packs SET segment = CAST(printf('%020d', id / {COUNT}) AS BLOB) WHERE segment IS NOT NULL",
    )
    store = ckstore.open(place)
    for segment, (packs, size) in store._catalog.joined().items():
        with open(place / "packs" / segment, "wb") as file:
            file.truncate(size_of(packs, size))
    with store._catalog.transaction():
        for row in store._catalog.last_versions(4):
            record = {"uid": row.uid, "from": row.number - versions, "version": row.number}
            store._catalog.note({"change": "renumber", **record})
    return store


def test_a_gc_with_nothing_to_do_reads_a_row_for_each_segment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: dict[int, int] = {}
    for versions in (100, 1000):
        with joined(tmp_path / str(versions), versions) as store:
            found[versions] = rows_read(store.gc, monkeypatch)
    assert found[1000] - found[100] < 7 * 1000 / COUNT


def test_a_gc_reads_changed_packs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The manifests that one reads after a change do not depend on the others, and rows only on their segments."""
    found: dict[int, list[tuple[int, int]]] = {}
    for versions in (100, 1000):
        with joined(tmp_path / str(versions), versions) as store:
            found[versions] = list(read_by_gc(store, monkeypatch))
    for (few_rows, few), (many_rows, many) in zip(found[100], found[1000], strict=True):
        print("gc", few_rows, many_rows, few, many)
        assert few == many
        assert many_rows - few_rows < 30 * 1000 / COUNT


def test_a_gc_looks_at_few_versions_for_each_one_that_went(counter: Counter, tmp_path: Path) -> None:
    """Others may share origin and bands of one that went; all are read once a sixteenth of them went."""
    found: dict[int, list[bool]] = {}
    for versions in (100, 1000):
        with joined(tmp_path / str(versions), versions) as store:
            catalog = store.path / "catalog.sqlite"
            found[versions] = []
            for step in (10**6 + 2, 10**6):
                forget(store._repository, [store._catalog.resolve(f"r0@{step}")], for_good=True)
                scans = counter.count(catalog, partial(store.gc, grace=0)).scans
                found[versions].append(any(re.search("likeness|origins", scan) for scan in scans))
            with closing(_CONNECT(catalog)) as database:
                gone = "SELECT COUNT(*) FROM likeness WHERE version NOT IN (SELECT number FROM versions)"
                [left] = database.execute(gone).fetchone()
    assert (found, left > 0) == ({100: [False, False], 1000: [False, False]}, True)


def read_by_gc(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and of manifests that a collection reads after each of some changes."""
    read = CatalogResolver._read_manifest
    weight = torch.randn(8000, generator=torch.Generator().manual_seed(1))
    changes: list[Callable[[], object]] = [
        lambda: None,
        partial(store.forget, f"r0@{10**6 + 2}"),
        partial(forget, store._repository, [store._catalog.resolve(f"r0@{10**6}")], for_good=True),
        partial(store.ingest, {"w": weight}, run="r0", step=10**6 + 4, hot=0),
        partial(store.thin, f"r0@{10**6 + 3}"),
    ]
    for change in changes:
        change()
        with mock.patch.object(CatalogResolver, "_read_manifest", autospec=True, side_effect=read) as counted:
            rows = rows_read(partial(store.gc, grace=0), monkeypatch)
        yield rows, counted.call_count


#: Most calls of functions for each further version of one tensor.
MOST = {"verify": 1000, "recover": 1520}


def test_calls_of_whole_store_verbs_for_each_version(tmp_path: Path) -> None:
    found: dict[str, list[int]] = {verb: [] for verb in MOST}
    for versions in (5, 10, 40):  # The first one imports modules.
        place = tmp_path / str(versions)
        with ckstore.init(place) as store:
            for step in range(versions):
                weight = torch.randn(300, generator=torch.Generator().manual_seed(step))
                store.ingest({"w": weight}, run="a", step=step, hot=0)
        with ckstore.open(place) as store:
            found["verify"].append(calls(store.verify))
        found["recover"].append(calls(partial(ckstore.recover, place)))
    each = {verb: (many - few) / 30 for verb, (_, few, many) in found.items()}
    for verb, most in MOST.items():
        assert each[verb] <= most, each


def calls(operation: Callable[[], object]) -> int:
    """Return the number of functions that an operation calls."""
    profile = cProfile.Profile()
    profile.runcall(operation)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def rows_read(operation: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of rows of the catalog that an operation reads."""
    read = 0
    fetched = Connection._fetched

    def counted(self: Connection, *asked: Any) -> list[Any]:
        nonlocal read
        found = fetched(self, *asked)
        read += len(found)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "_fetched", counted)
        operation()
    return read


def test_tags_do_not_read_all_versions(counter: Counter, tmp_path: Path) -> None:
    found: dict[int, list[Counted]] = {}
    for versions in (100, 1000):
        place = tmp_path / str(versions)
        grown(place, versions)
        with ckstore.open(place) as store:
            asked = store.tags, partial(run, ["--store", str(place), "tag", "r0@1000001", "first"])
            for operation in asked:
                operation()  # Rows of one content are decoded once in a process.
            found[versions] = [counter.count(place / "catalog.sqlite", operation) for operation in asked]
    for few, many in zip(found[100], found[1000], strict=True):
        assert many.calls <= TOLERANCE * few.calls
        assert many.instructions <= TOLERANCE * few.instructions + CONNECTION


def test_a_limit_of_bytes_looks_at_the_oldest_versions(tmp_path: Path) -> None:
    """SQLite sorts all of them, since a limit of the store is seldom; few become objects."""
    found: dict[int, int] = {}
    for versions in (200, 10_000):
        grown(tmp_path / str(versions), versions)
        with ckstore.open(tmp_path / str(versions)) as store:
            limit = Retention(max_bytes=store._catalog.totals().bytes - 1)
            over_quota(store._repository, retention=limit)
            found[versions] = calls(partial(over_quota, store._repository, retention=limit))
            assert [row.step for row in over_quota(store._repository, retention=limit)] == [10**6]
    assert found[10_000] <= TOLERANCE * found[200]
