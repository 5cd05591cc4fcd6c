"""The catalog: commits and their refusals, bulk look-ups, removal, locks, formats, damage, size."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from ckstore.errors import (
    AccessError,
    CkstoreError,
    ConflictError,
    DiskFullError,
    FormatVersionError,
    IntegrityError,
    LockedError,
    NoStoreError,
    NotFoundError,
    UsageError,
)
from ckstore.storage import change_log, connection, durable, placements, root
from ckstore.storage.catalog import Catalog, VersionRow, key
from ckstore.storage.catalog_replacement import replace_catalog
from ckstore.storage.catalog_tables import LARGEST_ORIGIN, PACK_NAME, SEALED
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.pack import PackEntry, PackInfo
from tests.storage.version_writer import identifier, write_version

pytestmark = pytest.mark.local

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_committed_version_comes_back(catalog, store):
    row = write_version(catalog, store, "gpt", 100, metrics={"loss": 0.1, "name": "ä"}, source=None, base=False)
    assert catalog.version(1) == row
    assert catalog.versions() == catalog.versions("gpt") == [row]
    with Catalog.open(store) as other:
        assert other.version(1) == row
    [run] = catalog.runs()
    assert (run.name, run.versions, run.latest, run.step) == ("gpt", 1, 1, 100)
    [pack] = catalog.packs()
    assert (pack.name, pack.kind, pack.bytes) == (row.pack, "encoded", row.stored_bytes)
    assert catalog.objects() == 3


def test_versions_share_their_origin(catalog, store):
    """A version takes the row of its parent's origin if the two are equal; `gc` frees rows without versions."""
    config = {"model": {"layers": [1, 2]}, "lr": 3e-4}
    first = write_version(catalog, store, step=1, metrics={"loss": 1.0, "made": {"host": "a"}, "config": config})
    same = {"made": {"host": "a"}, "config": config}
    second = write_version(catalog, store, step=2, parent=1, metrics=same | {"loss": 0.5})
    third = write_version(catalog, store, step=3, parent=2, metrics={"made": {"host": "b"}})
    assert catalog.versions() == [first, second, third]

    def origins() -> list[int]:
        return [version for (version,) in catalog._connection.rows("SELECT origin FROM versions ORDER BY number")]

    def texts() -> list[str]:
        return [text for (text,) in catalog._connection.rows("SELECT text FROM origins ORDER BY id")]

    assert origins() == [1, 1, 2]
    assert list(map(json.loads, texts())) == [same, {"made": {"host": "b"}}]
    with catalog.transaction():
        catalog.update_version(2, metrics={"loss": 0.4})
        catalog.update_version(3, metrics=same)
    assert catalog.version(2).metrics == {"loss": 0.4}
    assert catalog.version(3).metrics == same
    assert origins() == [1, None, 3]
    with catalog.transaction():
        catalog.note_collected(durable.timestamp())
    assert len(texts()) == 2
    with catalog.transaction():
        catalog.forget_versions([1, 2, 3])
        catalog.note_collected(durable.timestamp())
    assert texts() == []


@pytest.mark.parametrize("mark", ["", "\0"])
def test_a_large_origin_stays_in_its_row(catalog, store, mark):
    """SQLite counts the characters of a text up to a zero."""
    config = {"config": {"text": "a" * LARGEST_ORIGIN}}
    rows = [write_version(catalog, store, step=step, metrics=config) for step in range(2)]
    assert catalog.versions() == rows
    assert catalog._connection.rows("SELECT COUNT(*) FROM origins") == [(0,)]
    large = mark + json.dumps(config)
    with closing(sqlite3.connect(store / root.CATALOG)) as database, database:
        connection.add_seal(database)
        database.execute("INSERT INTO origins VALUES (1, ?)", [large])
        database.execute("UPDATE versions SET metrics = '{}', origin = 1")
        columns = ", ".join(SEALED["versions"]).format("")
        database.execute(f"UPDATE versions SET seal = seal({columns})")
    with pytest.raises(IntegrityError, match="too big"):
        catalog.version(1)


