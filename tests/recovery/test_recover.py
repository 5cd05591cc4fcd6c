"""Rebuilding the catalog from packs and log: whole, damaged or missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ckstore
from ckstore.commit.change import Change
from ckstore.errors import CkstoreError, LockedError
from ckstore.recovery.recover import recover
from ckstore.storage import change_log, durable
from ckstore.storage.catalog import Catalog
from ckstore.storage.catalog_replacement import replace_catalog
from ckstore.storage.interface import Storage
from ckstore.storage.pack import PackWriter
from ckstore.storage.pack_reader import PackReader
from ckstore.writing.tuning import Search
from tests.checkpoints import flip, moving, settled, sha256
from tests.coarse_checks import same_bits, values_of

pytestmark = [pytest.mark.encoded, pytest.mark.local]


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
    """Return the visible state of a store, and the digest of everything in it."""
    out = store.path.parent / "seen"
    digests = {}
    for row in store._catalog.versions():
        store[row.number].checkout(out, force=True)
        digests[row.number] = sha256(out)
    runs = [(run.name, run.versions) for run in store._catalog.runs()]
    return store._catalog.versions(), store._catalog.tags(), runs, digests


def complaint(path: Path) -> str:
    """Return the errors of opening and verifying a store."""
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
    for _ in range(2):
        assert recover(store.place).problems == []
        with ckstore.open(store.place) as again:
            assert seen(again) == before
            assert again.verify().problems == []


def test_an_open_store_continues_after_a_recovery(store: ckstore.Store, paths: list[Path]) -> None:
    """A process that has the store open notices that the catalog was replaced; numbers are not given twice."""
    taken = {row.number for row in store._catalog.versions()}
    recover(store.place)
    number = store.ingest(paths[0], run="c").version.number
    assert number > max(taken)
    store.tag(number, "later")
    with ckstore.open(store.place) as again:
        assert again["later"].number == number
        assert again.verify().problems == []


def test_a_pack_that_is_damaged(store: ckstore.Store, paths: list[Path]) -> None:
    """Its version is named; versions that do not need it come back; nothing is deleted."""
    rows = store._catalog.versions("a")
    pack = store.path / "packs" / rows[0].pack
    store.close()
    flip(store.place, rows[0].pack, lambda length: length // 2)
    data = pack.read_bytes()
    report = recover(store.place)
    assert any(rows[0].pack in problem for problem in report.problems)
    assert pack.read_bytes() == data
    with ckstore.open(store.place) as again:
        assert again.verify().problems
        # `a@2` was stored in full by the rebase.
        again["a@2"].checkout(store.path.parent / "out")
        assert sha256(store.path.parent / "out") == sha256(paths[2])
        for row in again._catalog.versions():
            try:
                again[row.number].checkout(store.path.parent / "out", force=True)
            except CkstoreError:
                continue
            assert sha256(store.path.parent / "out") in {sha256(path) for path in paths}


def test_foreign_files_are_left_alone(store: ckstore.Store) -> None:
    before = seen(store)
    names = ["notes.txt", "0" * 40 + ".zip", ".tmp-1-abc", "0" * 40 + ".raw.zip"]
    for name in names:
        (store.path / "packs" / name).write_bytes(b"x")
    (store.path / "log" / "readme").write_text("x")
    report = recover(store.place)
    assert len(report.problems) == 2
    assert all((store.path / "packs" / name).exists() for name in names)
    with ckstore.open(store.place) as again:
        assert seen(again) == before


def test_a_log_record_that_is_damaged(store: ckstore.Store) -> None:
    """The record is named; everything else comes back, and all of it once the record is whole again."""
    before, rows = seen(store), store._catalog.versions()
    record = sorted((store.path / "log").iterdir())[1]
    whole = record.read_bytes()
    assert b"best" in whole
    record.write_bytes(whole.replace(b"best", b"bust"))
    (store.path / "catalog.sqlite").unlink()
    [problem] = recover(store.place).problems
    assert record.name in problem
    assert "a tag may be missing" in problem
    with ckstore.open(store.place) as again:
        assert again._catalog.versions() == rows
    record.unlink()
    [problem] = recover(store.place).problems
    assert "record 2 is missing" in problem
    record.write_bytes(whole)
    assert recover(store.place).problems == []
    with ckstore.open(store.place) as again:
        assert seen(again) == before


def test_the_last_log_record_that_is_lost(small: Path) -> None:
    with ckstore.open(small) as opened:
        opened.tag("a@0", "first")
        opened.forget(["a@1"])
        *_, last = sorted((small / "log").iterdir())
        last.unlink()
        assert [problem.partition(";")[0] for problem in opened.verify().problems] == ["Log record 2 is missing"]
    [problem] = recover(small).problems
    assert "record 2 is missing" in problem
    assert recover(small).problems == []


@pytest.mark.parametrize("number", range(1, 8))
def test_settings_that_only_the_catalog_has(tmp_path: Path, number: int) -> None:
    """A record is lost, but its tag, metric or policy is logged again, once."""

    def settings(place: Path) -> Any:
        with ckstore.open(place) as opened:
            catalog = opened._catalog
            rows = {row.number: row.metrics for row in catalog.versions()}
            return catalog.tags(), catalog.policies(), rows, [tag for tag in ("first", "best") if tag in opened]

    place = tmp_path / "store"
    with ckstore.init(place) as store:
        for step in range(3):
            store.ingest({"w": np.full(9, step, np.float32)}, run="r", step=step)
        log = place / "log"
        count = len(list(log.iterdir()))
        store.tag("r@0", "first")
        store.tag("r@1", "best")
        store.untag("best")
        store.tag("r@2", "last")
        store.set_metrics("r@1", {"loss": 0.5})
        store.set_policy(ckstore.Policy("coarse"), run="r")
        store.set_policy(None, run="r")
        store.set_policy(ckstore.Policy(hot=3), run="r")
    before = settings(place)
    lost = sorted(log.iterdir())[count + number - 1]
    lost.unlink()
    [problem] = recover(place).problems
    assert "is missing" in problem
    assert settings(place) == before
    files = set(log.iterdir())
    recover(place)
    assert set(log.iterdir()) == files
    (place / "catalog.sqlite").unlink()
    recover(place)
    assert settings(place) == before


def test_metrics_that_were_set_back_when_the_record_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with ckstore.init(place) as store:
        store.ingest({"w": np.ones(9, np.float32)}, run="r", step=0, metrics={"loss": 1.0})
        store.set_metrics("r@0", {"loss": 2.0})
        store.set_metrics("r@0", {"loss": 1.0})
        store.tag("r@0", "x")
    sorted((place / "log").iterdir())[-2].unlink()
    recover(place)
    (place / "catalog.sqlite").unlink()
    recover(place)
    with ckstore.open(place) as store:
        assert store["r@0"].metrics["loss"] == 1.0


def test_a_policy_of_a_store_without_versions_when_the_record_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with ckstore.init(place) as store:
        store.set_policy(ckstore.Policy("coarse"))
        store.set_policy(ckstore.Policy(hot=3))
        before = store._catalog.policies()
    sorted((place / "log").iterdir())[-1].unlink()
    recover(place)
    with ckstore.open(place) as store:
        assert store._catalog.policies() == before


def test_tags_stay_with_their_versions_when_another_has_the_number_and_a_record_is_lost(tmp_path: Path) -> None:
    for run in ("r", "other"):
        with ckstore.init(tmp_path / run) as store:
            for step in range(2):
                store.ingest({"w": np.full(9, step + len(run), np.float32)}, run=run, step=step)
    with ckstore.open(tmp_path / "r") as store:
        store.tag("r@1", "keep")
        store.set_metrics("r@1", {"loss": 1.0})
        store.tag("r@0", "last")
    for pack in (tmp_path / "other" / "packs").iterdir():
        shutil.copy(pack, tmp_path / "r" / "packs")
    sorted((tmp_path / "r" / "log").iterdir())[-1].unlink()
    recover(tmp_path / "r")
    with ckstore.open(tmp_path / "r") as store:
        assert (store["keep"].name, store["last"].name) == ("r@1", "r@0")
        assert store["keep"].metrics["loss"] == 1.0
        assert "loss" not in store["other@1"].metrics


def test_metrics_of_a_version_that_is_back_since_its_record_is_lost(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with ckstore.init(place) as store:
        for step in range(2):
            store.ingest({"w": np.full(9, step, np.float32)}, run="r", step=step)
        store.set_metrics("r@0", {"loss": 1.0})
        store.forget("r@0")
        store.tag("r@1", "last")
    [record] = [record for record in (place / "log").iterdir() if b'"forget"' in record.read_bytes()]
    record.unlink()
    for _ in range(2):
        recover(place)
        with ckstore.open(place) as store:
            assert store["r@0"].metrics["loss"] == 1.0
        (place / "catalog.sqlite").unlink()


def test_a_missing_log(store: ckstore.Store) -> None:
    rows = store._catalog.versions()
    shutil.rmtree(store.path / "log")
    [problem] = recover(store.place).problems
    assert "is missing; a tag" in problem
    with ckstore.open(store.place) as again:
        assert again._catalog.versions() == rows
        again.tag("a@1", "best")
    assert recover(store.place).problems == []


def test_recover_takes_in_leftovers_of_a_crash(
    store: ckstore.Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packs of a version that was never committed bring it back; a tag that was logged is set."""

    class Crash(BaseException):
        pass

    def crash(step: str) -> None:
        if step == "before-commit" and (len(list((store.path / "packs").glob("*.zip"))) > packs or tagging):
            raise Crash

    packs, tagging = len(list((store.path / "packs").glob("*.zip"))), False
    monkeypatch.setattr(durable, "checkpoint", crash)
    # A process that dies cleans nothing up.
    monkeypatch.setattr("ckstore.commit.change.remove_uncommitted", lambda *arguments: None)
    monkeypatch.setattr("ckstore.storage.change_log.withdraw", lambda *arguments: None)
    with pytest.raises(Crash):
        store.ingest(paths[1], run="c", step=9)
    tagging = True
    with pytest.raises(Crash):
        store.tag("a@0", "logged")
    monkeypatch.undo()
    assert "logged" not in store._catalog.tags()
    assert not [row for row in store._catalog.versions() if row.run == "c"]
    assert store.verify().problems == []
    recover(store.place)
    with ckstore.open(store.place) as again:
        assert again["logged"].step == 0
        again["c@9"].checkout(store.path.parent / "out")
        assert sha256(store.path.parent / "out") == sha256(paths[1])
        assert again.verify().problems == []


