"""The log of a remote store under lost responses, other writers, and a collection, at every request."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.errors import ConflictError, FormatVersionError, IntegrityError
from ckstore.storage.interface import Listed
from ckstore.storage.remote import mirror as mirror_module
from ckstore.storage.remote import remote_log as log_module
from ckstore.storage.remote import retries as retries_module
from ckstore.storage.remote.bucket import ForeignNameError
from tests.checkpoints import draw
from tests.storage.remote.simulated import SimulatedBucket, SimulatedServer

URL = "s3://models/team-a"
SEEDS = int(os.environ.get("CKSTORE_INTERLEAVINGS", "8"))


def state(run: int, step: int) -> dict[str, Any]:
    weight = draw(40, 64, seed=run)
    return {"weight": weight + draw(40, 64, seed=100 * run + step, scale=1e-3), "shared": draw(16, 16, seed=7)}


class Scheduler:
    """Lets one of several threads make its next request, chosen at random once all of them want to make one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._running: set[str] = set()
        self._waiting: set[str] = set()
        self._turn: str | None = None

    @contextmanager
    def turn(self, kind: str, name: str) -> Iterator[None]:
        me = threading.current_thread().name
        if me in self._running:
            with self._changed:
                self._waiting.add(me)
                self._choose()
                assert self._changed.wait_for(lambda: self._turn == me, timeout=100)
                self._waiting.discard(me)
                self._turn = None
        yield

    def run(self, tasks: dict[str, Callable[[], None]]) -> None:
        """Run tasks in threads of their names; raise the first error."""
        failed: list[BaseException] = []

        def worked(name: str, task: Callable[[], None]) -> None:
            try:
                task()
            except BaseException as error:
                failed.append(error)
            finally:
                with self._changed:
                    self._running.discard(name)
                    self._choose()

        self._running = set(tasks)
        threads = [threading.Thread(target=worked, args=item, name=item[0]) for item in tasks.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _choose(self) -> None:
        if self._turn is None and self._running and self._waiting == self._running:
            self._turn = self._random.choice(sorted(self._waiting))
        self._changed.notify_all()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_writers_and_a_collection_interleaved(server: SimulatedServer, directory: Path, seed: int) -> None:
    scheduler = Scheduler(seed)
    chance = random.Random(seed)

    def loses(kind: str, name: str) -> bool:
        return kind in ("put", "put_absent", "list") and chance.random() < 0.15

    ckstore.init(URL, cache=directory / "first").close()
    server.client = lambda url: SimulatedBucket(server, scheduler.turn, loses)
    reported: dict[tuple[str, int], str] = {}

    def write(run: int) -> Callable[[], None]:
        def task() -> None:
            with ckstore.open(URL, cache=directory / f"writer{run}") as store:
                for step in range(4):
                    for _ in range(6):
                        try:
                            row = store.ingest(state(run, step), run=f"run{run}", step=step, hot=0).version
                        except ConflictError as error:
                            if "removed" not in str(error):
                                raise
                            continue  # Objects that `gc` has removed are stored again.
                        reported[f"run{run}", step] = row.uid
                        break
                    if step == 2:
                        store.forget([f"run{run}@0"])
                        del reported[f"run{run}", 0]

        return task

    def collect() -> None:
        with ckstore.open(URL, cache=directory / "collector") as store:
            for _ in range(3):
                store.gc(grace=0)

    scheduler.run({"one": write(1), "two": write(2), "gc": collect})
    server.client = lambda url: SimulatedBucket(server)
    with ckstore.open(URL, cache=directory / "reader") as store:
        rows = store._catalog.versions()
        assert {(row.run, row.step): row.uid for row in rows} == reported
        assert len({row.number for row in rows}) == len(rows) == 6
        for row in rows:
            found = store[row.number].state_dict()
            expected = state(int(row.run[-1]), row.step or 0)
            assert all(bool((found[name] == tensor).all()) for name, tensor in expected.items())
        assert store.verify().problems == []
        store.gc(grace=0)
        assert store.verify().problems == []
        packs = {f"packs/{pack.name}" for pack in store._catalog.packs()}
        assert {name for name in server.objects if name.startswith("packs/")} == packs


def test_a_lost_response_is_no_conflict(server: SimulatedServer, directory: Path) -> None:
    lost = iter([True, True, False, True])
    server.client = lambda url: SimulatedBucket(
        server, loses=lambda kind, name: "/log/" in f"/{name}" and kind == "put_absent" and next(lost, False)
    )
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(4):
            assert store.ingest(state(1, step), run="r", step=step, hot=9).version.number == step + 1
        assert [row.step for row in store._catalog.versions()] == [0, 1, 2, 3]
    assert len([name for name in server.objects if name.startswith("log/")]) == 4


def test_a_mirror_begins_with_a_snapshot_and_few_requests(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "EVERY", 64)
    monkeypatch.setattr(log_module, "_MANY", 64)
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(1, 0), run="r", step=0)
        for number in range(121):
            store.tag("r@0", f"t{number}")
        rows, tags = store._catalog.versions(), store._catalog.tags()
    server.requests.clear()
    with ckstore.open(URL, cache=directory / "b") as store:
        assert (store._catalog.versions(), store._catalog.tags()) == (rows, tags)
    assert server.requests.total() == 5, server.requests  # root, snapshot, list, records 122 and 112
    server.requests.clear()
    with ckstore.open(URL, cache=directory / "b") as store:
        assert store._catalog.tags() == tags
        assert store._catalog.differences() == []
    server.requests.clear()
    ckstore.open(URL, cache=directory / "b").close()
    assert server.requests == {"list": 1}