@pytest.mark.long
@pytest.mark.parametrize("mark", ["''", "char(0)"])
@pytest.mark.parametrize(
    ("column", "ask"),
    [
        ("runs.name", lambda catalog: catalog.versions()),
        ("runs.name", lambda catalog: catalog.runs()),
        ("packs.name", lambda catalog: catalog.versions()),
        ("packs.name", lambda catalog: catalog.packs()),
        ("packs.name", lambda catalog: catalog.described()),
        ("packs.name", lambda catalog: catalog.uses([1, 2, 3])),
        ("packs.name", lambda catalog: catalog.placed_objects()),
        ("tags.name", lambda catalog: catalog.tags()),
        ("tags.name", lambda catalog: catalog.tags_of(1)),
        ("policies.run", lambda catalog: catalog.policies()),
        ("meta.value", lambda catalog: catalog.identity()),
        ("seals.last", lambda catalog: catalog.versions()),
        ("seals.total", lambda catalog: catalog.packs()),
        ("runs.total", lambda catalog: catalog.versions("gpt")),
        ("leases.purpose", lambda catalog: catalog.leases()),
        ("reservations.host", lambda catalog: catalog.reservations()),
    ],
)
def test_a_long_name_in_a_catalog_takes_no_memory(filled, store, column, ask, mark):
    """SQLite would repeat a name of a megabyte in each row, and counts the characters of a text up to a zero."""
    catalog = filled
    catalog.set_tag("best", 1)
    catalog.set_policy("gpt", "{}")
    catalog.reserve_number()
    table, _, name = column.partition(".")
    with catalog.lease("ingest"):
        with closing(sqlite3.connect(store / root.CATALOG)) as database, database:
            connection.add_seal(database)
            database.execute("ATTACH ? AS claims", [str(store / root.CLAIMS)])
            database.execute(f"UPDATE {table} SET {name} = 'n' || {mark} || hex(zeroblob(500000)) || {name}")
            if table not in ("leases", "reservations"):
                database.execute(f"UPDATE {table} SET seal = seal({', '.join(SEALED[table]).format('')})")
            database.execute("UPDATE versions SET pack = (SELECT MAX(id) FROM packs)")
            database.execute(f"UPDATE versions SET seal = seal({', '.join(SEALED['versions']).format('')})")
        tracemalloc.start()
        try:
            with pytest.raises(IntegrityError) as problem:
                ask(catalog)
            assert tracemalloc.get_traced_memory()[1] < 500_000
        finally:
            tracemalloc.stop()
        assert len(str(problem.value)) < 500


def test_the_bound_of_a_name_calls_no_function_of_constants(filled, store):
    """SQLite before 3.32 computes such functions first, and would find every catalog too big."""
    with closing(sqlite3.connect(store / root.CATALOG)) as database:
        steps = [code for _, code, *_ in database.execute(f"EXPLAIN SELECT {PACK_NAME} FROM packs p")]
    assert "Function" in steps
    assert "Once" not in steps


def test_gc_does_not_read_all_versions_for_each_origin(tmp_path):
    counted = []
    for number in (20, 80):
        store, ticks = tmp_path / str(number), []
        with Catalog.create(store) as catalog, catalog.transaction():
            for step in range(2 * number):
                write_version(catalog, store, step=step, objects=1, metrics={"made": {"host": str(step)}})
            catalog.forget_versions(range(1, number + 1))
            catalog._connection._database.set_progress_handler(lambda ticks=ticks: ticks.append(None), 10)
            catalog.note_collected(durable.timestamp())
            assert catalog._connection.rows("SELECT COUNT(*) FROM origins") == [(number,)]
            counted.append(len(ticks))
    assert counted[1] < 6 * counted[0]


def test_gc_frees_origins_and_likeness_after_a_sixteenth_of_the_versions(catalog, store):
    def rows(table: str) -> int:
        return catalog._connection.rows(f"SELECT COUNT(*) FROM {table}")[0][0]

    found = []
    with catalog.transaction():
        for step in range(34):
            write_version(
                catalog, store, step=step, objects=1, metrics={"made": {"host": str(step)}}, bands=[1, 99 + step]
            )
        for number in (1, 2, 3, 4, 5):
            catalog.forget_versions([number])
            catalog.note_collected(durable.timestamp())
            found.append((rows("origins"), rows("likeness")))
        catalog.update_version(6, metrics={"made": {"host": "other"}})
        catalog.update_version(6, metrics={"made": {"host": "other"}, "loss": 1.0})
        assert catalog.moved_packs(["collected:left"]) == {"collected:left": "2"}
    assert found == [(34, 68), (32, 64), (32, 64), (30, 60), (30, 60)]


def test_a_note_in_a_catalog_that_was_replaced_has_a_checksum(catalog, store):
    write_version(catalog, store)
    again = store / "again"
    again.write_bytes((store / root.CATALOG).read_bytes())
    again.replace(store / root.CATALOG)
    assert len(catalog.versions()) == 1
    catalog.note_kept(5, durable.timestamp())
    catalog.prove()


def test_a_catalog_that_took_the_place_of_its_successor_has_another_state(filled, store):
    """Its inode is the former one; so may be that of a catalog that two recoveries made."""
    path, aside = store / "catalog.sqlite", store / "aside"
    with Catalog(store, "r") as catalog:
        states = [catalog.state()]
        path.rename(aside)
        shutil.copy(aside, path)
        states.append(catalog.state())
        filled.set_policy("", None)
        aside.replace(path)
        states.append(catalog.state())
    assert len(set(states)) == 3


def test_an_empty_catalog_answers(catalog):
    assert catalog.versions() == catalog.runs() == catalog.packs() == catalog.reservations() == catalog.leases() == []
    assert catalog.latest() is None
    assert catalog.objects() == 0
    assert catalog.find_objects([]) == catalog.find_objects([1, 2]) == {}


def test_lookups_find_existing_records(filled):
    keys = {key(identifier(f"object {number} {slot}")): slot for number in (1, 2, 3) for slot in range(3)}
    found = filled.find_objects([*keys, 5, key("f" * 40)])
    assert {item: slot for item, (_, slot) in found.items()} == keys
    assert {pack for pack, _ in found.values()} == {pack.name for pack in filled.packs()}
    pack = filled.version(2).pack
    assert [slot for _, slot in filled.objects_in(pack)] == [0, 1, 2]
    assert filled.objects_in("0" * 40 + ".zip") == []
    with pytest.raises(NotFoundError):
        filled.versions("nobody")
    assert [version.number for version in filled.children(1)] == [2]


