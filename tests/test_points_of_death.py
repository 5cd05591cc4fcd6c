"""Every step of every operation as a point of death or failure: the change is made in full or not at all.

A sample that `CKSTORE_DEATHS_SEED` chooses; all of them with `CKSTORE_DEATHS=all`, which prints how many there are.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore.commit.join import join
from ckstore.errors import IntegrityError
from ckstore.policy import Policy, Retention
from ckstore.recovery.recover import recover
from ckstore.retention.forget import _make_exact
from tests.checkpoints import scratch
from tests.points_of_death import DIED, KILL, MODES, POWER, REFUSED, struck

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]

#: Points of each operation and mode, unless all are asked for.
SAMPLE = 1
ALL = os.environ.get("CKSTORE_DEATHS") == "all"
SEED = int(os.environ.get("CKSTORE_DEATHS_SEED", "0"))


def weights(step: int) -> dict[str, Any]:
    values = np.random.default_rng(0).standard_normal((270, 256), np.float32)
    return {"w": values + np.float32(step * 1e-3), "n": np.arange(step, step + 5)}


def opened(work: Callable[[ckstore.Store], object]) -> Callable[[Path], None]:
    def operation(path: Path) -> None:
        with ckstore.open(path) as store:
            work(store)

    return operation


def pulled(store: ckstore.Store, version: str) -> None:
    """Pull a version of another store, which shares most of it; raise its problems."""
    with ckstore.open(store.path.parent / "other", "r") as other:
        for item in store.pull(other, [version]).failed:
            raise item.error


def joined(store: ckstore.Store) -> None:
    """Join the small packs of a store."""
    join(store._repository, store._catalog.small_packs(99))


def rebuilt(path: Path) -> None:
    """Recover a store; raise the problems of a broken disk."""
    for problem in recover(path).problems:
        raise IntegrityError(problem)


OPERATIONS: dict[str, Callable[[Path], None]] = {
    "ingest of a file": opened(lambda store: store.ingest(store.path.parent / "in.npy", run="c", step=9, hot=0)),
    "live ingest": opened(lambda store: store.ingest(weights(4), run="a", step=4, hot=0)),
    "hot ingest": opened(lambda store: store.ingest(weights(32), run="h", step=2, hot=9)),
    "hot ingest of hot content": opened(lambda store: store.ingest(weights(31), run="t", step=0, hot=9)),
    "encode": opened(lambda store: store.encode(["h@1"])),
    "replace": opened(lambda store: store.ingest(weights(7), run="a", step=2, replace=True, hot=0)),
    "thin": opened(lambda store: store.thin(["a@1"])),
    "forget": opened(lambda store: store.forget(["a@2"])),
    "undo": opened(lambda store: store.undo()),
    "undo of a thinning": opened(lambda store: _make_exact(store._repository)),
    "rename": opened(lambda store: store.rename_run("p", "q")),
    "gc": opened(lambda store: store.gc(grace=0)),
    "join": opened(joined),
    "pull": opened(lambda store: pulled(store, "b@2")),
    "rebase": opened(lambda store: store.rebase(["a@3"])),
    "recover": rebuilt,
    "tag": opened(lambda store: store.tag("a@1", "best")),
    "untag": opened(lambda store: store.untag("last")),
    "retain": opened(lambda store: store.retain("p")),
    "policy": opened(lambda store: store.set_policy(Policy(fidelity="coarse"), "a")),
}


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    """A store with two runs, a tag, and garbage; some packs are in a segment."""
    with scratch() as directory:
        path = directory / "store"
        with ckstore.init(path) as store:
            for step in range(4):
                store.ingest(weights(step), run="a", step=step, hot=0)
            store.ingest(weights(20), run="b", step=0, hot=0)
            store.ingest(weights(21), run="b", step=1, hot=0)
            joined(store)
            assert store._catalog.in_segments()
            store.ingest(weights(40), run="p", step=0, hot=0)
            store.ingest(weights(41), run="p", step=1, hot=0)
            store.ingest(weights(30), run="h", step=0, hot=0)
            store.ingest(weights(31), run="h", step=1, hot=9)
            store.ingest(weights(31), run="s", step=0, hot=9)
            store.set_policy(Policy(retention=Retention(keep_last=1)), "p")
            store.tag("a@3", "last")
            store.thin(["b@1"])
            store.forget(["b@0"])
            # Versions that are encoded later would be encoded first if they were their parent.
            assert [row.run for row in store._catalog.hot()] == ["h", "s"]
            assert store.verify().problems == []
        shutil.copytree(path, directory / "other")
        with ckstore.open(directory / "other") as other:
            other.ingest(weights(22), run="b", step=2, hot=0)
        np.save(directory / "in.npy", np.random.default_rng(1).standard_normal((270, 256), np.float32))
        yield path


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The states before and after each operation, and its number of steps."""
    return {}


def state(path: Path) -> Any:
    """Return the visible state of a store; everything in it is read and compared with the ingested files."""
    with ckstore.open(path) as store:
        assert store.verify().problems == []
        rows = [
            (row.run, row.step, row.uid, f"{row.fidelity}{' hot' if row.hot else ''}")
            for row in store._catalog.versions()
        ]
        return sorted(rows), store._catalog.tags(), store._catalog.policies()


def without_uids(said: Any) -> Any:
    """Return a state without the ids of versions, which tell when they were stored."""
    return [(run, step, fidelity) for run, step, _, fidelity in said[0]], said[1], said[2]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_ends_at_any_step(
    pristine: Path, undisturbed: dict[str, Any], name: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operation = OPERATIONS[name]

    def copied(label: str) -> Path:
        place = pristine.parent / label
        if place.exists():
            shutil.rmtree(place)
        shutil.copytree(pristine, place)
        return place

    if name not in undisturbed:
        done = copied("done")
        code, steps = struck(operation, done, mode, 0)
        assert code == 0
        assert steps > 0
        undisturbed[name] = without_uids(state(pristine)), without_uids(state(done)), steps
    before, after, steps = undisturbed[name]
    points = list(range(1, steps + 1))
    if not ALL:
        points = sorted(random.Random(f"{SEED} {name} {mode}").sample(points, min(SAMPLE, steps)))
    for point in points:
        path = copied("struck")
        code, _ = struck(operation, path, mode, point)
        where = f"{name}, {mode}, step {point} of {steps}, exit {code}"
        # A step that threads make in another order may not be reached; an error may be of no importance.
        assert code in ((0, DIED) if mode in (KILL, POWER) else (0, REFUSED)), where
        found = state(path)
        assert without_uids(found) in (before, after), where
        assert recover(path).problems == [], where
        assert without_uids(state(path)) in (before, after), where
        # Life goes on: the interrupted operation can be done again.
        if without_uids(state(path)) == before != after:
            operation(path)
            assert without_uids(state(path)) == after, where
    if ALL:
        with capsys.disabled():
            print(f"\n{name}, {mode}: {len(points)} points")
