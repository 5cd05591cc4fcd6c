"""A run that goes on from an earlier version of its own: the versions after that one are superseded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import ckstore
from ckstore.cli.program import run
from ckstore.commit.change import Change
from ckstore.errors import ConflictError, UsageError
from ckstore.policy import Policy, Retention
from ckstore.retention.encoder import BackgroundEncoder
from ckstore.storage import change_log, durable
from ckstore.storage.remote import mirror as mirror_module
from ckstore.writing.describe import describe
from tests.checkpoints import settled
from tests.storage.remote.simulated import SimulatedServer

URL = "s3://models/team-a"


def state(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"weight": np.random.default_rng(seed).standard_normal((40, 40)).astype("f4")}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimulatedServer:
    made = SimulatedServer()
    monkeypatch.setattr(mirror_module, "ObstoreBucket", lambda url, options: made.client(url))
    return made


class Crash(BaseException):
    """The process dies."""


@contextmanager
def killed(at: str) -> Iterator[None]:
    """Let the process die when a commit with a log record reaches a step; with `packs`, before it writes the record."""
    seen: list[str] = []

    def stop(step: str) -> None:
        seen.append(step)
        if step == at and "log-written" in seen:
            raise Crash

    append = Crash() if at == "packs" else change_log.append
    with (
        mock.patch.object(change_log, "append", side_effect=append),
        mock.patch.object(durable, "checkpoint", stop),
        mock.patch("ckstore.commit.change.remove_uncommitted"),
        pytest.raises(Crash),
    ):
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    """Steps 4, 8 and 12 of the run `gpt`, as versions 1 to 3."""
    # Encodings have commits of their own.
    with mock.patch.object(BackgroundEncoder, "begin"), ckstore.init(tmp_path / "store") as made:
        for step in (4, 8, 12):
            made.ingest(state(step), run="gpt", step=step)
        made.encode([1])
        yield made


def superseded(store: ckstore.Store) -> list[int]:
    return [version.number for version in store.versions() if version.superseded]


def rows(store: ckstore.Store) -> list[tuple[Any, ...]]:
    return [(row.number, row.uid, row.run, row.step, row.parent, row.superseded) for row in store._catalog.versions()]


def is_whole(store: ckstore.Store) -> None:
    """Check that the store has no fault, and that a recovery gives the same rows, with and without the catalog."""
    path, before, problems = Path(store.path), rows(store), store.verify().problems
    assert problems == []
    names = {name: store[name].number for name in ("latest", "gpt", "gpt@latest")}
    for lost in (False, True):
        store.close()
        if lost:
            (path / "catalog.sqlite").unlink()
        assert ckstore.recover(path).problems == []
        with ckstore.open(path) as again:
            assert rows(again) == before
            assert {name: again[name].number for name in names} == names
            assert again.verify().problems == []


def test_the_versions_after_the_parent_are_superseded(store: ckstore.Store) -> None:
    version = store.ingest(state(1), run="gpt", step=6, parent="gpt@4").version
    assert (version.parent, version.superseded, superseded(store)) == (1, False, [2, 3])
    for name in ("latest", "gpt", "gpt@latest"):
        assert store[name].number == version.number
    # A default parent is the new tip.
    assert store.ingest(state(2), run="gpt", step=7).version.parent == version.number
    assert superseded(store) == [2, 3]
    is_whole(store)


def test_steps_of_superseded_versions_are_free(store: ckstore.Store) -> None:
    new = store.ingest(state(1), run="gpt", step=8, parent="gpt@4").version
    assert (store["gpt@8"].number, store[2].step, store[store[2].id].number) == (new.number, 8, 2)
    # A step that only a superseded version has means that version.
    assert store["gpt@12"].number == 3
    assert store.ingest(state(2), run="gpt", step=12).is_new
    assert store["gpt@12"].number == 5
    is_whole(store)


def test_the_step_of_an_ancestor_is_taken(store: ckstore.Store) -> None:
    with pytest.raises(ConflictError, match="holds other content as version 1"):
        store.ingest(state(1), run="gpt", step=4, parent="gpt@8")
    assert superseded(store) == []


def test_a_replaced_version_is_forgotten_and_the_others_are_superseded(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4", replace=True)
    assert [(version.number, version.superseded) for version in store.versions()] == [(1, False), (3, True), (4, False)]
    is_whole(store)


@pytest.mark.parametrize("parent", [None, "gpt@12", "auto"])
def test_the_tip_or_no_parent_supersedes_nothing(store: ckstore.Store, parent: str | None) -> None:
    store.ingest(state(1), run="gpt", step=16, parent=parent)
    store.ingest(state(4), run="gpt", step=20, parent="auto")
    assert superseded(store) == []


def test_the_version_with_the_highest_step_is_a_tip(store: ckstore.Store) -> None:
    """Earlier steps may be stored later; then the run goes on from its highest one."""
    store.ingest(state(6), run="gpt", step=6)
    store.ingest(state(1), run="gpt", step=16, parent="gpt@12")
    assert superseded(store) == []


def test_a_parent_in_another_run_supersedes_nothing(store: ckstore.Store) -> None:
    store.ingest(state(1), run="tuned", step=8, parent="gpt@4")
    assert (superseded(store), store["latest"].name) == ([], "tuned@8")
    assert not store["tuned@8"]._stored.document.goes_back
    assert not [record for record in store._catalog.log_records() if record["change"] == "supersede"]


def test_going_back_to_a_superseded_version(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.ingest(state(2), run="gpt", step=12)
    version = store.ingest(state(3), run="gpt", step=16, parent=2).version
    # Version 3 came after version 2 on the first branch.
    assert (version.parent, superseded(store)) == (2, [3, 4, 5])
    assert (store["gpt@8"].number, store["gpt@12"].number, store["gpt"].number) == (2, 5, version.number)
    is_whole(store)


@pytest.mark.parametrize("other", [12, 16])
def test_the_step_of_a_superseded_parent_is_taken(store: ckstore.Store, other: int) -> None:
    store.ingest(state(1), run="gpt", step=other, parent="gpt@4")
    for step in (4, 8, 12):
        with pytest.raises(ConflictError, match="holds other content"):
            store.ingest(state(2), run="gpt", step=step, parent=3)
    assert not store.ingest(state(8), run="gpt", step=8, parent=3).is_new
    assert superseded(store) == [2, 3]
    store.ingest(state(2), run="gpt", step=12, parent=3, replace=True)
    assert [(version.step, version.superseded) for version in store.versions()] == [
        (4, False), (8, False), (other, True), (12, False),
    ]  # fmt: skip
    is_whole(store)


def test_a_run_whose_name_another_process_has_given_to_a_tag_is_refused(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Change.finish

    def tagged(*arguments: Any, **named: Any) -> None:
        finish(*arguments, **named)
        store.tag(1, "tuned")

    monkeypatch.setattr(Change, "finish", tagged)
    with pytest.raises(UsageError, match="tuned is a tag"):
        store.ingest(state(1), run="tuned", step=1)


def test_equal_content_at_a_step_of_the_run_is_not_stored_again(store: ckstore.Store) -> None:
    assert not store.ingest(state(8), run="gpt", step=8, parent="gpt@4").is_new
    assert superseded(store) == []
    first = store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    again = store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    assert (again.is_new, again.version.number) == (False, first.version.number)
    # The content of a superseded version is a new version of the present branch.
    third = store.ingest(state(12), run="gpt", step=12)
    assert (third.is_new, third.version.parent) == (True, first.version.number)
    is_whole(store)


def test_versions_without_steps(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for seed in range(3):
            store.ingest(state(seed), run="gpt")
        store.ingest(state(9), run="gpt", parent=1)
        assert (superseded(store), store["gpt"].number) == ([2, 3], 4)
        assert store.ingest(state(2), run="gpt").is_new
        assert not store.ingest(state(9), run="gpt").is_new
        is_whole(store)


def test_if_the_new_branch_is_forgotten_the_old_one_stays_superseded(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.forget("gpt@8")
    assert (store["gpt"].number, superseded(store)) == (1, [2, 3])
    store.forget(1)
    assert store["gpt"].number == 3
    # Only superseded versions are left: the next version makes its parent present.
    assert store.ingest(state(2), run="gpt", step=16).version.parent == 3
    assert superseded(store) == []
    is_whole(store)


def test_a_writer_that_was_overtaken_goes_on_with_the_old_branch(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process goes back between the beginning and the commit of an ingest after the former tip."""

    def overtaken(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr("ckstore.writing.ingest.describe", describe)
        with ckstore.open(store.path) as other:
            other.ingest(state(2), run="gpt", step=8, parent="gpt@4")
        return describe(*arguments, **named)

    monkeypatch.setattr("ckstore.writing.ingest.describe", overtaken)
    late = store.ingest(state(1), run="gpt", step=16).version
    assert (late.parent, late.superseded, superseded(store)) == (3, True, [2, 3, 4])
    assert store["gpt"].number == 5
    is_whole(store)


@pytest.mark.long
@pytest.mark.parametrize("at", ["packs", "log-written", "before-commit", "after-commit"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["catalog", "no catalog"])
def test_a_killed_commit_is_done_after_a_recovery(store: ckstore.Store, at: str, is_lost: bool) -> None:
    parent, gone = 1, [2, 3]
    if is_lost:
        store.ingest(state(2), run="gpt", step=9, parent="gpt@4")
        store.encode([2])
        parent, gone = 2, [3, 4]  # It is superseded itself.
    with killed(at):
        store.ingest(state(1), run="gpt", step=12, parent=parent, hot=0)
    store.close()
    path = Path(store.path)
    if is_lost:
        (path / "catalog.sqlite").unlink()
    ckstore.recover(path)
    with ckstore.open(path) as again:
        assert (superseded(again), again["gpt@12"].parent, again["gpt"].step) == (gone, parent, 12)
        is_whole(again)


@pytest.mark.parametrize("at", ["packs", "before-commit"])
def test_a_killed_commit_that_was_overtaken_is_superseded(store: ckstore.Store, at: str) -> None:
    with killed(at):
        store.ingest(state(1), run="gpt", step=16, parent="gpt@4", hot=0)
    store.close()
    path = Path(store.path)
    with ckstore.open(path) as again:
        number = again.ingest(state(2), run="gpt", step=8, parent="gpt@4").version.number
        again.ingest(state(3), run="gpt", step=12)
        again.tag(2, "before")
    ckstore.recover(path)
    with ckstore.open(path) as again:
        # The killed version comes back, but the run went on without it.
        assert (again["gpt"].step, again["gpt@8"].number, again[2].superseded) == (12, number, True)
        assert again["gpt@16"].superseded
        is_whole(again)


@pytest.mark.parametrize("is_lost", [False, True], ids=["catalog", "no catalog"])
@pytest.mark.parametrize("has_pack", [True, False])
def test_the_record_of_a_killed_commit_does_not_count_once_the_run_went_on(
    store: ckstore.Store, is_lost: bool, has_pack: bool
) -> None:
    """An ingest after the former tip has no record that would say so."""
    if is_lost and not has_pack:
        pytest.skip("nothing tells whether such a version was there")
    store.encode()  # Its records would come after the other one.
    logged = len(list((store.path / "log").iterdir()))
    with killed("before-commit"), mock.patch.object(change_log, "withdraw"):
        store.ingest(state(1), run="gpt", step=6, parent="gpt@4", hot=0)
    store.close()
    path = Path(store.path)
    with ckstore.open(path) as again:
        if not has_pack:
            known = {pack.name for pack in again._catalog.packs()}
            [left] = [pack for pack in (path / "packs").iterdir() if pack.name not in known]
            left.unlink()
        again.ingest(state(2), run="gpt", step=16, hot=0)
        before = rows(again)
    assert len(list((path / "log").iterdir())) == logged + 1
    if is_lost:
        (path / "catalog.sqlite").unlink()
    for _ in range(2):
        assert ckstore.recover(path).problems == []
        with ckstore.open(path) as again:
            assert [row for row in rows(again) if row[0] != 4] == before
            assert superseded(again) == [4] * has_pack
            assert again["gpt"].number == 5
            is_whole(again)


def test_a_lost_log_is_made_up_for_by_the_manifests(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.ingest(state(2), run="gpt", step=20)
    store.ingest(state(3), run="gpt", step=16, parent=3)
    before = rows(store)
    path = Path(store.path)
    store.close()
    for record in (path / "log").iterdir():
        record.unlink()
    for lost in (False, True):
        if lost:
            (path / "catalog.sqlite").unlink()
        ckstore.recover(path)
        with ckstore.open(path) as again:
            assert rows(again) == before


def test_verify_names_a_wrong_mark(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=6, parent="gpt@4")
    before = rows(store)
    store._catalog.mark_versions([], [2])
    assert any("superseded, unlike in the log" in problem for problem in store.verify().problems)
    store.close()
    ckstore.recover(store.path)
    with ckstore.open(store.path) as again:
        assert rows(again) == before


def test_ranges_and_runs_leave_superseded_versions_out(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4", metrics={"loss": 3.0})
    store.ingest(state(2), run="gpt", step=16, metrics={"loss": 2.0})
    run = store.run("gpt")
    assert (run.steps, run.latest.number, run[8].number) == ([4, 8, 16], 5, 4)
    assert run.arrays.attrs["steps"] == [4, 8, 16]
    assert store.runs() == [run]
    assert [version.number for version in store.select(["gpt@4..gpt@16"])] == [1, 4, 5]
    assert [version.number for version in store.select(["gpt@4..gpt@12"])] == [1, 3, 4]
    assert [version.number for version in store.select(["1..5"])] == [1, 2, 3, 4, 5]
    assert [version.number for version in store.select(run="gpt", keep_last=2)] == [1, 2, 3]
    assert len(store.report("gpt").contents["runs"][0]["versions"]) == 3


def test_the_best_version_is_a_present_one(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=16, metrics={"loss": 1.0})
    store.ingest(state(2), run="gpt", step=8, parent="gpt@4")
    # No other version has the metric.
    assert (store["best:loss"].number, store["gpt@least:loss"].number) == (4, 4)
    store.ingest(state(3), run="gpt", step=12, metrics={"loss": 2.0})
    for name in ("best:loss", "gpt@best:loss", "least:loss", "most:loss"):
        assert store[name].number == 6


def test_retention_takes_superseded_versions_first(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.set_policy(Policy(retention=Retention(keep_last=4)), "gpt")
    # There is room for two others.
    assert store.retain().forgotten == []
    store.tag(2, "before")
    store.ingest(state(2), run="gpt", step=12)
    assert [row.number for row in store.retain().forgotten] == []
    store.ingest(state(3), run="gpt", step=16)
    assert [row.number for row in store.retain().forgotten] == [3]
    store.untag("before")
    assert [row.number for row in store.retain().forgotten] == [2]
    is_whole(store)


def test_latest_hot_versions_are_present_ones(store: ckstore.Store) -> None:
    store.set_policy(Policy(hot=1), "gpt")
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    assert store._catalog.hot_sizes("gpt", 1).keys() <= {1, 2, 3}


@pytest.mark.parametrize("once", [True, False], ids=["at once", "before and after"])
def test_a_push_sends_the_marks(store: ckstore.Store, tmp_path: Path, once: bool) -> None:
    with ckstore.init(tmp_path / "other") as other:
        if not once:
            store.push(other)
        store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
        store.ingest(state(2), run="gpt", step=12)
        for dry_run in (True, False):
            report = store.push(other, dry_run=dry_run)
            assert (report.failed, len(report.versions)) == ([], 5 if once else 2)
        assert rows(other) == rows(store)
        is_whole(other)
    with ckstore.open(tmp_path / "other") as other:
        # The other store goes back again; later versions of this one go on from their own parent.
        other.ingest(state(3), run="gpt", step=9, parent=2)
        assert superseded(other) == [3, 4, 5]
        store.ingest(state(4), run="gpt", step=16)
        store.push(other)
        assert (superseded(other), other["gpt"].step) == ([2, 3, 6], 16)
        assert store.pull(other).failed == []
        assert [version.superseded for version in store.versions() if version.step == 9] == [True]
        is_whole(other)


def test_superseded_versions_that_recover_found_first_are_marked(
    store: ckstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Change.commit_version

    def interposed(self: Change, *arguments: Any, **named: Any) -> int:
        ckstore.recover(tmp_path / "other")
        return commit(self, *arguments, **named)

    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    monkeypatch.setattr(Change, "commit_version", interposed)
    with ckstore.init(tmp_path / "other") as other:
        assert store.push(other).failed == []
        assert rows(other) == rows(store)
        is_whole(other)


def test_a_mirror_follows_the_marks(server: SimulatedServer, tmp_path: Path) -> None:
    with ckstore.init(URL, cache=tmp_path / "a") as first, ckstore.open(URL, cache=tmp_path / "b") as second:
        for step in (4, 8, 12):
            first.ingest(state(step), run="gpt", step=step)
        second._catalog.refresh()
        second.ingest(state(1), run="gpt", step=8, parent="gpt@4")
        first._catalog.refresh()
        assert rows(first) == rows(second)
        assert (superseded(first), first["gpt"].number) == ([2, 3], 4)
        assert first.verify().problems == second.verify().problems == []
    with ckstore.open(URL, cache=tmp_path / "c") as third:
        assert superseded(third) == [2, 3]


def test_gc_thin_and_rebase_keep_the_marks(store: ckstore.Store) -> None:
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    store.encode()
    store.thin([2])
    store.rebase([3])
    store.forget([2])
    store.gc(grace=0)
    assert superseded(store) == [3]
    is_whole(store)


def test_the_command_line_marks_superseded_versions(store: ckstore.Store, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*arguments: str) -> list[str]:
        assert run(["--store", str(store.path), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    assert "SUPERSEDED" not in lines("log")[0]
    store.ingest(state(1), run="gpt", step=8, parent="gpt@4")
    heading, *listed = lines("log")
    assert "SUPERSEDED" in heading
    assert [" yes" in line for line in listed] == [False, True, False, True]
    assert [line[:3].strip() for line in lines("log", "--graph")[1:]] == ["*", "| *", "| *", "|/", "*"]
    assert any(line.startswith("superseded") for line in lines("show", "2"))
    assert not any(line.startswith("superseded") for line in lines("show", "4"))
    assert store[2].describe()["superseded"] is True


def test_the_cost_of_going_back_follows_the_number_of_superseded_versions(tmp_path: Path) -> None:
    """Steps of SQLite in the commit of a version that supersedes two, after few and after many versions."""
    counts = []
    with ckstore.init(tmp_path / "store") as store:
        for count in (5, 25):
            for step in range(len(store), count):
                store.ingest(state(step), run="gpt", step=step)
            settled(store)  # Otherwise the ingest below would encode more than its parent.
            steps: list[int] = []

            def count_one(steps: list[int] = steps) -> None:
                steps.append(1)

            database = store._catalog._connection._database
            database.set_progress_handler(count_one, 1)
            store.ingest(state(100 + count), run="gpt", step=count - 2, parent=f"gpt@{count - 3}", hot=0)
            database.set_progress_handler(None, 1)
            counts.append(len(steps))
            assert superseded(store)[-2:] == [store["gpt"].number - 2, store["gpt"].number - 1]
    assert counts[1] < 1.3 * counts[0]


def test_extremes_of_a_metric_pass_over_superseded_versions(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "extremes") as store:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 9.0)):
            store.ingest({"weight": np.full(8, step)}, run="back", step=step, metrics={"val_loss": loss})
        store.ingest({"weight": np.full(8, 7)}, run="back", step=4, parent="back@1", metrics={"val_loss": 2.0})
        assert [store[f"back@{sense}:val_loss"].step for sense in ("least", "best", "most")] == [4, 4, 1]
