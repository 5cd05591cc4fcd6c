"""Forgotten versions are gone from every listing and stay gone; objects that others need stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.recovery.recover import recover
from ckstore.storage import change_log, durable
from tests.checkpoints import listing, settled, sha256


@pytest.fixture
def store(directory: Path, paths: list[Path]) -> Iterator[ckstore.Store]:
    """Five versions a@0 to a@4, each stored against the one before, and b@0 stored against a@2, tagged `best`."""
    with ckstore.init(directory / "store") as opened:
        for path in paths:
            opened.ingest(path, run="a")
        opened.ingest(paths[0], run="b", parent="a@2")
        opened.tag("b@0", "best")
        yield settled(opened)


def check(store: ckstore.Store, paths: list[Path], expected: list[tuple[int, str, int]]) -> None:
    """Check that the store holds these (number, run, step), and that all of them come back."""
    assert [(row.number, row.run, row.step) for row in store._catalog.versions()] == expected
    assert store.verify().problems == []
    out = store.path.parent / "out"
    for _, run, step in expected:
        store[f"{run}@{step}"].checkout(out, force=True)
        assert sha256(out) == sha256(paths[step])


def test_forgotten_versions_are_gone_and_others_stay(store: ckstore.Store, paths: list[Path]) -> None:
    packs = store._repository.packs.list_packs()
    report = store.forget(["a@1..a@2"])
    assert [(row.number, row.step) for row in report.versions] == [(2, 1), (3, 2)]
    left = [(1, "a", 0), (4, "a", 3), (5, "a", 4), (6, "b", 0)]
    check(store, paths, left)
    assert [store._catalog.version(number).parent for number in (4, 6)] == [1, 1]
    assert store._repository.packs.list_packs() == packs, "bytes stay until gc"
    for name in ("a@1", 2, report.versions[0].uid[:8]):
        with pytest.raises(NotFoundError):
            store[name]
    assert store._catalog.log_records()[-1]["change"] == "forget"
    # Their steps and their content can come again, under other numbers.
    assert store.ingest(paths[1], run="a").version.number == 7
    check(store, paths, [*left, (7, "a", 1)])


@pytest.mark.parametrize("lost", [False, True])
def test_forgotten_versions_stay_forgotten(store: ckstore.Store, paths: list[Path], lost: bool) -> None:
    store.forget(["a@1", "a@2", "a@4"])
    number = store.ingest(paths[4], run="a", step=4).version.number
    rows = settled(store)._catalog.versions()
    if lost:
        (store.path / "catalog.sqlite").unlink()
    assert recover(store.place).problems == []
    with ckstore.open(store.place) as again:
        assert again._catalog.versions() == rows
        assert again["a@4"].number == number
        check(again, paths, [(1, "a", 0), (4, "a", 3), (6, "b", 0), (7, "a", 4)])


def test_a_whole_run(store: ckstore.Store, paths: list[Path]) -> None:
    store.forget(run="a")
    assert [run.name for run in store._catalog.runs()] == ["b"]
    check(store, paths, [(6, "b", 0)])
    with pytest.raises(NotFoundError):
        store.run("a")
    recover(store.place)
    assert [run.name for run in store._catalog.runs()] == ["b"]


def test_options_keep_versions(store: ckstore.Store, paths: list[Path]) -> None:
    store.tag("a@1", "kept")
    store.forget(run="a", keep_every=3, keep_last=1, keep_tagged=True)
    check(store, paths, [(1, "a", 0), (2, "a", 1), (4, "a", 3), (5, "a", 4), (6, "b", 0)])
    assert store.forget(run="a", keep_last=9).versions == []


def test_all_or_nothing(store: ckstore.Store, paths: list[Path]) -> None:
    rows, files = store._catalog.versions(), listing(store.place)
    for dry_run in (False, True):
        with pytest.raises(ConflictError, match=r"Version 6 is tagged best.*ckstore tag --delete best"):
            store.forget(["a@1", "b@0"], dry_run=dry_run)
        with pytest.raises(NotFoundError):
            store.forget(["a@1", "nowhere"], dry_run=dry_run)
    assert store.forget(["a@1"], dry_run=True).versions == [rows[1]]
    assert (store._catalog.versions(), listing(store.place)) == (rows, files)
    store.untag("best")
    store.forget(["a@1", "b@0"])
    assert [row.number for row in store._catalog.versions()] == [1, 3, 4, 5]


def test_a_store_that_is_read_only(store: ckstore.Store) -> None:
    with ckstore.open(store.place, "r") as reader:
        assert [row.number for row in reader.forget(["a@1"], dry_run=True).versions] == [2]
        with pytest.raises(UsageError, match="reading only"):
            reader.forget(["a@1"])


class Crash(BaseException):
    """The process dies."""


@pytest.mark.local
@pytest.mark.parametrize(("step", "done"), [("log-written", False), ("before-commit", False), ("after-commit", True)])
def test_a_crash(
    store: ckstore.Store, paths: list[Path], step: str, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is made in full or not at all; `recover` follows the log."""
    store.encode()  # Otherwise it would do so first.

    def stop(name: str) -> Any:
        if name == step:
            raise Crash

    monkeypatch.setattr(durable, "checkpoint", stop)
    monkeypatch.setattr(change_log, "withdraw", lambda *arguments: None)  # A process that dies cleans nothing up.
    with pytest.raises(Crash):
        store.forget(["a@3", "a@4"])
    monkeypatch.undo()
    left = [(1, "a", 0), (2, "a", 1), (3, "a", 2), (6, "b", 0)]
    whole = [*left[:3], (4, "a", 3), (5, "a", 4), left[3]]
    check(store, paths, left if done else whole)
    assert recover(store.place).problems == []
    check(store, paths, left)