def test_keys_are_large_and_not_negative():
    assert key("f" * 40) == 2**63 - 1
    assert key("0" * 15 + "2" + "f" * 24) == 1


def test_a_later_encoding_does_not_displace_a_known_one(filled, store):
    item = key(identifier("object 1 0"))
    with filled.transaction():
        pack = PackInfo("0" * 40 + ".zip", 5)
        filled.add_packs([pack, pack])
        filled._objects.place([(item, pack.name, 9)], displace=False)
    assert filled.find_objects([item])[item] == (filled.version(1).pack, 0)
    filled.move_objects([(item, pack.name, 9), (77, pack.name, 10)])
    assert filled.find_objects([item, 77]) == {item: (pack.name, 9), 77: (pack.name, 10)}
    with pytest.raises(UsageError, match="is not in the catalog"):
        filled.move_objects([(item, "1" * 40 + ".zip", 0)])


def test_the_same_step_is_a_conflict(filled, store):
    before = filled.versions(), filled.packs(), filled.objects()
    with pytest.raises(ConflictError, match=r"gpt@200 is already version 2"):
        write_version(filled, store, "gpt", 200)
    assert (filled.versions(), filled.packs(), filled.objects()) == before
    write_version(filled, store, "gpt", None)
    write_version(filled, store, "gpt", None)
    assert len(filled.versions("gpt")) == 4


def test_replacing_hands_children_to_the_grandparent(filled, store):
    write_version(filled, store, "gpt", 300, parent=2)
    replaced = write_version(filled, store, "gpt", 200, parent=2, replace=True)
    assert [version.number for version in filled.versions("gpt")] == [1, 4, 5]
    assert filled.version(4).parent == 1
    assert filled.version(replaced.number).parent == 1
    filled.set_tag("best", replaced.number)
    with pytest.raises(ConflictError, match="tagged best"):
        write_version(filled, store, "gpt", 200, replace=True)
    assert filled.resolve("best").number == replaced.number


def test_a_commit_checks_its_requirements(filled, store):
    known = key(identifier("object 1 0"))
    write_version(filled, store, "gpt", 300, requires=[known, known])
    with pytest.raises(ConflictError, match="removed during the ingest"):
        write_version(filled, store, "gpt", 400, requires=[known, 5])
    with pytest.raises(NotFoundError):
        write_version(filled, store, "gpt", 400, parent=99)
    assert filled.at_step("gpt", 400) is None


def test_removal(filled, store):
    item = key(identifier("object 1 0"))
    assert filled.remove_objects([item, 5]) == 1
    assert filled.find_objects([item]) == {}
    pack = filled.version(1).pack
    with pytest.raises(ConflictError, match="still referred to"):
        filled.remove_packs([pack])
    filled.forget_versions([1])
    assert filled.version(2).parent is None
    with pytest.raises(NotFoundError):
        filled.forget_versions([1])
    assert filled.unreferenced_packs() == []
    filled.remove_objects(item for item, _ in filled.objects_in(pack))
    assert [row.name for row in filled.unreferenced_packs()] == [pack]
    filled.remove_packs([pack])
    assert len(filled.packs()) == 2


def test_placements_are_the_same_whether_settled_or_not(catalog, store, monkeypatch):
    """Against a dict, with small tables that are moved on after every few rows."""
    monkeypatch.setattr(placements, "_LARGEST_RECENT", 20)
    source = random.Random(0)
    packs = [PackInfo(identifier(str(number)) + ".zip", 5) for number in range(5)]
    catalog.add_packs(packs)
    expected: dict[int, tuple[str, int]] = {}
    for _ in range(60):
        items = [source.randrange(100) for _ in range(source.randrange(12))]
        places = {item: (source.choice(packs).name, source.randrange(50)) for item in items}
        rows = [(item, *place) for item, place in places.items()]
        action = source.randrange(3)
        if action == 0:
            with catalog.transaction():
                catalog._objects.place(rows, displace=False)
            expected = {**places, **expected}
        elif action == 1:
            catalog.move_objects(rows)
            expected |= places
        else:
            assert catalog.remove_objects(items) == sum(item in expected for item in set(items))
            expected = {item: place for item, place in expected.items() if item not in places}
        assert catalog.find_objects(range(100)) == expected
        assert catalog.objects() == len(expected)
        used = {name for name, _ in expected.values()}
        assert {row.name for row in catalog.unreferenced_packs()} == {pack.name for pack in packs} - used
        for pack in packs:
            placed = sorted((slot, item) for item, (name, slot) in expected.items() if name == pack.name)
            assert sorted((slot, item) for item, slot in catalog.objects_in(pack.name)) == placed
    assert catalog._connection.rows("SELECT COUNT(*) FROM settled_objects")[0][0] > 20


