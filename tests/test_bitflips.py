"""One flipped bit anywhere in a store is found by `verify`, and no read returns what was never stored."""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError
from ckstore.objects import units
from tests.checkpoints import scratch, sha256


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
    """Two versions whose packs hold every kind of layer: linear and ordinal, bases and deltas, own and chained."""
    with scratch() as directory, pytest.MonkeyPatch.context() as patch:
        # Objects of some hundred elements take all the ways that large ones take, and every byte can be tried.
        patch.setattr(units, "SMALL", 128)
        generator = torch.Generator().manual_seed(1)
        weight, slow = torch.randn(12, 20, generator=generator), torch.randn(150, generator=generator)
        store = ckstore.init(directory / "store")
        digests = {}
        for step in range(2):
            path = directory / "file.pt"
            state = {"w": weight, "slow": slow, "exp_avg": weight * 0.1, "b": slow[:9].to(torch.bfloat16)}
            torch.save({"model": state, "step": 10 * step}, path)
            digests[store.ingest(path, run="a", metrics={"loss": 0.5}).version.number] = sha256(path)
            weight = weight + 0.001 * torch.randn(12, 20, generator=generator)
            slow = slow + 1e-7 * torch.randn(150, generator=generator)
        store.tag(1, "first")
        store.tag(2, "best")
        modes = [store.resolver.content(content) for _, content in store[2].document.objects if content]
        assert {"chained", "own"} & {record.mode for record in modes if record is not None}
        assert store.verify().problems == []
        tensors = {(number, path): raw(store[number][path]) for number in digests for path in store[number]}
        rows, tags = store.versions(), store.catalog.tags()
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


def problems(path: Path) -> list[str]:
    """What `verify` has to say of the store."""
    try:
        with ckstore.open(path, "r") as store:
            return store.verify().problems
    except CkstoreError as error:
        return [str(error)]


def check_reads(path: Path, whole: Whole) -> bool:
    """Every read gives what was stored or raises; returns whether all gave it."""
    complete = True
    try:
        store = ckstore.open(path, "r")
    except CkstoreError:
        return False
    with store:
        for (number, name), expected in whole.tensors.items():
            try:
                assert raw(store[number][name]) == expected, f"{name} of version {number} has wrong values"
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


def test_every_byte_of_a_versions_packs(whole: Whole, copy: Path) -> None:
    """Every byte of the second version's two packs, and a part of those of the first that it is stored against."""
    with ckstore.open(copy, "r") as store:
        packs = [copy / "packs" / row.name for row in store.catalog.packs()]
    assert len(packs) == 4
    damaging = 0
    for pack in packs:
        size = pack.stat().st_size
        assert size < 20_000
        for position in range(0, size, 1 if pack in packs[2:] else 5):
            flipped(pack, position)
            with ckstore.open(copy, "r") as store:
                found = store.verify(None if position % 31 == 0 else []).problems
            assert any(pack.name in problem for problem in found), f"byte {position} of {pack.name}: {found}"
            if position % 13 == 0:
                damaging += not check_reads(copy, whole)
            flipped(pack, position)
    assert damaging > 100
    assert problems(copy) == []
    assert check_reads(copy, whole)


def test_every_byte_of_the_log(whole: Whole, copy: Path) -> None:
    for record in names(copy / "log"):
        for position in range(record.stat().st_size):
            flipped(record, position)
            assert any(record.name in problem for problem in problems(copy)), f"byte {position} of {record.name}"
            flipped(record, position)
    assert problems(copy) == []


def test_bytes_of_the_catalog(whole: Whole, copy: Path) -> None:
    """A catalog has bytes that mean nothing; a flip that `verify` does not find must have changed nothing."""
    catalog = copy / "catalog.sqlite"
    found = 0
    for position in range(0, catalog.stat().st_size, 83):
        flipped(catalog, position)
        complete = check_reads(copy, whole)
        if problems(copy):
            found += 1
        else:
            assert complete, f"byte {position}"
            with ckstore.open(copy, "r") as store:
                assert [told(row) for row in store.versions()] == [told(row) for row in whole.rows]
                assert store.catalog.tags() == whole.tags
        flipped(catalog, position)
    assert found > 10
    assert problems(copy) == []


@pytest.mark.parametrize(
    ("statement", "harmful"),
    [
        ("UPDATE versions SET pack = (SELECT pack FROM versions WHERE number = 2) WHERE number = 1", True),
        ("UPDATE versions SET number = 7 WHERE number = 2", True),
        ("UPDATE versions SET step = 11 WHERE number = 2", False),
        ("UPDATE versions SET created = '2020-01-01T00:00:00.000000Z' WHERE number = 2", False),
        ("UPDATE versions SET parent = NULL WHERE number = 2", False),
        ("UPDATE versions SET original_bytes = original_bytes + 1", False),
        ("UPDATE versions SET stored_bytes = stored_bytes - 1", False),
        ("UPDATE versions SET metrics = '{}'", False),
        ("UPDATE versions SET fidelity = 'coarse'", False),
        ("UPDATE runs SET name = 'other'", False),
        ("UPDATE tags SET version = 1 WHERE name = 'best'", False),
        ("UPDATE tags SET name = 'other' WHERE name = 'best'", False),
    ],
)
def test_a_catalog_that_contradicts_the_manifests(whole: Whole, copy: Path, statement: str, harmful: bool) -> None:
    """Rows that SQLite finds nothing wrong with: `verify` does, and nothing is read as what it is not."""
    with closing(sqlite3.connect(copy / "catalog.sqlite")) as database, database:
        assert database.execute(statement).rowcount >= 1
    assert problems(copy)
    assert check_reads(copy, whole) != harmful


def told(row: Any) -> Any:
    """A row without what is estimated: costs and depths are taken anew by every rebase and recovery."""
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
        # What a pack ends with is its directory: without it, or without the pack, nothing can be found in it.
        assert check_reads(copy, whole) == (change == "longer")
        pack.write_bytes(data)
    assert problems(copy) == []


def test_packs_in_each_others_place(whole: Whole, copy: Path) -> None:
    """A pack is known by what is in it: one under another's name is no substitute."""
    packs = names(copy / "packs")
    for kind in (".exact.zip", ".zip"):
        one, other = [path for path in packs if path.name[40:] == kind]
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        assert any(one.name in problem for problem in problems(copy))
        assert not check_reads(copy, whole)
        one.write_bytes(data)
