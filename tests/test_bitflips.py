"""One flipped bit anywhere in a store is found by `verify`, and no read returns content that was never stored.

A seventh of the bytes of a version's packs; all of them with `CKSTORE_FLIPS=1`.
"""

from __future__ import annotations

import dataclasses
import io
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError
from ckstore.objects import units
from ckstore.policy import Policy
from ckstore.recovery.recover import recover
from ckstore.storage import change_log
from ckstore.storage.directory_storage import DirectoryStorage
from ckstore.storage.zip_stream import digest_file
from tests.catalog_edits import edit
from tests.checkpoints import scratch, sha256

pytestmark = pytest.mark.local

STRIDE = 1 if os.environ.get("CKSTORE_FLIPS") else 7


@dataclasses.dataclass
class Whole:
    """A small store, and everything that can be read from it."""

    path: Path
    digests: dict[int, str]
    tensors: dict[tuple[int, str], bytes]
    rows: list[Any]
    tags: dict[str, int]


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    """Two versions whose packs hold every kind of layer: linear and ordinal, bases, deltas, patches, own, chained."""
    with scratch() as directory, pytest.MonkeyPatch.context() as patch:
        # Objects of some hundred elements take all the ways that large ones take, and every byte can be tried.
        patch.setattr(units, "SMALL", 128)
        generator = torch.Generator().manual_seed(1)
        weight, slow = torch.randn(12, 20, generator=generator), torch.randn(150, generator=generator)
        table, codes = torch.randn(40, 16, generator=generator), torch.arange(400)
        store = ckstore.init(directory / "store")
        digests = {}
        for step in range(2):
            path = directory / "file.pt"
            state = {"w": weight, "slow": slow, "exp_avg": weight * 0.1, "b": slow[:9].to(torch.bfloat16)}
            state |= {"table": table, "codes": codes}
            torch.save({"model": state, "step": 10 * step}, path)
            digests[store.ingest(path, run="a", metrics={"loss": 0.5}, config={"lr": 3e-4}).version.number] = sha256(
                path
            )
            weight = weight + 0.001 * torch.randn(12, 20, generator=generator)
            slow = slow + 1e-7 * torch.randn(150, generator=generator)
            table[7] += 0.5
            codes[[3, 70]] += 1 << 20
        store.tag(1, "first")
        store.tag(2, "best")
        store.set_policy(Policy("coarse", quality=2.0), "a")
        store.encode()
        # An old version goes, so that a collection is noted and packs are written again.
        torch.save({"model": {"w": weight}}, directory / "other.pt")
        store.forget([store.ingest(directory / "other.pt", run="c").version.number])
        store.gc(grace=0.0)
        records = list(map(store._repository.resolver.record, store[2]._stored.document.objects))
        assert {"float32", "int64"} <= {record.dtype for record in records if record.kind == "patches"}
        assert {"delta", "patches"} <= {record.kind for record in records}
        assert store.verify().problems == []
        versions = {number: store[number] for number in digests}
        tensors = {(number, path): raw(version[path]) for number, version in versions.items() for path in version}
        rows, tags = store._catalog.versions(), store._catalog.tags()
        store.close()
        yield Whole(directory / "store", digests, tensors, rows, tags)


def raw(tensor: Any) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def flipped(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << (position % 8))]))


def problems(path: Path, versions: list[int] | None = None) -> list[str]:
    """Return the problems that `verify` finds in the store and in these versions, or all."""
    try:
        with ckstore.open(path, "r") as store:
            return store.verify(versions).problems
    except CkstoreError as error:
        return [str(error)]


def check_reads(path: Path, whole: Whole) -> bool:
    """Check that every read gives the stored content or raises; return whether all gave it."""
    complete = True
    try:
        store = ckstore.open(path, "r")
    except CkstoreError:
        return False
    with store:
        opened = cache(store.__getitem__)
        for (number, name), expected in whole.tensors.items():
            try:
                assert raw(opened(number)[name]) == expected, f"{name} of version {number} has wrong values"
            except CkstoreError:
                complete = False
        for number, digest in whole.digests.items():
            out = path.parent / "out"
            try:
                store[number].checkout(out, force=True)
                assert sha256(out) == digest, f"version {number} came out otherwise"
            except CkstoreError:
                complete = False
                assert not out.exists(), "a checkout that fails leaves nothing behind"
            out.unlink(missing_ok=True)
    return complete


@pytest.fixture
def copy(whole: Whole) -> Iterator[Path]:
    with scratch() as directory:
        shutil.copytree(whole.path, directory / "store")
        yield directory / "store"


