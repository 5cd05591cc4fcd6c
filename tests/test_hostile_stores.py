"""Stores from others: every verb ends in time, in bounds, and in a sentence, whatever they contain."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError, IntegrityError, UsageError
from ckstore.objects import units
from ckstore.recovery.recover import recover
from tests.checkpoints import scratch, sha256
from tests.crafted import CraftedStore, everything, limits, sealed, with_manifest

pytestmark = pytest.mark.local


@pytest.fixture(scope="module")
def small() -> Iterator[Path]:
    """Three versions: two exact ones of a run, and a coarse one."""
    with scratch() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "SMALL", 128)
        torch.manual_seed(1)
        weight, slow = torch.randn(12, 20), torch.randn(150)
        with ckstore.init(directory / "store") as store:
            for step in range(3):
                torch.save(
                    {"model": {"w": weight, "slow": slow, "b": slow[:9].bfloat16()}, "step": step}, directory / "x"
                )
                store.ingest(directory / "x", run="a", metrics={"loss": 0.5}, policy="coarse" if step == 2 else None)
                weight, slow = weight + 0.001 * torch.randn(12, 20), slow + 1e-7 * torch.randn(150)
            store.tag(1, "first")
            store[1].checkout(directory / "1")
        for _, ask in everything(directory / "store", directory / "out"):
            ask()  # Compile and import first.
        yield directory


@pytest.fixture
def crafted(small: Path) -> Iterator[CraftedStore]:
    with scratch() as directory:
        shutil.copytree(small / "store", directory / "store")
        yield CraftedStore(directory / "store")


def said(crafted: CraftedStore) -> dict[str, str]:
    """Return the output of each verb; empty where it has nothing to complain of."""
    found = {}
    for name, ask in everything(crafted.path, crafted.path.parent / "out"):
        try:
            with limits():
                answer = ask()
            found[name] = " ".join(getattr(answer, "problems", ()))
        except CkstoreError as error:
            found[name] = str(error)
    return found


def layout(change: Callable[[dict[str, Any]], Any]) -> Callable[[CraftedStore], Any]:
    return lambda crafted: crafted.change_layout(first(crafted), change)


def document(change: Callable[[dict[str, Any]], Any]) -> Callable[[CraftedStore], Any]:
    return lambda crafted: crafted.change(first(crafted), change)


def sql(*statements: str) -> Callable[[CraftedStore], Any]:
    return lambda crafted: crafted.sql(*statements)


def first(crafted: CraftedStore) -> str:
    """Return the coarse pack of version 1."""
    return str(crafted.sql("SELECT name FROM packs WHERE id = (SELECT pack FROM versions WHERE number = 1)")[0][0])


def unit(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    names = ("key", "signature", "dtype", "shape", "role", "members")

    def change(said: dict[str, Any]) -> None:
        for name, value in changes.items():
            said["units"][0][names.index(name)] = value

    return change


def extent(place: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: said["files"][0]["extents"][0].__setitem__(place, value)


def tensor(place: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: said["files"][0]["tensors"][0].__setitem__(place, value)


def checksum(place: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda said: said["files"][0]["checked"][0].__setitem__(place, value)


def metrics(text: str) -> Callable[[CraftedStore], Any]:
    return lambda crafted: crafted.sql("UPDATE versions SET metrics = ?", parameters=(text,))


def everywhere(shape: list[int]) -> Callable[[dict[str, Any]], Any]:
    """Make extent, tensor, unit and file claim the same size."""

    def change(said: dict[str, Any]) -> None:
        count = 1
        for side in shape:
            count *= side
        said["files"][0]["extents"][0][2] = shape
        said["units"][0][3] = shape
        said["units"][0][5] = [[0, 0, 0, count]]
        said["files"][0]["size"] += 4 * count

    return change


def blob(name: str, data: bytes | Callable[[], bytes]) -> Callable[[CraftedStore], Any]:
    """Replace a blob; slow ones are made on request, not at collection."""

    def craft(crafted: CraftedStore) -> None:
        said, blobs = crafted.read(first(crafted))
        crafted.write(first(crafted), said, blobs | {name: data() if callable(data) else data})

    return craft


def bomb(size: int, claimed: int | None = None, stated: bool = True) -> bytes:
    """Return a blob of zeros that inflates to a size, and whose frame states or claims one."""
    import zstandard
    from blake3 import blake3

    zeros = bytes(size)
    frame = zstandard.ZstdCompressor(write_content_size=stated).compress(zeros)
    if claimed is not None:
        # One segment, eight bytes of its length.
        head = zstandard.MAGIC_NUMBER.to_bytes(4, "little") + b"\xe0" + claimed.to_bytes(8, "little")
        frame = head + frame[zstandard.frame_header_size(frame) :]
    packed = b"\1" + frame
    return blake3(packed).update(zeros).digest(length=8) + packed


def manifest_text(text: bytes, length: int | None = None) -> Callable[[CraftedStore], Any]:
    def craft(crafted: CraftedStore) -> None:
        pack = first(crafted)
        data = (crafted.path / "packs" / pack).read_bytes()
        crafted.write_bytes(pack, with_manifest(data, sealed(text, b"", length)))

    return craft


def no_file(make: Callable[[Path], Any], *, log: bool = False) -> Callable[[CraftedStore], Any]:
    """Replace a pack or log record by a FIFO, a device or a directory."""

    def craft(crafted: CraftedStore) -> None:
        path = next((crafted.path / "log").iterdir()) if log else crafted.path / "packs" / first(crafted)
        path.unlink()
        make(path)

    return craft


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


def tangled(table: str) -> Callable[[CraftedStore], Any]:
    """Make a table whose pages name the same page hundreds of times, on several levels, with countless rows."""

    def craft(crafted: CraftedStore) -> None:
        [[root]] = crafted.sql(f"SELECT rootpage FROM sqlite_master WHERE name = '{table}'")
        file = crafted.path / "catalog.sqlite"
        data = file.read_bytes()
        pages = [data[place : place + 512] for place in range(0, len(data), 512)]
        pages.append(pages[root - 1])
        for _ in range(5):
            child = len(pages).to_bytes(4, "big")
            pages.append(
                (b"\5\0\0" + (160).to_bytes(2, "big") + (504).to_bytes(2, "big") + b"\0" + child
                 + (504).to_bytes(2, "big") * 160).ljust(504, b"\0") + child + b"\1\0\0\0"
            )  # fmt: skip
        pages[root - 1] = pages.pop()
        pages[0] = pages[0][:28] + len(pages).to_bytes(4, "big") + pages[0][32:]
        file.write_bytes(b"".join(pages))

    return craft


DEEP = 100_000
NAME = "'" + "0" * 40 + ".zip'"

#: Each with the verbs that have to complain, at least.
CASES: dict[str, tuple[Callable[[CraftedStore], Any], str]] = {
    # Point 5: time and memory.
    "a unit with negative sides": (layout(unit(shape=[-12, -20])), "checkout verify"),
    "a unit with a side of -1": (layout(unit(shape=[-1, 240])), "checkout verify"),
    "a unit without elements": (layout(unit(shape=[0, 20])), "checkout verify"),
    "a unit of a million axes": (layout(unit(shape=[1] * 1_000_000)), "checkout verify"),
    "a unit of 2^3000 elements": (layout(unit(shape=[1 << 47] * 64)), "checkout verify"),
    "an extent of 2^60 elements": (layout(extent(2, [1 << 60])), "checkout state_dict tensors verify"),
    "an extent of 2^47 elements": (layout(everywhere([1 << 47])), "checkout state_dict tensors verify"),
    "an extent with a negative side": (layout(extent(2, [-12, 20])), "checkout verify"),
    "an extent before the file": (layout(extent(0, -8)), "checkout verify"),
    "an extent of no dtype": (layout(extent(1, "float31")), "checkout verify"),
    "a tensor of 2^60 elements": (layout(tensor(2, [1 << 60])), "tensors verify"),
    "a tensor beyond its extent": (layout(tensor(5, 100)), "tensors verify"),
    "a tensor with negative strides": (layout(tensor(3, [-20, -1])), "tensors verify"),
    "a tensor of another extent": (layout(tensor(4, 99)), "tensors verify"),
    "a tensor of a path that is none": (layout(tensor(0, "a%")), "tensors verify"),
    "a member of another file": (layout(unit(members=[[7, 0, 0, 240]])), "checkout verify"),
    "a member behind its tensor": (layout(unit(members=[[0, 0, 1, 240]])), "checkout tensors verify"),
    "a member before its tensor": (layout(unit(members=[[0, 0, -1, 240]])), "checkout tensors verify"),
    "overlapping members": (layout(unit(members=[[0, 0, 0, 120], [0, 0, 60, 120]])), "checkout verify"),
    "a checksum before the file": (layout(checksum(3, [-4])), "checkout"),
    "a checksum behind the file": (
        layout(checksum(3, [1 << 40])), "checkout verify",
    ),
    "a checksum over 2^60 bytes": (layout(checksum(2, 1 << 60)), "checkout"),
    "a blob that claims gigabytes": (blob("skeleton.0", lambda: bomb(1000, 1 << 31)), "checkout verify"),
    "a blob that claims exabytes": (blob("skeleton.0", lambda: bomb(1000, 1 << 62)), "checkout verify"),
    "a blob that inflates to a gigabyte": (blob("skeleton.0", lambda: bomb(1 << 30)), "checkout verify"),
    "a layout that inflates to a gigabyte": (blob("layout", lambda: bomb(1 << 30)), "checkout verify"),
    "a layout of a length that is not stated": (blob("layout", lambda: bomb(1 << 29, stated=False)), "checkout verify"),
    "checksums that inflate": (blob("crcs", lambda: bomb(1 << 28)), "checkout verify"),
    "a manifest that claims a gigabyte": (manifest_text(b"{}", 1 << 30), "checkout verify recover"),
    "a manifest of zeros": (
        lambda crafted: manifest_text(b"[" + b"0," * (1 << 27) + b"0]")(crafted), "checkout verify recover",
    ),
    "a log record of the last number": (
        lambda crafted: crafted.log({"change": "untag", "tag": "a"}, 999_999_999_999), "recover",
    ),
    "a FIFO as a pack": (no_file(os.mkfifo), "checkout verify"),
    "a device as a pack": (no_file(lambda path: path.symlink_to("/dev/zero")), "checkout verify"),
    "a directory as a pack": (no_file(Path.mkdir), "checkout verify"),
    "a pack with a hole": (no_file(sparse), "checkout"),
    "a FIFO as a log record": (no_file(os.mkfifo, log=True), "verify recover"),
    "a device as a log record": (no_file(lambda path: path.symlink_to("/dev/zero"), log=True), "verify recover"),
    "a directory as a log record": (no_file(Path.mkdir, log=True), "verify recover"),
    "a log record with a hole": (no_file(sparse, log=True), "verify recover"),
    "a view in place of a table": (
        sql("ALTER TABLE packs RENAME TO other", "CREATE VIEW packs AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL"
            " SELECT i + 1 FROM n) SELECT i AS id, '' AS name, '' AS kind, i AS bytes, '' AS created FROM n"), "log",
    ),
    "a view over tags": (
        sql("DROP TABLE tags", "CREATE VIEW tags AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT i AS name, 1 AS version FROM n"), "log",
    ),
    "a column that is computed": (
        sql("DROP TABLE runs", "CREATE TABLE runs (id INTEGER PRIMARY KEY, name TEXT, created TEXT"
            " GENERATED ALWAYS AS (hex(zeroblob(100000000))))"), "log",
    ),
    "packs in a tangle of pages": (tangled("packs"), "gc"),
    "versions in a tangle of pages": (tangled("versions"), "log"),
    "objects in a tangle of pages": (tangled("recent_objects"), "stats verify"),
    "a trigger": (
        sql("CREATE TRIGGER t AFTER INSERT ON tags BEGIN DELETE FROM versions; END"), "log",
    ),
    "an index over a function": (sql("CREATE INDEX i ON packs (hex(name))"), "log"),
    **{
        f"a lease that expires {name}": (
            sql(f"INSERT INTO leases VALUES (1, 'x', 1, 'elsewhere', '2026-07-01T12:00:00.000000Z', {value})"), "gc",
        )
        for name, value in {"in a word": "'soon'", "in a number": "7", "in bytes": "x'ff'"}.items()
    },
    "a lease of no process": (
        sql("INSERT INTO leases VALUES (1, 'x', -1, 'elsewhere', '2026-07-01T12:00:00.000000Z',"
            " '9026-07-01T12:00:00.000000Z')"), "gc",
    ),
    # Point 6: invalid values.
    "a version that is its own parent": (sql("UPDATE versions SET parent = 2 WHERE number = 2"), "log"),
    "a manifest whose version is its own parent": (
        document(lambda said: said["version"].__setitem__("parent", 1)), "checkout verify recover",
    ),
    "metrics that are nested deeply": (
        metrics('{"a":' + "[" * DEEP + "]" * DEEP + "}"), "log",
    ),
    "metrics that are nested a little": (
        metrics('{"a":' + "[" * 900 + "]" * 900 + "}"), "log",
    ),
    "a manifest that is nested deeply": (
        manifest_text(b'{"document":{"a":' + b"[" * DEEP + b"]" * DEEP + b'},"blobs":[]}'), "checkout verify recover",
    ),
    "a log record that is nested deeply": (
        lambda crafted: crafted.log({}, 2, b'{"change":"metrics","metrics":' + b"[" * DEEP + b"]" * DEEP + b"}"),
        "verify recover",
    ),
    "a layout that is nested deeply": (
        lambda crafted: blob("layout", packed(b"[" * DEEP))(crafted), "checkout verify",
    ),
    "a policy of another type": (
        sql("INSERT INTO policies (run, policy) VALUES ('a', '{\"quality\":\"3\"}')"), "policy",
    ),
    "a policy that is nested deeply": (
        lambda crafted: crafted.sql(
            "INSERT INTO policies (run, policy) VALUES ('a', ?)", parameters=("[" * DEEP,)
        ), "policy",
    ),
    "a run that is named like a version": (sql("UPDATE runs SET name = '2'"), "log"),
    "a tag that is named like a version": (sql("INSERT INTO tags (name, version) VALUES ('2', 1)"), "log"),
    "a tag that is named like the best version": (
        sql("INSERT INTO tags (name, version) VALUES ('best:loss', 1)"), "log",
    ),
    "a policy of a run that is named like a range": (
        sql("INSERT INTO policies (run, policy) VALUES ('a..b', '{\"fidelity\":\"exact\"}')"), "policy",
    ),
    "a manifest of a run that is named like an id": (
        document(lambda said: said["version"].__setitem__("run", "0c7a")), "checkout verify recover",
    ),
    "a log record of a tag that is named like a version": (
        lambda crafted: crafted.log({"change": "tag", "tag": "2", "version": 1}, 2), "verify recover",
    ),
    "a log record of no change": (lambda crafted: crafted.log({"change": "party"}, 2), "verify recover"),
    "a collection in a circle": (
        lambda crafted: crafted.log(
            {"change": "gc", "written": [], "removed": [],
             "versions": [[digit * 40, int(digit), 3 - int(digit), "2030-07-01T12:00:00.000000Z"] for digit in "12"]},
            2,
        ),
        "",
    ),
    "names of packs that are paths": (
        sql("UPDATE packs SET name = '../../' || name WHERE id = (SELECT pack FROM versions WHERE number = 1)"), "log",
    ),
}  # fmt: skip


def packed(data: bytes) -> bytes:
    from ckstore.objects.blobs import compress_against

    return compress_against(data, None)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_store_in_bounds(crafted: CraftedStore, case: str) -> None:
    craft, verbs = CASES[case]
    craft(crafted)
    found = said(crafted)
    for verb in verbs.split():
        assert found[verb], f"{verb} has nothing to say"


def test_one_bad_manifest_does_not_keep_others_from_coming_back(crafted: CraftedStore, small: Path) -> None:
    second = str(crafted.sql("SELECT name FROM packs WHERE id = (SELECT pack FROM versions WHERE number = 3)")[0][0])
    crafted.change(second, lambda document: document["version"].__setitem__("files", 7))
    with limits():
        problems = recover(crafted.path).problems
    assert any("Expected `array`, got `int` - at `$.files`" in problem for problem in problems)
    with ckstore.open(crafted.path, "r") as store:
        assert [row.number for row in store._catalog.versions()] == [1, 2]
        store[1].checkout(crafted.path.parent / "out")
    assert sha256(crafted.path.parent / "out") == sha256(small / "1")


@pytest.mark.parametrize("slot", [0, 1])
def test_a_bad_record_takes_its_own_pack_alone(crafted: CraftedStore, slot: int) -> None:
    third = str(crafted.sql("SELECT name FROM packs WHERE id = (SELECT pack FROM versions WHERE number = 3)")[0][0])
    crafted.change(third, lambda document: document["records"][slot].__setitem__("id", None))
    with limits():
        assert any(f"got `null` - at `$.records[{slot}].id`" in problem for problem in recover(crafted.path).problems)
    with ckstore.open(crafted.path, "r") as store:
        assert [row.number for row in store._catalog.versions()] == [1, 2]


def test_gc_frees_a_version_with_a_bad_path_once_it_is_forgotten(crafted: CraftedStore) -> None:
    third = str(crafted.sql("SELECT name FROM packs WHERE id = (SELECT pack FROM versions WHERE number = 3)")[0][0])
    crafted.change(third, lambda document: document["version"]["files"][0].__setitem__(0, "../victim"))
    with ckstore.open(crafted.path) as store:
        with pytest.raises(IntegrityError):
            store.gc()
        store.forget([3])
        assert store.gc().bytes > 0
        assert store.verify().problems == []
    assert recover(crafted.path).problems == []


def test_metrics_have_a_depth(small: Path, crafted: CraftedStore) -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    with ckstore.open(crafted.path) as store:
        for metrics in ({"a": deep}, {"a": "\0"}, {"\udc80": 1}):
            with pytest.raises(UsageError, match="Metrics must"):
                store.ingest(small / "1", run="b", metrics=metrics)


def test_a_store_that_had_every_number(crafted: CraftedStore, small: Path) -> None:
    crafted.sql(f"UPDATE meta SET value = '{(1 << 48) - 1}' WHERE key = 'versions:last'")
    with ckstore.open(crafted.path) as store, pytest.raises(IntegrityError, match="counts"):
        store.ingest(small / "1", run="b")


@pytest.mark.long
def test_values_of_any_type_in_the_catalog(crafted: CraftedStore) -> None:
    """Every column of every table, of another type or out of range: the catalog is refused, or is built again.

    Each column takes half of the values, or all with `CKSTORE_FLIPS=1`.
    """
    columns = {
        table: [row[1] for row in crafted.sql(f"PRAGMA table_info({table})")]
        for table in ("runs", "packs", "versions", "origins", "tags", "meta", "recent_objects")
    }
    assert all(columns.values()), "there is no such table"
    whole = (crafted.path / "catalog.sqlite").read_bytes()
    values = ("x'00ff'", "-1", "1 << 62", "1.5", "'\x01'", "char(0)", "'x'", "9e999")
    every = 1 if os.environ.get("CKSTORE_FLIPS") else 2
    tried = refused = 0
    for table, names in columns.items():
        for index, column in enumerate(names):
            for value in values[index % every :: every]:
                (crafted.path / "catalog.sqlite").write_bytes(whole)
                try:
                    where = "" if table in ("tags", "meta") else " WHERE rowid = 1"
                    crafted.sql(f"UPDATE {table} SET {column} = {value}{where}")
                except sqlite3.Error:
                    continue  # SQLite itself refuses to write it.
                tried += 1
                for name, ask in everything(crafted.path, crafted.path.parent / "out"):
                    if name == "recover":
                        break
                    try:
                        with limits():
                            ask()
                    except CkstoreError:
                        refused += 1
    print(f"{tried} values of {sum(map(len, columns.values()))} columns, refused {refused} times")
    assert tried > 150