def test_updates(filled):
    filled.update_version(2, cost=1.5, depth=3, base=False, stored_bytes=7)
    row = filled.version(2)
    assert (row.cost, row.depth, row.base, row.stored_bytes) == (1.5, 3, False, 7)
    assert filled.version(1).stored_bytes != 7
    with pytest.raises(NotFoundError):
        filled.update_version(9, depth=1)


def test_numbers_are_never_given_twice(catalog, store):
    assert [catalog.reserve_number() for _ in range(3)] == [1, 2, 3]
    assert [claim.number for claim in catalog.reservations()] == [1, 2, 3]
    catalog.release_number(3)
    assert catalog.reserve_number() == 4
    row = write_version(catalog, store)
    assert row.number == 5
    assert 5 not in [claim.number for claim in catalog.reservations()]
    catalog.forget_versions([5])
    assert catalog.reserve_number() == 6


def test_reservations_of_the_dead_are_dropped_once_a_later_version_exists(catalog, store):
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with catalog.transaction():
        number = catalog.reserve_number()
        catalog._connection.execute("UPDATE reservations SET pid = ?", [int(done.stdout)])
    assert catalog.reserve_number() == number + 1
    assert [claim.number for claim in catalog.reservations()] == [number, number + 1]
    write_version(catalog, store)
    assert catalog.reserve_number() == number + 3
    assert [claim.number for claim in catalog.reservations()] == [number + 1, number + 3]


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "noise", "pages", "trigger", "table"])
def test_claims_that_a_loss_of_power_damaged_are_made_again(filled, store, damage):
    filled.reserve_number()
    filled.close()
    path = store / root.CLAIMS
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage in ("trigger", "table"):
        with closing(sqlite3.connect(path)) as database:
            database.execute(
                "CREATE TABLE t (x)"
                if damage == "table"
                else "CREATE TRIGGER t AFTER INSERT ON leases BEGIN DELETE FROM reservations; END"
            )
    else:
        noise = random.Random(0).randbytes(len(data))
        parts = {"empty": b"", "cut": data[:700], "noise": noise, "pages": data[:512] + noise[512:]}
        path.write_bytes(parts[damage])
    with Catalog.open(store) as reader:
        assert len(reader.versions()) == 3
        assert len(reader.reservations()) == (damage in ("trigger", "table"))
    with Catalog.open(store, "a") as again:
        assert again.reservations() == again.leases() == []
        assert again.reserve_number() == again.last_number() + 1 == 4
        with again.lease("ingest"):
            assert [lease.purpose for lease in again.leases()] == ["ingest"]


def test_claims_that_are_removed_while_they_are_open_are_made_again(filled, store):
    (store / root.CLAIMS).unlink()
    with Catalog.open(store, "a") as other, other.lease("ingest"):
        assert [lease.purpose for lease in filled.leases()] == ["ingest"]
        assert other.reserve_number() == filled.reserve_number() - 1 == 4


def test_damaged_claims_are_no_damage_of_the_catalog(filled, store):
    data = (store / root.CLAIMS).read_bytes()
    (store / root.CLAIMS).write_bytes(data[:512] + bytes(len(data) - 512))
    assert filled.check() == []


def test_a_lease_counts_while_its_process_runs(catalog):
    with catalog.lease("reading", seconds=-1):
        [lease] = catalog.leases()
        assert (lease.purpose, lease.pid) == ("reading", os.getpid())
    assert catalog.leases() == []
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with catalog.lease("killed"):
        catalog._connection.execute("UPDATE leases SET pid = ?", [int(done.stdout)])
        assert catalog.leases() == []
        with catalog.lease("later"):
            assert catalog._connection.rows("SELECT purpose FROM leases") == [("later",)]


def test_a_lease_of_another_host_counts_until_it_expires(catalog):
    with catalog.lease("there"), catalog.lease("long ago there", seconds=-1):
        catalog._connection.execute("UPDATE leases SET host = 'elsewhere', pid = 0")
        assert [lease.purpose for lease in catalog.leases()] == ["there"]


def test_a_lease_from_before_the_catalog_was_rebuilt_ends_no_other(catalog, store):
    with Catalog.open(store, "a") as other:
        with catalog.lease("before"):
            replace_catalog(store, lambda fresh, present: None)
            with other.lease("after"):
                pass
            lease = other.lease("after")
            lease.__enter__()
        assert [claim.purpose for claim in other.leases()] == ["after"]
        lease.__exit__(None, None, None)


def test_claims_outlast_the_catalog(catalog, store):
    number = catalog.reserve_number()
    with catalog.lease("ingest"):
        replace_catalog(store, lambda fresh, present: None)
        assert [lease.purpose for lease in catalog.leases()] == ["ingest"]
        assert [claim.number for claim in catalog.reservations()] == [number]
        assert catalog.reserve_number() == number + 1
    assert catalog.leases() == []


def test_a_commit_that_recover_was_ahead_of_is_no_conflict(filled, store):
    row = filled.version(2)
    filled.set_tag("best", 2)
    before = filled.versions(), filled.packs(), filled.objects()
    for replaces in (False, True):
        filled.commit_version(row, [], [], replace=replaces, requires=[5])
    assert (filled.version(2), filled.tags()) == (row, {"best": 2})
    assert (filled.versions(), filled.packs(), filled.objects()) == before
    with pytest.raises(ConflictError, match="ingest it again"):
        filled.commit_version(dataclasses.replace(row, uid="0" * 40), [], [])