def weights(step: int) -> npt.NDArray[np.float32]:
    """Return weights that move a little with every step."""
    values = np.random.default_rng(0).standard_normal((300, 300)) * 0.02
    for number in range(step):
        values += np.random.default_rng(number + 1).standard_normal((300, 300)) * 1e-3
    return values.astype(np.float32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The directory of a store with versions a@0 and a@1."""
    with ckstore.init(tmp_path / "small") as opened:
        for step in range(2):
            opened.ingest({"w": weights(step)}, run="a", step=step)
    return tmp_path / "small"


def steps(path: Path) -> list[tuple[int, str, int | None]]:
    """Return the number, run and step of all versions; `verify` finds nothing wrong."""
    with ckstore.open(path) as opened:
        assert opened.verify().problems == []
        return [(row.number, row.run, row.step) for row in opened._catalog.versions()]


def claim_a_step_twice(path: Path) -> None:
    """Kill an ingest of a@10 before its commit, after another process has committed a@10."""
    script = textwrap.dedent(
        f"""
        import os
        import numpy as np
        import ckstore
        from ckstore.commit.change import Change
        from ckstore.storage.catalog import Catalog

        commit = Change.commit_version

        def interposed(self, *arguments, **options):
            Change.commit_version = commit
            with ckstore.open({str(path)!r}) as other:
                other.ingest({{"w": np.ones((300, 300), "f4")}}, run="a", step=10)
            Catalog.commit_version = lambda *given, **named: os._exit(9)
            return commit(self, *arguments, **options)

        Change.commit_version = interposed
        with ckstore.open({str(path)!r}) as store:
            store.ingest({{"w": np.zeros((300, 300), "f4")}}, run="a", step=10)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9


def test_writers_are_kept_out_while_packs_are_scanned(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version committed during the scan would be missing from the rebuilt catalog."""
    said: list[str] = []
    read_all = change_log.read_all

    def interposed(storage: Storage) -> Any:
        with monkeypatch.context() as patch, ckstore.open(small) as other:
            patch.setattr(Catalog.__init__, "__defaults__", ("r", 0.05))
            other._catalog.close()
            other._repository.catalog = Catalog(small, "a")
            with pytest.raises(LockedError) as raised:
                other.ingest({"w": weights(2)}, run="a", step=2)
        said.append(str(raised.value))
        return read_all(storage)

    with monkeypatch.context() as patched:
        patched.setattr(change_log, "read_all", interposed)
        assert recover(small).problems == []
    assert "try again" in said[0]
    assert steps(small) == [(1, "a", 0), (2, "a", 1)]
    with ckstore.open(small) as opened:
        opened.ingest({"w": weights(2)}, run="a", step=2)
    assert steps(small)[-1][1:] == ("a", 2)


@pytest.mark.parametrize("lost", [False, True])
def test_an_ingest_whose_packs_recover_found_first_succeeds(
    small: Path, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Change.commit_version

    def interposed(self: Change, *arguments: Any, **named: Any) -> int:
        monkeypatch.setattr(Change, "commit_version", commit)
        if lost:
            (small / "catalog.sqlite").unlink()
        assert recover(small).versions == 3
        return commit(self, *arguments, **named)

    monkeypatch.setattr(Change, "commit_version", interposed)
    with ckstore.open(small) as opened:
        report = opened.ingest({"w": weights(2)}, run="a", step=2)
        assert report.is_new
        assert np.asarray(opened["a@2"]["w"][:]).tobytes() == weights(2).tobytes()
        assert opened._catalog.reservations() == opened._catalog.leases() == []
    assert steps(small) == [(1, "a", 0), (2, "a", 1), (3, "a", 2)]


@pytest.mark.parametrize("way", ["replaces", "goes back"])
def test_a_version_that_recover_found_first_stays_in_its_place(
    small: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit repeats nothing that `recover` did: it would forget or supersede the version itself."""
    with ckstore.open(small) as opened:
        opened.ingest({"w": weights(2)}, run="a", step=2)
    commit = Change.commit_version

    def interposed(self: Change, *arguments: Any, **named: Any) -> int:
        monkeypatch.setattr(Change, "commit_version", commit)
        recover(small)
        return commit(self, *arguments, **named)

    monkeypatch.setattr(Change, "commit_version", interposed)
    with ckstore.open(small) as opened:
        if way == "replaces":
            opened.ingest({"w": weights(3)}, run="a", step=1, replace=True)
        else:
            opened.ingest({"w": weights(3)}, run="a", step=1, parent="a@0")
        rows = opened._catalog.versions()
        assert opened._catalog.reservations() == opened._catalog.leases() == []
        assert opened["a@1"].number == 4
    standing = [(row.number, row.step) for row in rows if not row.superseded]
    assert standing == ([(1, 0), (3, 2), (4, 1)] if way == "replaces" else [(1, 0), (4, 1)])
    assert recover(small).problems == []
    with ckstore.open(small) as opened:
        assert opened._catalog.versions() == rows


def test_a_version_without_its_base_is_left_out(small: Path, tmp_path: Path) -> None:
    """Its pack came from elsewhere; the present catalog has never had it."""
    before = steps(small)
    with ckstore.init(tmp_path / "other") as other:
        for step in range(5):
            other.ingest({"w": weights(9) + np.float32(1e-3) * step}, run="b", step=step, hot=0)
        assert other["b@4"].depth > 0
        shutil.copy(other.path / "packs" / other["b@4"]._stored.row.pack, small / "packs")
    [problem] = recover(small).problems
    assert problem.startswith("Version 5 (b@4) was left out: its ingest was interrupted")
    assert steps(small) == before


def test_numbers_go_on_after_those_that_were_given(tmp_path: Path) -> None:
    """A killed ingest has one, perhaps in a pack that nobody has seen yet."""
    with ckstore.init(tmp_path / "store"):
        pass
    recover(tmp_path / "store")
    with ckstore.open(tmp_path / "store") as opened:
        assert opened.ingest({"w": weights(0)}, run="a", step=0, hot=0).version.number == 1
        assert opened._catalog.reserve_number() == 2
    recover(tmp_path / "store")
    (tmp_path / "store" / "claims.sqlite").unlink()
    with ckstore.open(tmp_path / "store") as opened:
        assert opened.ingest({"w": weights(1)}, run="a", step=1, hot=0).version.number == 3


def test_the_committed_version_of_two_at_a_step_stays(small: Path) -> None:
    claim_a_step_twice(small)
    before = steps(small)
    assert before[-1] == (4, "a", 10)
    for _ in range(2):
        assert recover(small).problems == []
        assert steps(small) == before


def test_two_versions_at_a_step_stay_without_a_catalog(small: Path) -> None:
    claim_a_step_twice(small)
    (small / "catalog.sqlite").unlink()
    [problem] = recover(small).problems
    assert "both claim a@10" in problem
    found = steps(small)
    assert [number for number, _, _ in found] == [1, 2, 3, 4]
    assert [step for _, _, step in found if step in (10, None)] in ([10, None], [None, 10])
    assert recover(small).problems == []
    assert steps(small) == found


def test_a_version_at_the_step_of_a_lost_one_does_not_come_back_in_its_place(small: Path) -> None:
    with ckstore.open(small) as opened:
        opened.ingest({"w": weights(5)}, run="a", step=1, replace=True)
        pack = opened["a@1"]._stored.row.pack
    flip(small, pack, lambda length: length // 2)
    problems = recover(small).problems
    assert f"Version 3 (a@1) is gone: its pack {pack} is damaged or missing." in problems
    assert steps(small) == [(1, "a", 0)]


def test_two_that_claim_a_number_both_stay(small: Path) -> None:
    """Packs of two stores in one, as they come about where a catalog is made over packs that it does not know."""
    with ckstore.open(small) as opened:
        opened.tag("a@0", "first")
    replace_catalog(small, lambda fresh, present: None)
    with ckstore.open(small) as opened:
        for step in range(3):
            opened.ingest({"w": weights(5 + step)}, run="b", step=step)
        opened.tag("b@0", "second")
        assert [row.number for row in opened._catalog.versions()] == [1, 2, 3]
    (small / "catalog.sqlite").unlink()
    report = recover(small)
    assert ["both claim number" in problem for problem in report.problems] == [True, True]
    found = steps(small)
    assert sorted(found) == [(1, "a", 0), (2, "a", 1), (3, "b", 2), (4, "b", 0), (5, "b", 1)]
    with ckstore.open(small) as opened:
        assert opened._catalog.tags() == {"first": 1, "second": 4}
        assert [opened[f"b@{step}"].parent for step in range(3)] == [None, 4, 5]
        assert np.asarray(opened["b@1"]["w"][:]).tobytes() == weights(6).tobytes()
        assert opened.ingest({"w": weights(9)}, run="c", parent="b@0").version.number == 6
        opened.tag(1, "third")
    (small / "catalog.sqlite").unlink()
    assert recover(small).problems == []
    assert steps(small) == [*found, (6, "c", None)]
    with ckstore.open(small) as opened:
        assert opened._catalog.tags() == {"first": 1, "second": 4, "third": 1}
        assert opened["c"].parent == 4


@pytest.mark.parametrize("lost", [False, True])
def test_a_tag_never_falls_back_to_its_previous_version(small: Path, lost: bool) -> None:
    with ckstore.open(small) as opened:
        opened.tag(1, "best")
        opened.tag(2, "best")
        pack = opened[2]._stored.row.pack
    flip(small, pack, lambda length: length // 2)
    if lost:
        (small / "catalog.sqlite").unlink()
    problems = recover(small).problems
    assert any("Tag best points at version 2, which is gone" in problem for problem in problems)
    with ckstore.open(small) as opened:
        assert opened._catalog.tags() == {}


def test_a_lost_version_is_named(small: Path) -> None:
    """The present catalog names it; without one its child does, or it is an unknown number."""
    with ckstore.open(small) as opened:
        opened.ingest({"w": weights(2)}, run="a", step=2)
        packs = [row.pack for row in opened._catalog.versions()]
    whole = (small / "catalog.sqlite").read_bytes()
    (small / "packs" / packs[1]).unlink()
    assert f"Version 2 (a@1) is gone: its pack {packs[1]} is damaged or missing." in recover(small).problems
    (small / "catalog.sqlite").unlink()
    assert any("Version 2, after which version 3 was stored, is gone" in said for said in recover(small).problems)
    flip(small, packs[0], lambda length: length // 2)
    (small / "catalog.sqlite").unlink()
    (small / "packs" / packs[1]).write_bytes(b"x")
    problems = recover(small).problems
    assert any("No pack holds version 1:" in problem for problem in problems)
    (small / "catalog.sqlite").write_bytes(whole)
    assert len([said for said in recover(small).problems if "is gone: its pack" in said]) == 2


def test_objects_shared_with_a_lost_pack_are_named(small: Path) -> None:
    """The second one is cut like the first one, whose manifest says how."""
    with ckstore.open(small) as opened:
        pack = opened[1]._stored.row.pack
        assert opened[2]._stored.document.blob_packs() == {pack}
        assert opened._catalog.unreferenced_packs() == []
    flip(small, pack, lambda length: length // 2)
    assert any(f"lacks data shared with pack {pack}" in problem for problem in recover(small).problems)
    with ckstore.open(small) as opened:
        assert opened._catalog.is_incomplete()


def test_a_version_with_another_number_outlasts_thin_gc_and_recover(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest(moving(1), run="a", step=1)
    shutil.copy(path / "catalog.sqlite", tmp_path / "older.sqlite")
    with ckstore.open(path) as store:
        store.ingest(moving(2), run="a", step=2)
    shutil.copy(tmp_path / "older.sqlite", path / "catalog.sqlite")
    with ckstore.open(path) as store:
        store.ingest(moving(3), run="b", step=3)
    assert "both claim number 2" in recover(path).problems[0]
    with ckstore.open(path) as store:
        store.thin([3])
        assert store.gc(grace=0).versions == 0
        names = {(row.number, row.run, row.step) for row in store._catalog.versions()}
        before = values_of(store[3])
    assert names == {(1, "a", 1), (2, "b", 3), (3, "a", 2)}
    for _ in range(2):
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            assert {(row.number, row.run, row.step) for row in store._catalog.versions()} == names
            assert store._catalog.versions()[2].fidelity == "coarse"
            assert all(same_bits(before[name], value) for name, value in values_of(store[3]).items())
            store.gc(grace=0)
            assert not store.verify().problems


def test_a_search_that_is_killed_leaves_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    seen: list[Path] = []

    def evaluate(file: Path) -> float:
        seen.append(file)
        if len(seen) > 1:
            raise KeyboardInterrupt
        return 1.0

    # A killed process removes nothing.
    monkeypatch.setattr("ckstore.commit.change.remove_uncommitted", lambda *_: None)
    with ckstore.init(path) as store:
        store.ingest(moving(0), run="a", step=0)
        committed = set((path / "packs").iterdir())
        with pytest.raises(KeyboardInterrupt):
            store.ingest(moving(1), run="a", step=0, replace=True, search=Search(evaluate, 0.01))
    left = set((path / "packs").iterdir()) - committed
    assert left
    for _ in range(2):
        assert recover(path).problems == []
        with ckstore.open(path) as store:
            assert [(row.number, row.fidelity) for row in store._catalog.versions()] == [(1, "exact")]
            assert all(same_bits(moving(0)[name], value) for name, value in values_of(store[1]).items())
            assert store.gc(grace=0).files in (0, len(left))
    assert set((path / "packs").iterdir()) == committed


@pytest.mark.parametrize("read", [0, 1], ids=["hashed", "sorted"])
def test_a_pack_that_vanishes_during_a_recovery_is_ignored(
    small: Path, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    """An ingest that fails removes its packs without a lock."""
    with PackWriter(small, "encoded") as writer:
        document = {"format": 1, "number": 0, "created": durable.timestamp(), "kind": "encoded", "records": []}
        writer.add_manifest(document, {})
        pack = writer.finish()
    digest, find = PackReader.digest, PackReader.find_entry
    calls = []

    def vanish(reader: PackReader, name: str) -> None:
        if name == pack.name:
            reader.forget(name)
            (small / "packs" / name).unlink(missing_ok=True)

    def hashed(reader: PackReader, name: str) -> str:
        if not read:
            vanish(reader, name)
        return digest(reader, name)

    def found(reader: PackReader, name: str, member: str) -> Any:
        calls.append(name)
        if read and calls.count(name) == 2:
            vanish(reader, name)
        return find(reader, name, member)

    monkeypatch.setattr(PackReader, "digest", hashed)
    monkeypatch.setattr(PackReader, "find_entry", found)
    assert recover(small).problems == []
    assert not (small / "packs" / pack.name).exists()


def test_the_catalog_of_another_store_is_ignored(small: Path, tmp_path: Path) -> None:
    """A catalog copied by mistake: our versions are not lost, and it does not replace ours."""
    with ckstore.open(small) as opened:
        opened.tag("a@1", "best")
    with ckstore.init(tmp_path / "other") as other:
        for step in (0, 1, 2):
            other.ingest({"v": weights(step + 7)}, run="a", step=step)
    before = steps(small)
    shutil.copy(tmp_path / "other" / "catalog.sqlite", small / "catalog.sqlite")
    [problem] = recover(small).problems
    assert "belongs to another store" in problem
    assert steps(small) == before
    with ckstore.open(small) as opened:
        assert opened._catalog.tags() == {"best": before[1][0]}
        assert opened.ingest({"w": weights(2)}, run="a", step=2).version.number == 3
    assert recover(small).problems == []


def test_a_catalog_whose_transactions_fail(small: Path) -> None:
    """SQLite finds the damage when the lock is given up that kept writers out."""
    before = steps(small)
    with (small / "catalog.sqlite").open("r+b") as file:
        file.seek(3000)
        file.write(b"damage" * 100)
    assert recover(small).problems == []
    assert steps(small) == before


def test_packs_that_a_failed_change_removes_are_not_missed(
    directory: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that fails while `recover` is at work takes its packs back; that may have listed them already."""
    listed = Event()
    built = Event()
    step_of = durable.checkpoint

    def checkpoint(step: str) -> None:
        step_of(step)
        if step == "catalog-built":
            built.set()
            # As long as the removal of packs would take if it did not wait.
            listed.wait(1.0)

    path = directory / "store"
    with ckstore.init(path) as store:
        store.ingest(paths[0], run="a")
        monkeypatch.setattr(durable, "checkpoint", checkpoint)
        commit = Change.commit_version

        def failed(change: Change, *arguments: Any, **named: Any) -> None:
            recovering.start()
            assert built.wait(60)
            raise ValueError("The caller gave up.")

        recovering = Thread(target=lambda: reports.append(recover(path)))
        reports: list[Any] = []
        monkeypatch.setattr(Change, "commit_version", failed)
        with pytest.raises(ValueError, match="gave up"):
            store.ingest(paths[4], run="late")
        listed.set()
        recovering.join()
        monkeypatch.setattr(Change, "commit_version", commit)
    assert reports[0].problems == []
    with ckstore.open(path) as store:
        assert store.verify().problems == []
        assert "late" in {row.run for row in store._catalog.versions()}, "it was complete"


def lines(place: Path) -> int:
    """Recover a store; return how many lines of the recovery were executed."""
    count = 0

    def line(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return line if "ckstore/recovery/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        ckstore.recover(place)
    finally:
        sys.settrace(before)
    return count


def test_each_version_costs_as_much_in_a_longer_run(tmp_path: Path) -> None:
    found = []
    with ckstore.init(tmp_path / "store") as store:
        for step in range(32):
            store.ingest({"weight": np.arange(8) + step}, run="a", step=step, hot=0)
            if step + 1 in (8, 16, 32):
                settled(store)
                shutil.copytree(tmp_path / "store", tmp_path / str(step))
                found.append(lines(tmp_path / str(step)))
    first, second = (found[1] - found[0]) / 8, (found[2] - found[1]) / 16
    assert second <= 1.02 * first


def test_policies_survive(tmp_path: Path) -> None:
    policy = ckstore.Policy(retention=ckstore.Retention(keep_last=3))
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"weight": np.zeros(8, np.float32)}, run="a", step=1)
        store.set_policy(policy, run="a")
    (tmp_path / "store" / "catalog.sqlite").unlink()
    recover(tmp_path / "store")
    with ckstore.open(tmp_path / "store") as store:
        assert store.policy("a") == policy
