"""The catalog is built again from packs and log: whole, damaged or gone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import CkstoreError, IntegrityError
from ckstore.recover import recover
from ckstore.storage import durable
from tests.checkpoints import scratch, sha256


@pytest.fixture
def directory() -> Iterator[Path]:
    with scratch() as path:
        yield path


@pytest.fixture
def paths(directory: Path) -> list[Path]:
    torch.manual_seed(0)
    weight, found = torch.randn(300, 300), []
    for step in range(5):
        found.append(directory / f"step{step}.pt")
        torch.save({"w": weight, "b": weight[0].clone(), "step": step}, found[-1])
        weight = weight + 1e-3 * torch.randn(300, 300)
    return found


@pytest.fixture
def store(directory: Path, paths: list[Path]) -> Iterator[ckstore.Store]:
    """Two runs, one forked off the other, tags set, moved and removed, a version replaced, and a rebase."""
    with ckstore.init(directory / "store") as opened:
        for path in paths[:4]:
            opened.ingest(path, run="a", metrics={"loss": 0.25})
        opened.ingest(paths[4], run="b", parent="a@2")
        opened.ingest(paths[4], run="a", step=3, replace=True)
        opened.tag("a@1", "best")
        opened.tag("a@2", "best")
        opened.tag("a@1", "gone")
        opened.untag("gone")
        opened.rebase(["a@2"])
        yield opened


def seen(store: ckstore.Store) -> object:
    """Everything that a user sees of a store, and the digest of everything in it."""
    out = store.path.parent / "seen"
    digests = {}
    for row in store.versions():
        store[row.number].checkout(out, force=True)
        digests[row.number] = sha256(out)
    runs = [(run.name, run.versions) for run in store.catalog.runs()]
    return store.versions(), store.catalog.tags(), runs, digests


def complaint(path: Path) -> str:
    """What opening and verifying a store has to say."""
    try:
        with ckstore.open(path) as store:
            return " ".join(store.verify().problems)
    except CkstoreError as error:
        return str(error)


@pytest.mark.parametrize("loss", ["none", "removed", "emptied", "damaged", "cut off"])
def test_everything_comes_back(store: ckstore.Store, loss: str) -> None:
    before = seen(store)
    store.close()
    catalog = store.path / "catalog.sqlite"
    if loss == "removed":
        catalog.unlink()
    elif loss == "emptied":
        catalog.write_bytes(b"")
    elif loss == "damaged":
        data = bytearray(catalog.read_bytes())
        data[100:8000] = os.urandom(7900)
        catalog.write_bytes(data)
    elif loss == "cut off":
        os.truncate(catalog, catalog.stat().st_size // 2)
    if loss != "none":
        assert "ckstore recover" in complaint(store.path)
    assert recover(store.path).problems == []
    with ckstore.open(store.path) as again:
        assert seen(again) == before
        assert again.verify().problems == []


def test_twice_is_once(store: ckstore.Store) -> None:
    before = seen(store)
    recover(store.path)
    recover(store.path)
    with ckstore.open(store.path) as again:
        assert seen(again) == before


def test_an_open_store_goes_on(store: ckstore.Store, paths: list[Path]) -> None:
    """A process that has the store open notices that the catalog was replaced."""
    recover(store.path)
    number = store.ingest(paths[0], run="c").version.number
    store.tag(number, "later")
    with ckstore.open(store.path) as again:
        assert again["later"].row.number == number
        assert again.verify().problems == []


def test_numbers_are_not_given_twice(store: ckstore.Store, paths: list[Path]) -> None:
    taken = {row.number for row in store.versions()}
    recover(store.path)
    with ckstore.open(store.path) as again:
        number = again.ingest(paths[0], run="c").version.number
        assert number > max(taken)


def test_a_pack_that_is_damaged(store: ckstore.Store, paths: list[Path]) -> None:
    """Its version is named; whatever does not need it comes back; nothing is deleted."""
    rows = store.versions("a")
    pack = store.path / "packs" / rows[0].pack
    store.close()
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    report = recover(store.path)
    assert any(rows[0].pack in problem for problem in report.problems)
    assert pack.read_bytes() == data
    with ckstore.open(store.path) as again:
        assert again.verify().problems
        # `a@2` was stored in full by the rebase.
        again["a@2"].checkout(store.path.parent / "out")
        assert sha256(store.path.parent / "out") == sha256(paths[2])
        for row in again.versions():
            try:
                again[row.number].checkout(store.path.parent / "out", force=True)
            except CkstoreError:
                continue
            assert sha256(store.path.parent / "out") in {sha256(path) for path in paths}


def test_foreign_files_are_left_alone(store: ckstore.Store) -> None:
    before = seen(store)
    names = ["notes.txt", "0" * 40 + ".zip", ".tmp-1-abc", "0" * 40 + ".exact.zip"]
    for name in names:
        (store.path / "packs" / name).write_bytes(b"x")
    (store.path / "log" / "readme").write_text("x")
    report = recover(store.path)
    assert len(report.problems) == 2
    assert all((store.path / "packs" / name).exists() for name in names)
    with ckstore.open(store.path) as again:
        assert seen(again) == before


def test_a_log_record_that_is_damaged(store: ckstore.Store) -> None:
    """No catalog is put in the place of the present one on the evidence of a broken log."""
    before = seen(store)
    record = sorted((store.path / "log").iterdir())[0]
    whole = record.read_bytes()
    record.write_bytes(whole.replace(b"best", b"bust"))
    with pytest.raises(IntegrityError, match=record.name):
        recover(store.path)
    assert seen(store) == before
    record.write_bytes(whole)
    assert json.loads(whole)["change"] == "tag"
    assert recover(store.path).problems == []


def test_what_a_crash_leaves_behind(store: ckstore.Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of a version that was never committed bring it back; a tag that was logged is set."""

    class Crash(BaseException):
        pass

    def crash(step: str) -> None:
        if step == "before-commit" and (len(list((store.path / "packs").glob("*.zip"))) > packs or tagging):
            raise Crash

    packs, tagging = len(list((store.path / "packs").glob("*.zip"))), False
    monkeypatch.setattr(durable, "checkpoint", crash)
    # A process that dies cleans nothing up.
    monkeypatch.setattr("ckstore.ingest.remove_uncommitted", lambda *arguments: None)
    with pytest.raises(Crash):
        store.ingest(paths[1], run="c", step=9)
    tagging = True
    with pytest.raises(Crash):
        store.tag("a@0", "logged")
    monkeypatch.undo()
    assert "logged" not in store.catalog.tags()
    assert not [row for row in store.versions() if row.run == "c"]
    assert store.verify().problems == []
    recover(store.path)
    with ckstore.open(store.path) as again:
        assert again["logged"].row.step == 0
        again["c@9"].checkout(store.path.parent / "out")
        assert sha256(store.path.parent / "out") == sha256(paths[1])
        assert again.verify().problems == []
