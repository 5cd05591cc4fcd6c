"""A store in an object store acts like a local one, and several mirrors of it agree."""

from __future__ import annotations

import cProfile
import hashlib
import pickle
import pstats
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore import store as store_module
from ckstore.checking import verify as verify_module
from ckstore.checking.catalog_check import CatalogCheck
from ckstore.errors import (
    CkstoreError,
    ConflictError,
    IntegrityError,
    LockedError,
    NoStoreError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from ckstore.gc import collect as collect_module
from ckstore.gc.collect import GcReport, gc
from ckstore.gc.plan import plan_for
from ckstore.policy import Policy
from ckstore.recovery.recover import recover
from ckstore.retention.forget import forget
from ckstore.storage.remote import mirror as mirror_module
from ckstore.storage.remote import retries as retries_module
from ckstore.storage.remote.mirror import EVERY
from ckstore.storage.remote.remote_log import Head, RemoteLog
from ckstore.writing import encode as encode_module
from tests.checkpoints import draw, settled
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer

pytestmark = pytest.mark.local

URL = "s3://models/team-a"


def state(step: int) -> dict[str, Any]:
    weight = draw(300, 256)
    for number in range(1, step + 1):
        weight = weight + draw(300, 256, seed=number, scale=1e-3)
    return {"model": {"weight": weight, "frozen": draw(64, 64, seed=9)}, "step": step}


def files(directory: Path, count: int) -> list[Path]:
    paths = []
    for step in range(count):
        paths.append(directory / f"step{step}.pt")
        torch.save(state(step), paths[-1])
    return paths


def same(store: ckstore.Store, paths: list[Path], target: Path, run: str = "gpt") -> None:
    for step, path in enumerate(paths):
        store[f"{run}@{step}"].checkout(target)
        assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()
        target.unlink()


def test_one_machine_restores_versions_of_another(server: SimulatedServer, directory: Path) -> None:
    paths = files(directory, 4)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step, path in enumerate(paths):
            row = store.ingest(path, run="gpt", step=step, metrics={"loss": 1 / (step + 1), "accuracy": 1}).version
            assert row.number == step + 1
        store.tag("gpt@2", "best")
        same(store, paths, directory / "out")
        assert settled(store).verify().problems == []
        rows = store._catalog.versions()
    with ckstore.open(URL, cache=directory / "b") as store:
        assert store._catalog.versions() == rows
        same(store, paths, directory / "out")
        assert store.verify().problems == []
        np.testing.assert_array_equal(store["best"]["model/weight"][5:7, 3], state(2)["model"]["weight"][5:7, 3])
        again = pickle.loads(pickle.dumps(store))
        assert again["best"]._stored.row == store["best"]._stored.row
        again.close()


def test_a_mirror_is_no_store_by_itself(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="gpt", step=0)
        mirror = store.path
    with pytest.raises(UsageError, match="open that one by its URL"):
        ckstore.open(mirror)
    with pytest.raises(UsageError, match="open that one by its URL"):
        recover(mirror)


def test_a_store_that_stays_open_hears_of_others(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RECENT", 0.0)
    with ckstore.init(URL, cache=directory / "a") as first, ckstore.open(URL, cache=directory / "b") as second:
        first.ingest(state(0), run="gpt", step=0)
        assert second["gpt@latest"].step == 0
        second.tag("gpt@latest", "good")
        assert first["good"].step == 0
        first.set_policy(Policy("coarse"), "gpt")
        assert second.policy("gpt").fidelity == "coarse"
        first.untag("good")
        second.forget(["gpt@0"])
        assert first._catalog.versions() == []


def test_fresh_answers_are_not_requested_again(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(0), run="gpt", step=0)
        store._catalog.refresh()
        before = server.requests.total()
        assert store["gpt@latest"].step == 0
        assert server.requests.total() == before


def test_a_writer_that_is_behind_commits_on_top_of_others(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = files(directory, 3)
    with ckstore.init(URL, cache=directory / "a") as first, ckstore.open(URL, cache=directory / "b") as second:
        first.ingest(paths[0], run="gpt", step=0)
        refresh = second._catalog.refresh
        calls = iter([lambda within: None] * 2)  # The other one commits right after this one has looked.
        monkeypatch.setattr(second._catalog, "refresh", lambda within=0.0: next(calls, refresh)(within))
        report = second.ingest(paths[1], run="other", step=1)
        assert report.version.number == 2
        second._catalog.refresh()
        first._catalog.refresh()
        assert first._catalog.versions() == second._catalog.versions()
        assert [(row.number, row.run) for row in first._catalog.versions()] == [(1, "gpt"), (2, "other")]
        assert first.verify().problems == []


def packs_in(server: SimulatedServer) -> set[str]:
    """Return the names of the packs that lie in the object store."""
    return {name.removeprefix("packs/") for name in server.objects if name.startswith("packs/")}


def test_gc_deletes_dropped_packs_however_often_it_is_called(server: SimulatedServer, directory: Path) -> None:
    """The time that readers are given is counted from when a pack went, and not from when that was last looked at."""
    paths = files(directory, 4)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="gpt", step=step, hot=0)
        before = packs_in(server)
        forget(store._repository, [store._catalog.resolve(name) for name in ("gpt@2", "gpt@3")], for_good=True)
        assert store.gc(grace=100).bytes > 0
        assert before <= packs_in(server)
        records = sum(name.startswith("log/") for name in server.objects)
        for _ in range(3):
            for _ in range(50):
                server.now()
            assert store.gc(grace=100) == GcReport()
        assert packs_in(server) == {pack.name for pack in store._catalog.packs()}
        assert records == sum(name.startswith("log/") for name in server.objects)


def test_encodings_delete_raw_packs(server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later, since others may be reading it, and without a call of gc."""
    monkeypatch.setattr(encode_module, "GRACE", 500.0)
    monkeypatch.setattr(encode_module, "_PAUSE", 0.0)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as reader:
        for step in range(3):
            store.ingest(state(step), run="gpt", step=step, hot=3)
        raw = {name for name in packs_in(server) if name.endswith(".raw.zip")}
        reader._catalog.refresh()
        version = reader["gpt@0"]
        store.encode(["gpt@0"])
        assert raw < packs_in(server)
        assert torch.equal(torch.as_tensor(version["model/weight"][:]), torch.as_tensor(state(0)["model"]["weight"]))
        for _ in range(500):
            server.now()
        store.encode(["gpt@1"])
        left = raw & packs_in(server)
        assert len(raw - left) == len(raw) // 3
        store.encode()
        for _ in range(500):
            server.now()
        store.tag("gpt@2", "later")  # Whose record tells the time.
        store.encode()
        assert not raw & packs_in(server)
        assert torch.equal(torch.as_tensor(version["model/weight"][:]), torch.as_tensor(state(0)["model"]["weight"]))
        assert torch.equal(
            torch.as_tensor(reader["gpt@1"]["model/weight"][:]), torch.as_tensor(state(1)["model"]["weight"])
        )
        assert store.verify().problems == []


def test_a_writer_without_permission_to_delete_encodes_all_the_same(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SimulatedBucket, names: Any) -> None:
        raise UnreachableError("Access denied.")

    monkeypatch.setattr(encode_module, "GRACE", 0.0)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(3):
            store.ingest(state(step), run="gpt", step=step, hot=1)
        monkeypatch.setattr(SimulatedBucket, "delete", refuse)
        monkeypatch.setattr(retries_module, "PATIENCE", 0.0)
        store.encode()
        assert not any(row.hot for row in store._catalog.versions())


def test_gc_makes_a_copy_again_that_went_once(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingest before its commit needs objects that the copy lacks; later none does."""
    both = {"a": draw(300, 256, seed=1), "b": draw(300, 256, seed=2)}
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        store.ingest(both, run="gpt", step=0, hot=0)
        store.ingest({"a": both["a"]}, run="part", step=0, hot=0)
        store.forget(["gpt@0"])
        append, came = RemoteLog.append, []

        def overtaken(self: RemoteLog, *arguments: Any, **named: Any) -> Any:
            if self is store._repository.catalog._log and not came:
                came.append(other.ingest({"b": both["b"]}, run="again", step=0, hot=0).version.number)
            return append(self, *arguments, **named)

        monkeypatch.setattr(RemoteLog, "append", overtaken)
        store.gc(grace=0)
        monkeypatch.setattr(RemoteLog, "append", append)
        store.gc()
        store.forget(came)
        assert store.gc(grace=0).rewritten > 0
        assert packs_in(server) == {pack.name for pack in store._catalog.packs()}
        assert store.verify().problems == []


def test_gc_plans_again_where_its_copy_was_deleted(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        store.ingest({"a": draw(300, 256, seed=1), "b": draw(300, 256, seed=2)}, run="gpt", step=0, hot=0)
        store.ingest({"a": draw(300, 256, seed=1)}, run="part", step=0, hot=0)
        store.forget(["gpt@0"])
        publish = store._repository.packs.publish

        def published(names: list[str]) -> None:
            publish(names)
            monkeypatch.setattr(store._repository.packs, "publish", publish)
            assert other.gc(grace=0).files == len(names)

        monkeypatch.setattr(store._repository.packs, "publish", published)
        store.gc(grace=0)
        assert packs_in(server) == {pack.name for pack in store._catalog.packs()}
        assert store.verify().problems == other.verify().problems == []


def test_gc_reports_leftovers_of_encodings(server: SimulatedServer, directory: Path) -> None:
    """A pack takes space until it is deleted, and counts once."""
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(3):
            store.ingest(state(step), run="gpt", step=step, hot=3)
        raw = {name: len(server.objects[f"packs/{name}"][0]) for name in packs_in(server) if name.endswith(".raw.zip")}
        store.encode(run="gpt")
        predicted = store.gc(dry_run=True)
        assert store.gc() == GcReport()
        report = store.gc(grace=0)
        assert predicted == report
        assert report.files >= len(raw)
        assert report.bytes >= sum(raw.values())
        assert packs_in(server) == {pack.name for pack in store._catalog.packs()}
        assert store.gc(dry_run=True) == store.gc() == GcReport()


@pytest.mark.long
def test_old_snapshots_and_clock_probes_are_deleted(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(2):
            store.ingest(state(step), run="gpt", step=step)
        store.forget(["gpt@1"])
        for number in range(3 * EVERY):
            store.tag("gpt@0", f"t{number % 5}")
        server.objects["probe/old"] = b"now", server.now()
        for _ in range(4000):
            server.now()
        server.objects["probe/new"] = b"now", server.now()
        store.gc(grace=0)
    assert sum(name.startswith("snapshots/") for name in server.objects) == 2
    assert [name for name in server.objects if name.startswith("probe/")] == ["probe/new"]
    with ckstore.open(URL, cache=directory / "b") as other:
        assert len(other._catalog.versions()) == 1


def test_verify_finds_nothing_wrong_while_versions_are_encoded(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack is missed neither between two looks at the mirror and the log, nor when it goes before its turn."""
    monkeypatch.setattr(encode_module, "GRACE", 0.0)
    monkeypatch.setattr(encode_module, "_PAUSE", 0.0)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        for step in range(4):
            store.ingest(state(step), run="gpt", step=step, hot=9)
        for place, step in (("_pack_problems", 0), ("_wrong_fields", 1)):
            real = getattr(CatalogCheck, place)

            def first(*arguments: Any, real: Any = real, place: str = place, step: int = step) -> Any:
                monkeypatch.setattr(CatalogCheck, place, real)
                store.encode([f"gpt@{step}"])
                return real(*arguments)

            monkeypatch.setattr(CatalogCheck, place, first)
            assert store.verify().problems == []
        check_pack, after = verify_module._check_pack, RemoteLog.after

        def late(repository: Any, name: str) -> str:
            monkeypatch.setattr(verify_module, "_check_pack", check_pack)
            other._repository.catalog.refresh()
            other.encode(["gpt@2"])
            return check_pack(repository, name)

        monkeypatch.setattr(verify_module, "_check_pack", late)
        assert store.verify().problems == []

        def followed(self: RemoteLog, head: Any) -> Any:
            found = after(self, head)
            if head == Head():
                monkeypatch.setattr(RemoteLog, "after", after)
                store.encode(["gpt@3"])
            return found

        monkeypatch.setattr(RemoteLog, "after", followed)
        assert store._repository.catalog.differences() == []
        assert not any(row.hot for row in store._catalog.versions())


def test_a_reader_finds_objects_that_gc_has_moved(server: SimulatedServer, directory: Path) -> None:
    paths = files(directory, 4)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as reader:
        for step, path in enumerate(paths):
            store.ingest(path, run="gpt", step=step)
        reader._catalog.refresh()
        version = reader["gpt@3"]
        store.forget(["gpt@0"])
        store.rebase(["gpt@3"])
        store.gc(grace=0)
        version.checkout(directory / "out")
        assert (directory / "out").read_bytes() == paths[3].read_bytes()


@pytest.mark.encoded  # An encoding in the background would leave packs of its own to gc.
def test_a_pack_that_gc_removed_before_its_commit_is_not_referred_to(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = files(directory, 2)
    with ckstore.init(URL, cache=directory / "a") as slow, ckstore.open(URL, cache=directory / "b") as other:
        slow.ingest(paths[0], run="gpt", step=0)
        publish = slow._repository.packs.publish

        def published(names: list[str]) -> None:
            publish(names)
            monkeypatch.undo()
            monkeypatch.setattr(mirror_module, "ObstoreBucket", lambda url, options: server.client(url))
            assert other.gc(grace=0).files == len(names)

        monkeypatch.setattr(slow._repository.packs, "publish", published)
        with pytest.raises(ConflictError, match="removed by `gc` before it was committed; ingest it again"):
            slow.ingest(paths[1], run="gpt", step=1)
        assert slow.ingest(paths[1], run="gpt", step=1).version.number == 3
        same(slow, paths, directory / "out")
        assert other.gc(grace=0).files == 0
        same(other, paths, directory / "out")


def test_a_mirror_is_made_again(server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKSTORE_CACHE", str(directory / "cache"))
    paths = files(directory, 3)
    with ckstore.init(URL) as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="gpt", step=step)
        rows, mirror = settled(store)._catalog.versions(), store.path
    (mirror / "catalog.sqlite").write_bytes(b"junk")
    with pytest.raises(IntegrityError, match="run `ckstore recover`"):
        ckstore.open(URL)
    assert recover(URL).versions == 3
    with ckstore.open(URL) as store:
        assert store._catalog.versions() == rows
        same(store, paths, directory / "out")


def test_a_store_that_was_made_again_is_another_one(server: SimulatedServer, directory: Path) -> None:
    [path] = files(directory, 1)
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(path, run="gpt", step=0)
        server.objects.clear()
        with pytest.raises(IntegrityError, match="was deleted or made again"):
            store._catalog.refresh()


def test_concurrent_changes_are_no_problem_for_verify(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = files(directory, 3)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        for step, path in enumerate(paths):
            store.ingest(path, run="gpt", step=step)
        check = store._catalog.check

        def checked() -> list[str]:
            other._catalog.refresh()
            other.tag("gpt@0", "kept")
            other.forget(["gpt@2"])
            return check()

        with monkeypatch.context() as context:
            context.setattr(store._catalog, "check", checked)
            report = store.verify()
        assert (report.problems, report.versions) == ([], 3)
        report = store.verify()
        assert (report.problems, report.versions) == ([], 2)


def test_a_copy_of_a_bucket_is_independent(server: SimulatedServer, directory: Path) -> None:
    servers = {URL: SimulatedServer(), "s3://models/copy": SimulatedServer()}
    server.client = lambda url: SimulatedBucket(servers[url])
    paths = files(directory, 3)
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(paths[0], run="gpt", step=0)
        servers["s3://models/copy"].objects.update(servers[URL].objects)
        store.ingest(paths[1], run="gpt", step=1)
        with ckstore.open("s3://models/copy", cache=directory / "a") as copy:
            assert [row.step for row in copy._catalog.versions()] == [0]
            copy.ingest(paths[2], run="gpt", step=2)
            store._catalog.refresh()
            assert [row.step for row in store._catalog.versions()] == [0, 1]
            assert copy.verify().problems == store.verify().problems == []


def test_cached_bytes_are_checked(server: SimulatedServer, directory: Path) -> None:
    paths = files(directory, 2)
    with ckstore.init(URL, cache=directory / "a") as store:
        for step, path in enumerate(paths):
            store.ingest(path, run="gpt", step=step)
        settled(store)  # Encoding removes raw packs, and their blocks from caches.
    for _ in range(2):
        with ckstore.open(URL, cache=directory / "b") as store:
            same(store, paths, directory / "out")
            blocks = sorted(store.path.glob("blocks/*/*"))
            assert blocks
        for block in blocks:
            data = bytearray(block.read_bytes())
            data[len(data) // 2] ^= 1
            block.write_bytes(data)


def test_places_that_cannot_hold_a_store_are_refused(server: SimulatedServer, directory: Path) -> None:
    with pytest.raises(NoStoreError, match="is not a store; run `ckstore init s3://models/team-a`"):
        ckstore.open(URL, cache=directory / "a")
    server.ignores_conditions = True
    with pytest.raises(UsageError, match="the server overwrites an existing object"):
        ckstore.init(URL, cache=directory / "a")
    assert not server.objects
    server.ignores_conditions = False
    ckstore.init(URL, cache=directory / "a").close()
    with pytest.raises(ConflictError, match="is already a store"):
        ckstore.init(URL, cache=directory / "b")
    with ckstore.open(URL, "r", cache=directory / "b") as store, pytest.raises(UsageError, match="for reading"):
        store.set_policy(Policy("coarse"))
    with ckstore.open(URL, cache=directory / "b") as store, pytest.raises(NotFoundError):
        store["gpt@1"]


@pytest.mark.parametrize(
    "url", ["s3://me:secret@models/a", "az://models/a?sig=secret", "gs://models/a#secret", "s3://", "s3:///secret"]
)
def test_a_url_holds_no_secret(directory: Path, url: str) -> None:
    with pytest.raises(UsageError, match=f"is {url[:2]}://bucket/prefix, with .*without .*come from the env") as caught:
        ckstore.init(url, cache=directory)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["https://me:secret@host", "https://host/?sig=secret"])
def test_an_endpoint_holds_no_secret(directory: Path, endpoint: str) -> None:
    with pytest.raises(UsageError, match="An endpoint is an address, without") as caught:
        ckstore.init(URL, options={"endpoint": endpoint}, cache=directory)
    assert "secret" not in str(caught.value)


def test_options_hold_no_secret(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"Unknown option secret_access_key .*credentials come from the environment"):
        ckstore.init(URL, options={"secret_access_key": "x"}, cache=directory)


class Planned:
    """Replaces `plan_for`: after each plan it runs its given actions, before anything is committed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, task: Callable[[], object]) -> None:
        self.count = 0
        self._task = task
        monkeypatch.setattr(collect_module, "plan_for", self._planned)

    def _planned(self, *arguments: Any, **options: Any) -> Any:
        plan = plan_for(*arguments, **options)
        self.count += 1
        self._task()
        return plan


def test_packs_that_others_put_do_not_keep_gc_from_its_change(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = files(directory, 3)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        for step, path in enumerate(paths):
            store.ingest(path, run="gpt", step=step)
        settled(store)
        store.forget(["gpt@0"])
        store.rebase(["gpt@1", "gpt@2"])  # Nothing is left to be stored in full.
        other._catalog.refresh()

        def put() -> None:
            server.objects[f"packs/{planned.count:040}.zip"] = b"a pack", server.now()

        planned = Planned(monkeypatch, put)
        assert other.gc(grace=0).bytes > 0
        assert planned.count == 1


def test_gc_asks_for_the_time_once(server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(10):
            store.ingest({"w": draw(9, 9, seed=step)}, run="gpt", step=step)
        with monkeypatch.context() as context:
            context.setattr(
                RemoteLog, "append", lambda *arguments, **named: (_ for _ in ()).throw(CkstoreError("killed"))
            )
            for step in range(10, 16):
                with pytest.raises(CkstoreError, match="killed"):
                    store.ingest({"w": draw(9, 9, seed=step)}, run="gpt", step=step)
    with ckstore.open(URL, cache=directory / "b") as store:
        server.requests.clear()
        assert store.gc(grace=0).files >= 6
        assert server.requests["put"] == 2  # When the remaining objects were put, and when the removed ones were.


def test_gc_frees_space_while_others_commit(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        for step in range(4):
            store.ingest(state(step), run="gpt", step=step, hot=0)
        for step in range(2):
            store.ingest(state(step), run="hot", step=step, hot=2)
        store.forget(["gpt@0", "hot@0"])
        store.rebase(run="gpt")  # Nothing is left to be stored in full.
        other._catalog.refresh()
        before = {info.name for info in store._repository.packs.list_packs()}

        def commit() -> None:
            # Upon kept objects, of kept objects, and with new ones.
            step = len(store._catalog.versions()) + 1
            store.ingest(state(step), run="gpt", step=step, hot=0)
            store.ingest(state(3) | {"step": step}, run="again", step=step, hot=0)
            store.ingest({"w": draw(9, 9, seed=step)}, run="other", step=step, hot=0)
            store.ingest(state(step), run="hot", step=step, hot=1)

        planned = Planned(monkeypatch, commit)
        report = gc(other._repository, grace=0, patience=60)
        assert planned.count == 1
        assert report.removed + report.rewritten > 0
        assert before - {info.name for info in store._repository.packs.list_packs()}
    with ckstore.open(URL, cache=directory / "c") as store:
        assert len(store._catalog.versions()) == 8
        for row in store._catalog.versions():
            found = store[row.number].state_dict()
            if row.run == "gpt":
                assert bool((found["model"]["weight"] == state(row.step or 0)["model"]["weight"]).all())
        assert store.verify().problems == []
        assert store._catalog.differences() == []


def test_gc_plans_again_where_others_commit_its_garbage(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        for step in range(3):
            store.ingest({"w": draw(90, 90, seed=step), "kept": draw(9, 9)}, run=f"r{step}", step=0, hot=0)
        store.forget(["r0@0", "r1@0"])
        other._catalog.refresh()
        steps = iter([1])

        def commit() -> None:
            for step in steps:
                store.ingest({"w": draw(90, 90, seed=0)}, run="again", step=step, hot=0)

        planned = Planned(monkeypatch, commit)
        assert gc(other._repository, grace=0, patience=60).removed > 0
        assert planned.count == 2
    with ckstore.open(URL, cache=directory / "c") as store:
        assert bool((store["again@1"].state_dict()["w"] == draw(90, 90, seed=0)).all())
        assert store.verify().problems == []


def test_gc_reads_nothing_between_a_commit_of_others_and_its_own(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        for step in range(3):
            store.ingest({"w": draw(90, 90, seed=step)}, run=f"r{step}", step=0, hot=0)
        store.forget(["r0@0"])

        def commit() -> None:
            store.ingest({"w": draw(90, 90, seed=1), "more": draw(9, 9)}, run="again", step=1, hot=0)
            server.requests.clear()

        planned = Planned(monkeypatch, commit)
        assert gc(other._repository, grace=0, patience=60).removed > 0
        assert planned.count == 1
        assert server.requests["read_range"] == 0
        assert other.verify().problems == []


def test_gc_gives_up_where_others_keep_committing_its_garbage(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        states = [{"w": draw(90, 90, seed=seed)} for seed in range(2)]
        for seed, content in enumerate(states):
            store.ingest(content, run="gpt", step=seed, hot=0)
        store.forget(["gpt@0"])
        steps = iter(range(2, 1000))

        def commit() -> None:
            step = next(steps)
            store.ingest(states[step % 2], run="gpt", step=step, hot=0)
            store.forget([f"gpt@{step - 1}"])

        Planned(monkeypatch, commit)
        with pytest.raises(LockedError, match=r"keep writing \(last: version \d+ of run gpt, 20\d\d-.*\); free"):
            gc(other._repository, grace=0, patience=0.2)


def test_packs_that_are_committed_while_gc_is_about_to_remove_them_stay(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        store.ingest(state(0), run="gpt", step=0, hot=0)
        store.ingest(state(1), run="gpt", step=1, hot=0)
        store.forget(["gpt@0"])
        store.rebase(["gpt@1"])
        published, planned = threading.Event(), threading.Event()
        publish = store._repository.packs.publish

        def waiting(names: list[str]) -> None:
            publish(names)
            published.set()
            assert planned.wait(60)

        monkeypatch.setattr(store._repository.packs, "publish", waiting)
        thread = threading.Thread(target=lambda: store.ingest(state(2), run="gpt", step=2, hot=0))
        thread.start()
        assert published.wait(60)

        def commit() -> None:
            planned.set()
            thread.join()

        plans = Planned(monkeypatch, commit)
        assert gc(other._repository, grace=0, patience=60).files == 0
        assert plans.count == 1
    with ckstore.open(URL, cache=directory / "c") as store:
        assert [row.step for row in store._catalog.versions()] == [1, 2]
        assert bool((store["gpt@2"].state_dict()["model"]["weight"] == state(2)["model"]["weight"]).all())
        assert store.verify().problems == []
        assert not any(
            record.get("versions")
            for record in store._catalog.log_records()
            if record["change"] == "gc" and any(origin[0] == store["gpt@2"].id for origin in record["versions"])
        )


def test_a_cache_that_cannot_be_used_is_named(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "file").write_bytes(b"")
    remedy = r"The cache .* cannot be used \(.*\); name another directory with \$CKSTORE_CACHE or cache="
    for cache in (directory / "file", directory / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(CkstoreError, match=remedy):
            ckstore.init(URL, cache=cache)
        assert not server.objects, "a store that could not be opened was made"
    ckstore.init(URL, cache=directory / "a").close()
    for cache in (directory / "file", directory / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(CkstoreError, match=remedy):
            ckstore.open(URL, "r", cache=cache)
    # An existing mirror is not written to, if nothing came.
    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", lambda *arguments: pytest.fail("the mirror was touched"))
        ckstore.open(URL, "r", cache=directory / "a").close()


def test_the_variable_that_names_no_store_is_named(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoStoreError, match=f"^{URL} is not a store; run `ckstore init {URL}`"):
        ckstore.open(URL, cache=directory)
    monkeypatch.setenv("CKSTORE", f"{URL}/")
    with pytest.raises(NoStoreError, match=f"^.CKSTORE names {URL}, which is not a store; correct it or run"):
        ckstore.open(cache=directory)
    assert server.requests == {"read": 2}


@pytest.mark.parametrize("url", [None, URL])
def test_other_modes_are_refused(url: str | None, server: SimulatedServer, directory: Path) -> None:
    place = url or directory / "store"
    ckstore.init(place, cache=directory / "a").close()
    mode: Any = "w"
    with pytest.raises(UsageError, match="Unknown mode 'w'; open a store with 'r' to read, or 'a'"):
        ckstore.open(place, mode, cache=directory / "a")


@pytest.mark.encoded
def test_requests_do_not_grow_with_versions(server: SimulatedServer, directory: Path) -> None:
    """Commits, an open with a warm mirror and a slice take as many requests, bytes and calls as 256 versions before."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((64, 32), np.float32)
    found = []
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(256 + 32):
            if step % 256 == 16:
                server.requests.clear()
                server.bytes.clear()
                (profile := cProfile.Profile()).enable()
            weight = weight + 1e-3 * generator.standard_normal(weight.shape, np.float32)
            store.ingest({"w": weight}, run="a", step=step)
            if step % 256 == 31:
                with ckstore.open(URL, "r", cache=directory / "a") as warm:
                    np.testing.assert_array_equal(warm[f"a@{step}"]["w"][5], weight[5])
                profile.disable()
                calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
                found.append((server.requests.copy(), server.bytes.copy(), calls))
    (few, few_bytes, few_calls), (many, many_bytes, many_calls) = found
    assert many == few
    print("calls", few_calls, many_calls)
    assert many_calls < 1.05 * few_calls
    assert many_bytes["put"] < 1.05 * few_bytes["put"]
    assert many_bytes["read"] <= 1.05 * few_bytes["read"]
