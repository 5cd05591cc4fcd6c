"""A local store in front of a bucket: saves are durable in one, then in the other."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.errors import ConflictError, NotFoundError, UnreachableError, UsageError
from ckstore.storage import durable
from ckstore.storage.remote import retries
from ckstore.storage.remote.bucket import ObstoreBucket, _Pace
from ckstore.transfer.transfer import Transfer
from tests.object_store import object_store

pytestmark = pytest.mark.local

#: Seconds after which a push is lost.
LONG = 60


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    with object_store() as server:
        for variable, value in server.anywhere.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "cache"))
        ckstore.init(f"{server.url}/gpt").close()
        yield f"{server.url}/gpt"


def state(step: int) -> dict[str, Any]:
    return {"weight": np.random.default_rng(step).standard_normal(100_000).astype(np.float32), "step": step}


def steps(place: str) -> list[int | None]:
    with ckstore.open(place, "r") as store:
        return [version.step for version in store.versions()]


def test_versions_reach_the_bucket_and_old_ones_leave_the_disk(url: str) -> None:
    with ckstore.open(url, local="disk") as store, store.saver("gpt") as saver:
        for step in range(1, 6):
            row = saver.save(state(step), step=step).result().version
            assert store.pushed(row.number).result(LONG).step == step
        for number in range(1, 6):  # Some have left the disk.
            assert store.pushed(number).result(LONG).step == number
        with pytest.raises(NotFoundError):
            store.pushed(6)
    assert steps(url) == [1, 2, 3, 4, 5]
    assert steps("disk") == [4, 5]
    with ckstore.open(url, local="disk") as store:
        assert store.pushed("gpt@1").result(LONG).step == 1
        with pytest.raises(NotFoundError):
            store.pushed("gpt@6")
    assert sum(path.stat().st_size for path in Path("disk").rglob("*.zip")) < 3 * 400_000
    with ckstore.open("disk") as store, pytest.raises(UsageError, match="in front of no bucket"):
        store.pushed("gpt")


def test_a_death_between_the_stages_loses_nothing(url: str) -> None:
    """The next program sends the version of the killed one."""
    program = f"""
import ckstore, os, signal
from tests.test_tier import state
store = ckstore.open({url!r}, local="disk", options={{"bandwidth": "1000"}})
store.ingest(state(7), run="gpt", step=7)
store.pushed("gpt@7")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert (steps(url), steps("disk")) == ([], [7])
    with ckstore.open(url, local="disk", options={"bandwidth": "100000000"}) as store:
        assert store.pushed("gpt").result(LONG).step == 7
        assert store["gpt@latest"].step == 7
    assert steps(url) == [7]


def test_saves_go_on_while_the_bucket_is_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.open(url, local="disk") as store:
        store.ingest(state(1), run="gpt", step=1)
        store.pushed("gpt@1").result(LONG)
        with monkeypatch.context() as patch:
            patch.setattr(retries, "PATIENCE", 0.1)
            for name in ("put", "put_absent", "read"):
                patch.setattr(ObstoreBucket, name, away)
            store.ingest(state(2), run="gpt", step=2)
            assert store["gpt@latest"].step == 2
            store.close()  # Does not wait for the bucket.
    assert steps(url) == [1]
    ckstore.open(url, local="disk").close()
    assert steps(url) == [1, 2]