def names(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.long
def test_bytes_of_a_versions_packs(whole: Whole, copy: Path) -> None:
    """Bytes of the second version's pack, and fewer of the first's, which it is stored against."""
    with ckstore.open(copy, "r") as store:
        packs = [copy / "packs" / row.name for row in store._catalog.packs()]
    assert len(packs) == 2
    damaging = 0
    for pack in packs:
        size = pack.stat().st_size
        assert size < 20_000
        for position in range(0, size, STRIDE if pack in packs[1:] else 5 * STRIDE):
            flipped(pack, position)
            with ckstore.open(copy, "r") as store:
                found = store.verify(None if position % 31 == 0 else []).problems
            assert any(pack.name in problem for problem in found), f"byte {position} of {pack.name}: {found}"
            if position % 13 == 0:
                damaging += not check_reads(copy, whole)
            flipped(pack, position)
    assert damaging > 100 / STRIDE
    assert problems(copy) == []
    assert check_reads(copy, whole)


@pytest.mark.long
def test_every_byte_of_the_log(whole: Whole, copy: Path) -> None:
    for record in names(copy / "log"):
        for position in range(record.stat().st_size):
            flipped(record, position)
            _, found = change_log.read_all(DirectoryStorage(copy))
            if position % STRIDE == 0:
                found = problems(copy, None if position % 31 == 0 else [])
            assert any(record.name in problem for problem in found), f"byte {position} of {record.name}"
            flipped(record, position)
    assert problems(copy) == []


@pytest.mark.long
def test_bytes_of_the_catalog(whole: Whole, copy: Path) -> None:
    """A catalog has bytes that mean nothing; a flip that `verify` does not find must have changed nothing."""
    catalog = copy / "catalog.sqlite"
    found = 0
    for position in range(0, catalog.stat().st_size, 83 if STRIDE == 1 else 239):
        flipped(catalog, position)
        complete = check_reads(copy, whole)
        if problems(copy):
            found += 1
        else:
            assert complete, f"byte {position}"
            with ckstore.open(copy, "r") as store:
                assert [told(row) for row in store._catalog.versions()] == [told(row) for row in whole.rows]
                assert store._catalog.tags() == whole.tags
        flipped(catalog, position)
    assert found > 10
    assert problems(copy) == []


@pytest.mark.parametrize(
    ("statement", "is_refused"),
    [
        ("UPDATE versions SET pack = (SELECT pack FROM versions WHERE number = 2) WHERE number = 1", True),
        ("UPDATE versions SET number = 7 WHERE number = 2", True),
        ("UPDATE versions SET step = 11 WHERE number = 2", True),
        ("UPDATE versions SET created = '2020-01-01T00:00:00.000000Z' WHERE number = 2", True),
        ("UPDATE versions SET parent = NULL WHERE number = 2", True),
        ("UPDATE versions SET original_bytes = original_bytes + 1", True),
        ("UPDATE versions SET stored_bytes = stored_bytes - 1", True),
        ("UPDATE versions SET metrics = '{}'", True),
        ("UPDATE origins SET text = '{}'", True),
        ("DELETE FROM origins", True),
        ("UPDATE versions SET fidelity = 'coarse'", True),
        ("UPDATE runs SET name = 'other'", True),
        ("UPDATE versions SET cost = cost + 0.5 WHERE number = 2", True),
        ("UPDATE versions SET depth = depth + 1 WHERE number = 2", True),
        ("UPDATE versions SET base = 1 - base WHERE number = 2", True),
        ("UPDATE packs SET bytes = bytes + 1 WHERE id = (SELECT min(id) FROM packs)", False),
        ("UPDATE policies SET policy = replace(policy, '2.0', '3.0') WHERE run = 'a'", False),
        ("UPDATE policies SET run = 'b' WHERE run = 'a'", False),
        ("UPDATE meta SET key = 'collectee' WHERE key = 'collected'", False),
        ("UPDATE meta SET value = '2020-01-01T00:00:00.000000Z' WHERE key = 'collected'", True),
        ("INSERT INTO runs (name) VALUES ('other')", False),
        ("INSERT INTO version_packs SELECT 1, pack, 1, '' FROM versions WHERE number = 2", False),
        ("UPDATE version_packs SET blobs = 0 WHERE version = 2", False),
        ("DELETE FROM pack_bases", False),
        ("UPDATE recent_objects SET slot = slot + 1 WHERE slot = 0", True),
        ("UPDATE recent_objects SET key = key + 1", True),
        ("UPDATE tags SET version = 1 WHERE name = 'best'", False),
        ("UPDATE tags SET name = 'other' WHERE name = 'best'", False),
    ],
)
def test_a_catalog_that_contradicts_the_manifests(whole: Whole, copy: Path, statement: str, is_refused: bool) -> None:
    """Rows that SQLite accepts: `verify` finds them, and reads that use them are refused."""
    assert edit(copy / "catalog.sqlite", statement) >= 1
    assert problems(copy)
    assert check_reads(copy, whole) != is_refused


def rows_of(data: bytes) -> Any:
    """Return all rows of a catalog; None if SQLite finds it damaged. Claims of running processes are not counted."""
    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(data)
            [[whole]] = database.execute("PRAGMA integrity_check(1)").fetchall()
            tables = database.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall()
            rows = [
                database.execute(f"SELECT * FROM {name}").fetchall() for kind, name, *_ in tables if kind == "table"
            ]
            return (tables, rows) if whole == "ok" else None
    except (sqlite3.Error, UnicodeDecodeError):
        return None


def recovered(path: Path) -> Any:
    """Return the rows of a rebuilt catalog. Numbers may be skipped, but none is given twice."""
    recover(path)
    with ckstore.open(path, "r") as store:
        catalog = store._catalog
        return (catalog.versions(), catalog.packs(), catalog.runs(), catalog.tags(), catalog.policies(),
                catalog.placed_objects(), catalog.last_number() >= 3)  # fmt: skip


#: SQLite reads these bytes before it reads any row.
_HEADER = 100


@pytest.mark.long
def test_flips_of_the_catalog(whole: Whole, copy: Path) -> None:
    """Every bit, or some of them: it is found, or no row changes, or all comes back and is recovered the same.

    `CKSTORE_FLIPS=1` tries all, which takes some minutes.
    """
    catalog = copy / "catalog.sqlite"
    data = catalog.read_bytes()
    said, again = rows_of(data), None
    counted: Counter[str] = Counter()
    bits = (
        range(8 * len(data)) if os.environ.get("CKSTORE_FLIPS") else random.Random(1).sample(range(8 * len(data)), 1500)
    )
    for bit in bits:
        place = bit // 8
        changed = bytearray(data)
        changed[place] ^= 1 << bit % 8
        found = rows_of(bytes(changed))
        if found == said and place >= _HEADER:
            counted["the same rows"] += 1
            continue
        if found is None and place >= _HEADER and bit % 16:
            counted["found by SQLite"] += 1  # `verify` begins with the same check.
            continue
        catalog.write_bytes(changed)
        if problems(copy):
            counted["found by SQLite" if found is None else "found by packs and log"] += 1
        else:
            assert check_reads(copy, whole), f"bit {bit}"
            again = again or recovered_of(whole)
            assert recovered(copy) == again, f"bit {bit}"
            counted["harmless: the same restores and the same catalog after recovery"] += 1
            for path in copy.iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
            shutil.copytree(whole.path, copy, dirs_exist_ok=True)
        catalog.write_bytes(data)
    print(f"{sum(counted.values())} flips: {dict(counted)}")
    assert counted["found by packs and log"] > 10


def recovered_of(whole: Whole) -> Any:
    with scratch() as directory:
        shutil.copytree(whole.path, directory / "store")
        return recovered(directory / "store")


@pytest.mark.skipif(not os.environ.get("CKSTORE_FLIPS"), reason="CKSTORE_FLIPS=1 tries every bit")
def test_every_bit_of_packs_and_log(copy: Path) -> None:
    """A pack's name and a record's digest cover all its bytes: every flip changes them."""
    tried = 0
    for path in [*names(copy / "packs"), *names(copy / "log")]:
        data = path.read_bytes()
        for bit in range(8 * len(data)):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            if path.suffix == ".zip":
                assert digest_file(io.BytesIO(changed)) != path.name[:40]
            else:
                path.write_bytes(changed)
                _, problems = change_log.read_all(DirectoryStorage(copy))
                assert path.name in problems[0]
            tried += 1
        path.write_bytes(data)
    print(f"{tried} flips")


def told(row: Any) -> Any:
    """Return a row without its estimates: every rebase and recovery computes costs and depths again."""
    return dataclasses.replace(row, depth=0, cost=1.0, base=True)


@pytest.mark.parametrize("change", ["cut off", "emptied", "removed", "longer"])
def test_packs_that_are_not_whole(whole: Whole, copy: Path, change: str) -> None:
    for pack in names(copy / "packs"):
        data = pack.read_bytes()
        if change == "removed":
            pack.unlink()
        else:
            pack.write_bytes({"cut off": data[:-7], "emptied": b"", "longer": data + b"\0"}[change])
        assert any(pack.name in problem for problem in problems(copy))
        # A pack ends with its directory: without it, or without the pack, nothing can be found in it.
        assert check_reads(copy, whole) == (change == "longer")
        pack.write_bytes(data)
    assert problems(copy) == []


def test_packs_in_each_others_place(whole: Whole, copy: Path) -> None:
    """A pack is known by its content: one under another's name is no substitute."""
    one, other = names(copy / "packs")
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    assert any(one.name in problem for problem in problems(copy))
    assert not check_reads(copy, whole)
    one.write_bytes(data)