def test_no_thread_is_needed_to_follow_a_record(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code at a program's end may follow the log, too: no thread begins then."""

    def submit(pool: ThreadPoolExecutor, *arguments: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    with ckstore.init(URL, cache=directory / "a") as first, ckstore.open(URL, cache=directory / "b") as second:
        first.ingest(state(1, 0), run="r", step=0)
        first.tag("r@0", "mine")
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
        second._catalog.refresh()
        second.tag("mine", "yours")
        assert second._catalog.tags() == {"mine": 1, "yours": 1}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "foreign", "calls"])
def test_a_damaged_record_is_named(server: SimulatedServer, directory: Path, damage: str) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        for step in range(3):
            store.ingest(state(1, step), run="r", step=step, hot=9)
    [last] = [name for name in server.objects if name.endswith("3") and name.startswith("log/")]
    data, modified = server.objects[last]
    if damage == "flip":
        server.objects[last] = data[:60] + bytes([data[60] ^ 1]) + data[61:], modified
    elif damage == "cut":
        server.objects[last] = data[:-5], modified
    elif damage == "gone":
        server.objects[f"{last[:-1]}4"] = server.objects.pop(last)
    else:
        line = log_module._unpacked(data).split(b"\n")[-1]
        was, now = {"foreign": (b'"number":3', b'"number":2'), "calls": (b'"commit_version"', b'"close"')}[damage]
        server.objects[last] = log_module._packed(line.replace(was, now)), modified
    # A later ckstore may have more calls.
    error, said = (FormatVersionError, "unknown call 'close'") if damage == "calls" else (IntegrityError, "ecord . of")
    with pytest.raises(error, match=said):
        ckstore.open(URL, cache=directory / "b")


def test_a_line_that_is_damaged_here_does_not_get_to_others(server: SimulatedServer, directory: Path) -> None:
    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(1, 0), run="r", step=0)
        for number in range(3):
            store.tag("r@0", f"t{number}")
        [line] = (store.path / "log").glob("*2")
        line.write_bytes(bytes(line.stat().st_size))  # As a power cut leaves unsynced bytes.
        store.tag("r@0", "last")
        tags = store._catalog.tags()
    with ckstore.open(URL, cache=directory / "b") as store:
        assert store._catalog.tags() == tags