def test_a_program_starts_while_the_bucket_is_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckstore.open(url, local="disk").close()
    monkeypatch.setattr("ckstore.intake.tier._AGAIN", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(retries, "PATIENCE", 0.1)
        for name in ("put", "put_absent", "read", "list"):
            patch.setattr(ObstoreBucket, name, away)
        with pytest.raises(UnreachableError):
            ckstore.open(url, local="new")
        store = ckstore.open(url, local="disk")
        store.ingest(state(1), run="gpt", step=1)
        assert store["gpt@latest"].step == 1
        with pytest.raises(UnreachableError):
            store.pushed("gpt@2")
    with store:
        assert store.pushed("gpt@1").result(LONG).step == 1
        with ckstore.open(url) as bucket:
            bucket.ingest(state(2), run="gpt", step=2)
        assert store["gpt@2"].step == 2
    ckstore.open(url, local="new").close()
    assert steps(url) == [1, 2]


def test_a_version_that_is_forgotten_before_it_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, and later ones are sent."""
    monkeypatch.setattr("ckstore.intake.tier._AGAIN", 0.1)
    with ckstore.open(url, local="disk") as store:
        with monkeypatch.context() as patch:
            patch.setattr(retries, "PATIENCE", 0.1)
            for name in ("put", "put_absent", "read"):
                patch.setattr(ObstoreBucket, name, away)
            for step in (1, 2):
                store.ingest(state(step), run="gpt", step=step)
            first, second = (store.pushed(f"gpt@{step}") for step in (1, 2))
            with ckstore.open("disk") as disk:
                disk.forget("gpt@1")
        assert second.result(LONG).step == 2
        with pytest.raises(NotFoundError):
            first.result(LONG)
    assert steps(url) == [2]


def test_versions_stay_whose_packs_the_bucket_has_lost(url: str) -> None:
    with ckstore.open(url) as store:
        store.set_policy(ckstore.Policy(hot=9))  # Encoding it would write another pack.
    with ckstore.open(url, local="disk") as store:
        store.ingest(state(1), run="gpt", step=1)
        store.pushed("gpt").result(LONG)
    bucket = ObstoreBucket(url, {})
    bucket.delete([item.name for item in bucket.list("packs/") if ".raw" in item.name])
    with ckstore.open(url, local="disk") as store:
        for step in (2, 3, 4):
            store.ingest(state(step), run="gpt", step=step)
            store.pushed("gpt").result(LONG)
    assert steps("disk") == [1, 3, 4]


def test_tags_and_metrics_reach_the_bucket_after_their_versions(url: str) -> None:
    """Also those of versions that leave the disk, and moved and removed ones."""
    with ckstore.open(url, local="disk") as store:
        for step in range(1, 6):
            store.ingest(state(step), run="gpt", step=step, metrics={"loss": 1.0, "other": 2.0})
            store.pushed(f"gpt@{step}").result(LONG)
            store.set_metrics(f"gpt@{step}", {"val": step / 2, "loss": float("nan")}, remove=["other"])
            store.tag(f"gpt@{step}", "last")
        for tag in ("gone", "moved"):
            store.tag("gpt@5", tag)
    with ckstore.open(url, local="disk") as store:
        store.untag("gone")
        store.tag("gpt@4", "moved")
        assert store["moved"].step == 4
        store.set_metrics("gpt@5", {"later": 1})
    with ckstore.open(url, "r") as bucket:
        assert {name: version.step for name, version in bucket.tags().items()} == {"last": 5, "moved": 4}
        for version in bucket.versions():
            assert version.metrics.keys() == {"loss", "val"} | ({"later"} if version.step == 5 else set())
            assert version.metrics["val"] == version.step / 2
            assert str(version.metrics["loss"]).lower() == "nan"
    assert steps("disk") == [4, 5]


def test_a_tag_that_another_machine_moves_is_not_moved_back(url: str) -> None:
    with ckstore.open(url, local="disk") as store:
        for step in (1, 2):
            store.ingest(state(step), run="gpt", step=step)
        store.tag("gpt@1", "best")
    with ckstore.open(url, local="other") as other:
        assert other["best"].step == 1
        assert other["gpt@2"].step == 2
        other.tag("gpt@2", "best")
    with ckstore.open(url, local="disk") as store:
        assert store["best"].step == 2
        store.ingest(state(3), run="gpt", step=3)
    with ckstore.open(url, "r") as bucket:
        assert bucket["best"].step == 2


def test_the_best_version_is_that_of_the_disk_and_the_bucket(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.open(url, local="disk") as store:
        for step, loss in enumerate((0.1, 0.5, 0.6, 0.7), 1):
            store.ingest(state(step), run="gpt", step=step, metrics={"loss": loss, "reward": loss})
        store.pushed("gpt@4").result(LONG)
    assert steps("disk") == [3, 4]
    with ckstore.open(url, local="disk") as store:
        assert [store[name].step for name in ("best:loss", "gpt@most:loss", "best:reward")] == [1, 4, 4]
        with monkeypatch.context() as patch:
            patch.setattr(retries, "PATIENCE", 0.1)
            patch.setattr(ObstoreBucket, "put_absent", away)
            for step, loss in ((5, 0.3), (6, 0.9)):
                store.ingest(state(step), run="gpt", step=step, metrics={"loss": loss, "reward": loss})
            assert [store[name].step for name in ("best:loss", "best:reward", "gpt@latest")] == [1, 6, 6]


def test_a_disk_changes_neither_what_the_bucket_keeps_nor_its_bucket(url: str) -> None:
    with ckstore.open(url, local="disk") as store:
        store.ingest(state(1), run="gpt", step=1)
        for change in (
            lambda: store.forget("gpt@1"), lambda: store.thin("gpt@1"), lambda: store.rename_run("gpt", "other"),
            lambda: store.set_policy(ckstore.Policy(retention=ckstore.Retention(keep_last=1))),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=f"in front of {url}; open that store itself"):
                change()
    ckstore.init(f"{url}-b").close()
    with pytest.raises(ConflictError, match=f"disk is in front of {url}; name another directory"):
        ckstore.open(f"{url}-b", local="disk")
    with ckstore.open("own", create=True) as own:
        own.ingest(state(1), run="own", step=1)
    with pytest.raises(ConflictError, match="own is a store of its own; name another directory"):
        ckstore.open(url, local="own")
    assert (steps(url), steps(f"{url}-b"), steps("own")) == ([1], [], [1])


@pytest.mark.parametrize("is_tagged", [False, True])
def test_a_version_that_was_replaced_is_replaced_in_the_bucket(url: str, is_tagged: bool) -> None:
    """Not one of another machine, nor a tagged one."""
    with ckstore.open(url, local="disk") as store:
        store.ingest(state(1), run="gpt", step=1)
        store.pushed("gpt@1").result(LONG)
    if is_tagged:
        with ckstore.open(url) as bucket:
            bucket.tag("gpt@1", "best")
    with ckstore.open(url, local="disk") as store:
        store.ingest(state(2), run="gpt", step=1, replace=True)
        if is_tagged:
            with pytest.raises(ConflictError, match="tagged best"):
                store.pushed("gpt@1").result(LONG)
        else:
            assert store.pushed("gpt@1").result(LONG).step == 1
    with ckstore.open(url, "r") as bucket:
        assert bucket["gpt@1"].state_dict()["step"] == (1 if is_tagged else 2)
    with ckstore.open(url, local="other") as store:
        store.ingest(state(3), run="gpt", step=1, replace=True)
        with pytest.raises(ConflictError):
            store.pushed("gpt@1").result(LONG)


@pytest.mark.parametrize("is_killed", [False, True])
def test_changes_while_the_bucket_is_away_reach_it_later(url: str, is_killed: bool) -> None:
    """Tags that were moved or removed, and metrics; also if the program is killed."""
    with ckstore.open(url, local="disk") as store:
        for step in (1, 2, 3):
            store.ingest(state(step), run="gpt", step=step, metrics={"loss": 1.0, "other": 2})
        for tag in ("best", "gone"):
            store.tag("gpt@2", tag)
    program = f"""
import ckstore, os, signal
from tests.test_tier import *
retries.PATIENCE = 0.1
for name in ("put", "put_absent", "read", "list"):
    setattr(ObstoreBucket, name, away)
store = ckstore.open({url!r}, local="disk")
store.set_metrics("gpt@2", {{"loss": 9.0, "later": True}}, remove=["other"])
store.tag("gpt@3", "best")
store.untag("gone")
assert store["best"].step == 3
os.kill(os.getpid(), signal.SIGKILL) if {is_killed} else store.close()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9 * is_killed
    with ckstore.open(url, local="disk") as store:
        assert store["best"].step == 3
        for step in (4, 5):
            store.ingest(state(step), run="gpt", step=step)
        store.pushed("gpt@5").result(LONG)
    with ckstore.open(url, "r") as bucket:
        assert {name: version.step for name, version in bucket.tags().items()} == {"best": 3}
        assert bucket["gpt@2"].metrics == {"loss": 9.0, "later": True}


def test_a_tag_is_sent_that_is_set_while_an_earlier_version_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, begun, gate = Transfer.run, threading.Event(), threading.Event()

    def waiting(transfer: Transfer, rows: Any) -> Any:
        begun.set()
        assert gate.wait(LONG)
        return run(transfer, rows)

    with ckstore.open(url, local="disk") as store:
        monkeypatch.setattr(Transfer, "run", waiting)
        store.ingest(state(1), run="gpt", step=1)
        assert begun.wait(LONG)
        store.ingest(state(2), run="gpt", step=2)
        store.tag("gpt@2", "best")
        gate.set()
    with ckstore.open(url, "r") as bucket:
        assert [*bucket.tags()] == ["best"]


def test_a_version_that_the_bucket_forgets_keeps_no_later_one_out(url: str) -> None:
    with ckstore.open(url, local="disk") as store:
        for step in (1, 2, 3):
            store.ingest(state(step), run="gpt", step=step)
            store.pushed("gpt").result(LONG)
        with ckstore.open(url) as bucket:
            bucket.forget("gpt@3")
        for step in (4, 5):
            store.ingest(state(step), run="gpt", step=step)
            store.pushed("gpt").result(LONG)
    assert steps(url) == [1, 2, 4, 5]


def test_a_replacement_stays_until_it_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that means the version in the bucket does not bring that back, and one replaces the other in turns."""
    run, gate = Transfer.run, threading.Event()

    def waiting(transfer: Transfer, rows: Any) -> Any:
        assert gate.wait(LONG)
        return run(transfer, rows)

    with ckstore.open(url, local="disk") as store:
        store.ingest(state(1), run="gpt", step=1, metrics={"loss": 0.1})
        store.pushed("gpt@1").result(LONG)
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "run", waiting)
            store.ingest(state(2), run="gpt", step=1, replace=True, metrics={"loss": 0.5})
            assert store["best:loss"].state_dict()["step"] == 2
            gate.set()
            store.pushed("gpt@1").result(LONG)
        store.ingest(state(1), run="gpt", step=1, replace=True)
        store.pushed("gpt@1").result(LONG)
    with ckstore.open(url, "r") as bucket:
        assert bucket["gpt@1"].state_dict()["step"] == 1


def test_a_version_that_was_fetched_is_not_the_latest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.open(url, local="disk") as store:
        for step in (1, 2, 3, 4):
            store.ingest(state(step), run="gpt", step=step)
            store.pushed("gpt").result(LONG)
    with ckstore.open(url, local="disk") as store, monkeypatch.context() as patch:
        patch.setattr(retries, "PATIENCE", 0.1)
        patch.setattr(ObstoreBucket, "put_absent", away)
        store.ingest(state(5), run="gpt", step=5)
        assert store["gpt@1"].step == 1
        assert store["latest"].step == 5


def test_a_disk_may_be_new_twice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program died before the disk had its note."""
    with monkeypatch.context() as patch:
        patch.setattr("ckstore.intake.tier.durable.write_file", away)
        with pytest.raises(UnreachableError):
            ckstore.open(url, local="disk")
    ckstore.open(url, local="disk").close()


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_the_clock_of_a_machine_does_not_choose_the_newer_version(
    url: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(durable, "timestamp", lambda: shifted(ahead))
        with ckstore.open(url, local="disk") as store:
            for step in (1, 2):
                store.ingest(state(step), run="gpt", step=step)
    with ckstore.open(url, local="other") as other:
        assert other["gpt@latest"].step == 2
        for step in (3, 4):
            other.ingest(state(step), run="gpt", step=step)
    with ckstore.open(url, local="disk") as store:
        assert store["gpt@latest"].step == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Transfer, "run", fail)
    with ckstore.open(url, local="disk") as store:
        for step in (1, 2):
            store.ingest(state(step), run="gpt", step=step)
            with pytest.raises(CancelledError):
                store.pushed("gpt").result(LONG)
    monkeypatch.undo()


def shifted(seconds: int) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def away(*_: Any, **__: Any) -> Any:
    raise UnreachableError("The bucket is away.")


def test_another_machine_goes_on_from_the_bucket_and_a_lost_version_is_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.open(url, local="disk") as store:
        store.ingest(state(1), run="gpt", step=1)
    with ckstore.open("disk") as store:
        store.ingest(state(2), run="gpt", step=2)  # Only on a machine that is lost.
    with ckstore.open(url, local="other") as store:
        found = store["gpt@latest"].state_dict()
        assert found["step"] == 1
        assert np.array_equal(found["weight"], state(1)["weight"])
        store.ingest(state(9) | {"step": 2}, run="gpt", step=2)
        store.ingest(state(3), run="gpt", step=3)
        assert "gpt@3" in store
    with ckstore.open(url, local="disk") as store:
        lost = store._catalog.resolve("gpt@2")
        with pytest.raises(ConflictError, match="went on without"):
            store.pushed(lost.number).result(LONG)
        assert store["gpt@latest"].step == 3
        assert np.array_equal(store["gpt@2"].state_dict()["weight"], state(9)["weight"])
    assert steps(url) == [1, 2, 3]


def test_files_are_sent_at_a_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("ckstore.storage.remote.bucket.time.monotonic", lambda: 0.0)
    monkeypatch.setattr("ckstore.storage.remote.bucket.time.sleep", waits.append)
    data = bytes(range(256)) * 4096
    (tmp_path / "file").write_bytes(data)
    pace = _Pace(1 << 18)
    assert b"".join(pace.pieces(tmp_path / "file")) == data
    assert waits == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(UsageError, match="bytes a second"):
        ObstoreBucket("s3://a/b", {"bandwidth": "fast"})