def test_a_pack_that_only_blobs_of_a_version_need_is_not_free(filled, store):
    pack = filled.version(1).pack
    write_version(filled, store, "gpt", 300, references=[pack])
    with pytest.raises(ConflictError, match="ingest it again"):
        write_version(filled, store, "gpt", 400, references=["0" * 40 + ".zip"])
    filled.forget_versions([1])
    filled.remove_objects([item for item, _ in filled.objects_in(pack)])
    assert filled.unreferenced_packs() == []
    filled.forget_versions([filled.at_step("gpt", 300).number])
    assert [row.name for row in filled.unreferenced_packs()] == [pack]


def test_writers_are_kept_out_while_the_catalog_is_replaced(filled, store, monkeypatch):
    def build(fresh: Path, present: Catalog | None) -> None:
        assert present is not None
        assert len(present.versions()) == 3
        with Catalog.open(store, "a", timeout=0.05) as other, pytest.raises(LockedError):
            other.set_tag("best", 1)

    replace_catalog(store, build)
    assert filled.versions() == []
    monkeypatch.setattr(Catalog.__init__, "__defaults__", ("r", 0.05))
    with filled.transaction(), pytest.raises(LockedError, match="try again"):
        replace_catalog(store, build)


def test_an_interrupt_of_a_wait_for_the_place_leaves_no_lock(store, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    held = []

    def interrupted(descriptor, how):
        held.append(descriptor)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connection.PlaceLock(store).__enter__()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held[0])


def test_transactions_are_all_or_nothing(filled):
    def change() -> None:
        with filled.transaction():
            filled.set_tag("best", 1)
            filled.remove_objects([key(identifier("object 1 0"))])
            filled.forget_versions([3])
            raise ZeroDivisionError

    before = (filled.packs(), filled.objects(), filled.tags(), filled.versions())
    with pytest.raises(ZeroDivisionError):
        change()
    assert (filled.packs(), filled.objects(), filled.tags(), filled.versions()) == before
    filled.set_tag("best", 1)