def test_mirrors_that_only_follow_forget_old_lines(
    server: SimulatedServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_MANY", 16)
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        store.ingest(state(1, 0), run="r", step=0)
        for number in range(40):
            store.tag("r@0", f"t{number}")
            if number % 10 == 0:
                other._catalog.refresh()
        other._catalog.refresh()
        for mirror in (store, other):
            assert len(list((mirror.path / "log").iterdir())) <= 32
        other.tag("r@0", "last")
    with ckstore.open(URL, cache=directory / "c") as store:
        assert len(store._catalog.tags()) == 41


@pytest.mark.encoded
@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_race_takes_a_put_and_a_read(server: SimulatedServer, directory: Path, lost: bool) -> None:
    losing: list[bool] = []
    server.client = lambda url: SimulatedBucket(
        server, loses=lambda kind, name: kind == "put_absent" and bool(losing) and losing.pop()
    )
    with ckstore.init(URL, cache=directory / "a") as store, ckstore.open(URL, cache=directory / "b") as other:
        store.ingest(state(1, 0), run="r", step=0)
        other._catalog.refresh()
        store.tag("r@0", "first")
        server.requests.clear()
        losing[:] = [lost]
        other.tag("r@0", "second")
        assert server.requests == {"put_absent": 2, "read": 1}
        for number in range(9):
            store.tag("r@0", f"t{number}")
        server.requests.clear()
        other.tag("r@0", "third")
        # The record behind its own; when that was not the last one, the last one; and after the third put, in vain.
        assert server.requests == {"put_absent": 3, "read": 3, "list": 1}
        store._catalog.refresh()
        assert len(store._catalog.tags()) == 12
        assert store._catalog.tags() == other._catalog.tags()
        assert [store._catalog.differences(), other._catalog.differences()] == [[], []]


def test_our_own_record_behind_which_others_have_put_theirs(server: SimulatedServer, directory: Path) -> None:
    """The response to the second put of a commit is lost, and others have committed before it is looked for."""
    puts: list[str] = []

    def loses(kind: str, name: str) -> bool:
        if kind != "put_absent" or not name.startswith("log/"):
            return False
        puts.append(name)
        if len(puts) == 2:
            for number in range(3):
                store.tag("r@0", f"behind{number}")
            return True
        return False

    with ckstore.init(URL, cache=directory / "a") as store:
        store.ingest(state(1, 0), run="r", step=0)
        server.client = lambda url: SimulatedBucket(server, loses=loses)
        with ckstore.open(URL, cache=directory / "b") as other:
            store.tag("r@0", "first")
            other.tag("r@0", "ours")
            assert len(puts) == 2
            other._catalog.refresh()
            store._catalog.refresh()
            assert set(other._catalog.tags()) == {"first", "ours", "behind0", "behind1", "behind2"}
            assert store._catalog.tags() == other._catalog.tags()
            assert other._catalog.differences() == []


class PickyBucket(SimulatedBucket):
    """Refuses to list names that have a part `..`, as clients do."""

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        found = list(super().list(prefix, after))
        for item in found:
            if "/../" in item.name:
                raise ForeignNameError(f"It has an object of a name that ckstore never writes ({item.name}).")
        return iter(found)


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [["999999999999.json"], ["999999999999"], ["000000000500"], ["../x", "zz"], ["zz/../x"], ["0" * 11 + "²", "x/1"]],
    ids=repr,
)
@pytest.mark.parametrize("count", [0, 3])
def test_names_that_are_no_records_are_passed_over(
    count: int, names: list[str], server: SimulatedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.client = lambda url: PickyBucket(server)
    monkeypatch.setattr(retries_module, "PATIENCE", 0.0)
    ckstore.init(URL, cache=tmp_path / "made").close()
    with ckstore.open(URL, cache=tmp_path / "made") as store:
        for step in range(count):
            store.ingest(state(0, step), run="r", step=step)
        assert store.verify().problems == []
    prefix = next(iter(log_names(server)), None) or f"log/{store_id(server)}/0"
    for name in names:
        server.objects[f"{prefix.rpartition('/')[0]}/{name}"] = b"{}", server.now()
    for cache in ("made", "new"):
        with ckstore.open(URL, cache=tmp_path / cache) as store:
            assert (
                [row.step for row in store._catalog.versions("r")] == list(range(count))
                if count
                else not store._catalog.versions()
            )
    with ckstore.open(URL, cache=tmp_path / "made") as store:
        store.ingest(state(0, count), run="r", step=count)
        problems = store.verify().problems
        store.gc(grace=0)
    with ckstore.open(URL, cache=tmp_path / "another") as store:
        assert [row.step for row in store._catalog.versions("r")] == list(range(count + 1))
    assert problems
    assert all(any(name in problem for problem in problems) for name in names[:1])


def test_a_log_that_cannot_be_listed_does_not_end_at_a_lost_object(server: SimulatedServer, tmp_path: Path) -> None:
    server.client = lambda url: PickyBucket(server)
    with ckstore.init(URL, cache=tmp_path / "made") as store:
        for step in range(6):
            store.ingest(state(0, step), run="r", step=step)
    names = log_names(server)
    server.objects[f"{names[0].rpartition('/')[0]}/zz/../x"] = b"", server.now()
    del server.objects[names[4]]
    with ckstore.open(URL, cache=tmp_path / "new") as store:
        assert len(store._catalog.versions()) == 6


def log_names(server: SimulatedServer) -> list[str]:
    return sorted(name for name in server.objects if name.startswith("log/"))


def store_id(server: SimulatedServer) -> str:
    found = json.loads(server.objects["ckstore.json"][0])["store"]
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize("last", [1_000, 10_000, 1_000_000])
def test_snapshots_become_rare_as_the_log_grows(last: int) -> None:
    """A catalog grows with its log: all snapshots, and the records after the last one, take a share of the log."""
    found = [number for number in range(1, last + 1) if mirror_module.needs_snapshot(number)]
    assert sum(found) <= 17 * last
    for before, number in pairwise([0, *found, last]):
        assert number - before <= max(mirror_module.EVERY, number / 8)