@pytest.mark.parametrize("is_committed", [False, True])
def test_records_of_a_transaction_that_sqlite_ended_itself(filled, store, is_committed):
    """On a full disk SQLite rolls back; an interrupt may come right after the commit."""

    def log():
        records, problems = change_log.read_all(DirectoryStorage(store))
        assert problems == []
        return [(record["change"], record.get("part", 0)) for record in records]

    def forget():
        with filled.transaction():
            filled.note({"change": "forget", "versions": [3], "uids": []})
            if is_committed:
                filled.forget_versions([3])
            else:
                filled._connection.execute("INSERT INTO tags (name, version) VALUES (?, 1)", ["long" * 50_000])

    def interrupted(name):
        if name == "after-commit":
            raise KeyboardInterrupt

    database = filled._connection._database
    [[pages]] = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.MonkeyPatch.context() as patch:
        if is_committed:
            patch.setattr(durable, "checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt if is_committed else DiskFullError):
            forget()
    database.execute("PRAGMA max_page_count = 1000000")
    assert [row.number for row in filled.versions()] == ([1, 2] if is_committed else [1, 2, 3])
    assert log() == [("forget", 0)] * is_committed
    with filled.transaction():
        filled.note({"change": "untag", "tag": "a"})
    assert log() == [("forget", 0)] * is_committed + [("untag", 0)]


def test_a_catalog_for_reading_refuses_to_write(filled, store):
    with Catalog.open(store) as reader, pytest.raises(UsageError, match="open for reading"):
        reader.set_tag("best", 1)


def test_threads_take_turns(catalog, store):
    failures: list[BaseException] = []

    def write(run: str) -> None:
        try:
            for step in range(5):
                write_version(catalog, store, run, step)
                catalog.versions()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[f"run {number}"]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(version.number for version in catalog.versions()) == list(range(1, 21))


def test_a_locked_catalog_is_an_error_of_its_own(filled, store):
    with filled.transaction():
        # Others still read.
        with Catalog.open(store, timeout=0.05) as reader:
            assert len(reader.versions()) == 3
        with Catalog.open(store, "a", timeout=0.05) as writer, pytest.raises(LockedError):
            writer.set_tag("best", 1)
    holder = sqlite3.connect(store / root.CATALOG, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        for mode in ("r", "a"):
            with pytest.raises(LockedError):
                Catalog.open(store, mode, timeout=0.05)
    finally:
        holder.close()


def test_stores_that_are_none(tmp_path, store):
    with pytest.raises(NoStoreError):
        Catalog.open(tmp_path / "nothing")
    with pytest.raises(NoStoreError):
        Catalog.open(tmp_path)
    with pytest.raises(ConflictError):
        Catalog.create(store)
    (store / root.CATALOG).unlink()
    with pytest.raises(NoStoreError, match="ckstore recover"):
        Catalog.open(store)


def test_a_later_format_is_refused(filled, store):
    filled._connection.execute(f"PRAGMA user_version = {connection.FORMAT + 1}")
    filled.close()
    for mode in ("r", "a"):
        with pytest.raises(FormatVersionError):
            Catalog.open(store, mode)


def test_a_refused_process_leaves_the_claims_of_a_later_format(filled, store):
    filled._connection.execute("ALTER TABLE claims.leases ADD COLUMN kind TEXT")
    filled._connection.execute(f"PRAGMA user_version = {connection.FORMAT + 1}")
    filled.close()
    before = (store / root.CLAIMS).read_bytes()
    with pytest.raises(FormatVersionError):
        Catalog.open(store, "a")
    assert (store / root.CLAIMS).read_bytes() == before


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_open_catalog_that_another_process_upgrades(filled, store, is_replaced):
    with Catalog.open(store) as reader, Catalog.open(store, "a") as writer:
        path = store / root.CATALOG
        if is_replaced:
            path = store / "later.sqlite"
            shutil.copyfile(store / root.CATALOG, path)
        with closing(sqlite3.connect(path)) as database:
            database.execute(f"PRAGMA user_version = {connection.FORMAT + 1}")
        if is_replaced:
            os.replace(path, store / root.CATALOG)
            for look in 2 * [reader.tags, writer.tags]:
                with pytest.raises(FormatVersionError, match="install a later ckstore"):
                    look()
        for _ in range(2):
            with pytest.raises(FormatVersionError, match="install a later ckstore"):
                writer.set_tag("late", 1)
        with closing(sqlite3.connect(store / root.CATALOG)) as database:
            assert database.execute("SELECT COUNT(*) FROM tags WHERE name = 'late'").fetchone() == (0,)


@pytest.mark.parametrize(
    ("statement", "is_read"),
    [
        ("CREATE TABLE more (key INTEGER PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID", True),
        ("CREATE INDEX more ON versions (pack, step)", True),
        ("CREATE UNIQUE INDEX more ON versions (pack, step)", False),
        ("CREATE TABLE more (number INTEGER references versions)", False),
        ("CREATE TABLE more (key INT CHECK (zeroblob(1 << 30) IS NOT NULL))", False),
        ("CREATE INDEX more ON versions (zeroblob(step))", False),
        ("CREATE VIEW more AS SELECT 1", False),
        ("CREATE TRIGGER more AFTER INSERT ON tags BEGIN DELETE FROM versions; END", False),
    ],
)
def test_readers_read_a_later_format_of_writers(filled, store, statement, is_read):
    """Its tables may be there; writers are refused at once, and one that was open in its next transaction."""
    with filled.transaction():
        filled._write(connection.WRITERS, str(connection.FORMAT + 1))
        filled._connection.execute("ALTER TABLE claims.leases ADD COLUMN kind TEXT")
        filled._connection.execute(statement)
    said = r"has format 2, this ckstore only reads it and writes up to 1; install a later ckstore"
    before = (store / root.CLAIMS).read_bytes()
    for change in (lambda: filled.set_tag("late", 1), lambda: Catalog.open(store, "a"), filled.reserve_number):
        with pytest.raises(FormatVersionError, match=said):
            change()
    assert (store / root.CLAIMS).read_bytes() == before
    if not is_read:
        with pytest.raises(IntegrityError, match="unexpected 'more'"):
            Catalog.open(store)
        return
    with Catalog.open(store) as reader:
        assert len(reader.versions()) == 3
        assert reader.moved_packs(None) == {}
        assert reader.check() == []


def test_other_tables_of_the_present_format_are_refused(filled, store):
    filled._connection.execute("CREATE TABLE more (key INT)")
    with pytest.raises(IntegrityError, match="unexpected 'more'"):
        Catalog.open(store)


@pytest.mark.parametrize("mode", ["r", "a"])
def test_an_earlier_format_is_upgraded(filled, store, monkeypatch, mode):
    from ckstore.storage import catalog_tables, migrations

    filled.close()

    def add_table(database):
        database.execute("CREATE TABLE example (id INTEGER PRIMARY KEY)")

    monkeypatch.setattr(migrations, "MIGRATIONS", [*migrations.MIGRATIONS, add_table])
    monkeypatch.setitem(catalog_tables.STATEMENTS, "example", "CREATE TABLE example (id INTEGER PRIMARY KEY)")
    later = connection.FORMAT + 1
    monkeypatch.setattr(connection, "FORMAT", later)
    before = (store / root.CATALOG).stat().st_ino
    with Catalog.open(store, mode) as catalog:  # Open processes of the former format notice another file.
        assert len(catalog.versions()) == 3
        assert (store / root.CATALOG).stat().st_ino != before
    before = (store / root.CATALOG).stat().st_ino
    for _ in range(2):
        with Catalog.open(store, mode) as catalog:
            assert (store / root.CATALOG).stat().st_ino == before
            assert len(catalog.versions()) == 3
            assert catalog._connection.rows("SELECT COUNT(*) FROM example") == [(0,)]
            assert catalog._connection.rows("PRAGMA user_version") == [(later,)]


def test_files_that_are_no_catalog(filled, store):
    filled.close()
    path = store / root.CATALOG
    data = path.read_bytes()
    for content in (b"", b"x" * 10_000, data[:3000], data[:100] + bytes(len(data) - 100)):
        path.write_bytes(content)
        for mode in ("r", "a"):
            with pytest.raises(IntegrityError, match="ckstore recover"):
                Catalog.open(store, mode).versions()


def test_a_journal_is_rolled_back_by_a_reader(filled, store, tmp_path):
    """A writer was killed after it had changed the file itself; the next command only reads."""
    filled.close()
    before = (store / root.CATALOG).read_bytes()
    command = [sys.executable, "-m", "tests.storage.version_writer", str(store)]
    assert subprocess.run(command, cwd=REPOSITORY).returncode == -9
    journal = store / (root.CATALOG + "-journal")
    assert journal.stat().st_size > 0
    assert (store / root.CATALOG).read_bytes() != before
    with Catalog.open(store) as catalog:
        assert len(catalog.versions()) == 3
        assert catalog.objects() == 9
    assert not journal.exists()


def test_a_read_only_directory(filled, store, read_only):
    filled.close()
    with read_only(store):
        with Catalog.open(store) as catalog:
            assert len(catalog.versions()) == 3
        with (
            pytest.raises(AccessError, match=r"mounted read-only|cannot be written"),
            Catalog.open(store, "a") as catalog,
        ):
            catalog.set_tag("best", 1)


def test_a_journal_in_a_read_only_directory_is_not_ignored(filled, store, read_only):
    filled.close()
    command = [sys.executable, "-m", "tests.storage.version_writer", str(store)]
    assert subprocess.run(command, cwd=REPOSITORY).returncode == -9
    with read_only(store), pytest.raises(CkstoreError, match="open the store once where it can be written"):
        Catalog.open(store)


def test_a_file_system_without_locks_is_read_as_immutable(filled, store, monkeypatch):
    filled.close()
    connect = sqlite3.connect

    def refuse(target, **options):
        if "immutable" not in target:
            connect("file:/nowhere/at-all?mode=ro", uri=True)
        return connect(target, **options)

    monkeypatch.setattr(sqlite3, "connect", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with Catalog.open(store) as catalog:
        assert len(catalog.versions()) == 3


def test_replacing_the_catalog(filled, store):
    rows, packs = filled.versions(), filled.packs()

    def build(fresh: Path, present: Catalog | None) -> None:
        with Catalog(fresh, "a") as built:
            for row in rows[:2]:
                pack = PackInfo(row.pack, row.stored_bytes)
                built.commit_version(row, [pack], [(row.number, row.pack, 0)])

    replace_catalog(store, build)
    # A connection that was open before sees the present file as soon as it writes.
    filled.set_tag("kept", 1)
    with Catalog.open(store, "a") as catalog:
        assert catalog.versions() == rows[:2]
        assert catalog.tags() == {"kept": 1}
        assert [pack.name for pack in catalog.packs()] == [pack.name for pack in packs[:2]]
        assert catalog.reserve_number() == 3
    assert sorted(os.listdir(store)) == [root.IGNORE, root.CATALOG, root.CLAIMS, root.LOG, root.PACKS]


def test_a_failed_replacement_changes_nothing(filled, store):
    def fail(fresh: Path, present: Catalog | None) -> None:
        with Catalog(fresh, "a") as built:
            built.add_packs([PackInfo("0" * 40 + ".zip", 5)])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace_catalog(store, fail)
    assert len(filled.versions()) == 3
    assert sorted(os.listdir(store)) == [root.IGNORE, root.CATALOG, root.CLAIMS, root.LOG, root.PACKS]


@pytest.mark.parametrize("content", [None, b"", b"x" * 5000])
def test_replacing_a_damaged_catalog(filled, store, content):
    filled.close()
    path = store / root.CATALOG
    path.unlink() if content is None else path.write_bytes(content)
    (store / (root.CATALOG + "-journal")).write_bytes(b"left over")
    replace_catalog(store, lambda fresh, present: None)
    with Catalog.open(store) as catalog:
        assert catalog.versions() == []


def test_rows_are_small(catalog, store, monkeypatch):
    """1,000 versions of 1,000 tensors each must stay below 50 MB: extrapolated from 40."""
    # The small tables do not grow with the store.
    monkeypatch.setattr(placements, "_LARGEST_RECENT", 2000)
    names = [identifier(str(number)) + ".zip" for number in range(40)]
    for number, name in enumerate(names, 1):
        row = VersionRow(
            *(number, identifier(name), "gpt", number, number - 1 or None, "2026-01-01T00:00:00.000000Z", name),
            *(10_000, 50_000, 10**9, 10**7, 10**8, 1000, 3, 2, 1.5, False, "exact", False, False, ()),
            {"loss": 2.345678, "accuracy": 0.123456, "epoch": number},
            f"/somewhere/checkpoints/step_{number}.pt",
        )
        entries = [(key(identifier(f"{number} {slot}")), name, slot) for slot in range(2000)]
        catalog.commit_version(row, [PackInfo(name, 10**7)], entries)
    assert (store / root.CATALOG).stat().st_size * 25 < 50e6
    assert len(catalog.find_objects([key(identifier(f"7 {slot}")) for slot in range(2500)])) == 2000


def test_reading_needs_only_the_standard_library(filled, store):
    """A verb that only lists answers at once: numpy, numcodecs and sqlite-utils stay out."""
    code = (
        "import sys, json; from pathlib import Path; from ckstore.storage.catalog import Catalog\n"
        "with Catalog.open(Path(sys.argv[1])) as catalog: catalog.resolve('gpt@100'); catalog.objects()\n"
        "with Catalog.open(Path(sys.argv[1]), 'a') as catalog: catalog.set_tag('best', 1)\n"
        "print(json.dumps([name for name in sys.modules if '.' not in name]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True, check=True, cwd=REPOSITORY)
    assert not {"numpy", "numcodecs", "sqlite_utils", "zarr"} & set(json.loads(done.stdout))


def test_a_pack_in_the_place_of_another(filled):
    first, second = filled.version(1), filled.version(2)
    write_version(filled, filled._path.parent, "gpt", 300, references=[first.pack])
    names = [f"{digit * 40}.zip" for digit in "ab"]
    for former, name in zip([first.pack, names[0]], names, strict=True):
        keys = filled.objects_in(former)
        with filled.transaction():
            filled.replace_pack(former, PackInfo(name, 7), PackEntry(3, 4))
            filled.move_objects((number, name, slot + 1) for number, slot in keys)
            filled.remove_packs([former])
    moved = filled.version(1)
    assert (moved.pack, moved.manifest_offset, moved.manifest_length) == (names[1], 3, 4)
    assert filled.version(2) == second
    assert filled.moved_packs([first.pack, names[0], names[1], second.pack]) == dict.fromkeys(
        [first.pack, names[0]], names[1]
    )
    assert filled.placed_objects()[names[1]].keys() == {2, 3, 4}
    assert first.pack not in filled.placed_objects()
    # Version 4 refers to it, whichever version takes its place.
    filled.forget_versions([1])
    filled.remove_objects(number for number, _ in filled.objects_in(names[1]))
    with pytest.raises(ConflictError, match="still referred to"):
        filled.remove_packs([names[1]])
    filled.forget_versions([4])
    filled.remove_packs([names[1]])
    assert filled.moved_packs([first.pack, names[0]]) == {}


def test_gc_leaves_a_mark(filled):
    assert filled.collected() == ""
    filled.note_collected("2026-07-01T12:00:00.000000Z")
    assert filled.collected() == "2026-07-01T12:00:00.000000Z"
    filled.forget_versions([3])
    assert [(run.name, run.versions) for run in filled.runs()] == [("gpt", 2), ("vision", 0)]
    filled.remove_empty_runs()
    assert [run.name for run in filled.runs()] == ["gpt"]


@pytest.mark.parametrize("writes", [True, False], ids=["writer", "reader"])
def test_an_old_connection_leaves_the_journal_of_a_new_catalog(store, writes):
    """SQLite takes the journal next to a file for that file's, and removes one that no running writer holds."""
    with Catalog(store, "a", timeout=0.1) as before:
        replace_catalog(store, lambda catalog, present: None)
        with Catalog(store, "a") as after:
            journal = store / f"{root.CATALOG}-journal"
            after._connection.rows("PRAGMA cache_size = 1")
            with after.transaction():
                # The journal of a large change is on disk, in force, before the commit.
                for number in range(300):
                    after.set_policy(f"run{number}", "x" * 500)
                assert journal.read_bytes()[:1] != b"\0"
                with pytest.raises(LockedError):
                    before.set_policy("other", "{}") if writes else before.policies()
                assert journal.exists()
            assert len(after.policies()) == 300
        assert len(before.policies()) == 300


def test_a_writer_does_not_wait_for_a_replaced_file(store, monkeypatch):
    """A writer that waits while `recover` is at work looks again which file is the catalog."""
    with Catalog(store, "a") as before:
        found = []

        def write() -> None:
            with before.transaction():
                before.set_policy("run", "{}")
                found.append(before._connection._inode)

        thread = threading.Thread(target=write)

        def build(fresh: Path, present: Catalog | None) -> None:
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()

        replace_catalog(store, build)
        thread.join(30)
        assert found == [os.stat(store / root.CATALOG).st_ino]
    with Catalog(store) as after:
        assert after.policies() == {"run": "{}"}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="nothing tells of a process that has ended")
def test_a_process_that_ended_and_was_not_waited_for_holds_nothing(catalog):
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not durable.is_running(child.pid)
    assert durable.is_running(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert durable.is_running(child.pid)
        assert child.stdin is not None
        child.stdin.close()


def test_a_writer_that_has_waited_for_long_is_not_overtaken(
    store: Path, filled: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the lock as often as one that has just come."""
    pauses: list[float] = []
    waited = time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        waited(seconds)

    monkeypatch.setattr(connection, "_FAIR", 0.5)
    with filled.transaction(), Catalog.open(store, "a", timeout=1.0) as other:
        monkeypatch.setattr(connection.time, "sleep", pause)
        with pytest.raises(LockedError):
            other.set_tag("best", 1)
    assert max(pauses) > 0.05
    assert pauses[-1] == pauses[0] < 0.01


def test_a_catalog_that_is_left_open_closes_its_connection(store):
    left = Catalog(store)
    database = left._connection._database
    del left
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        database.execute("SELECT 1")
