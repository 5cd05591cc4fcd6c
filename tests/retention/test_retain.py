"""A policy's effect on older versions: against a plain model, under tags, forks and metrics, and when killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckstore
from ckstore.errors import IntegrityError, UsageError
from ckstore.policy import Policy, Retention
from ckstore.recovery.recover import recover
from ckstore.retention.retain import due, outlived
from ckstore.storage.rows import VersionRow
from ckstore.writing.drop import with_globs
from tests.catalog_edits import edit
from tests.checkpoints import listing, present_packs, settled


def state(step: int, seed: int = 0) -> dict[str, Any]:
    """Return a weight of 300 KB that moves a little, and a counter."""
    weight = np.random.default_rng(seed).standard_normal((300, 256), np.float32)
    weight += np.float32(1e-3) * np.random.default_rng(1000 * seed + step + 1).standard_normal((300, 256), np.float32)
    return {"w": weight, "step": step}


def steps(store: ckstore.Store, run: str = "a") -> dict[int | None, str]:
    """Return the fidelities of a run's versions by step."""
    return {row.step: row.fidelity for row in store._catalog.versions(run)}


def is_exact(store: ckstore.Store, step: int, run: str = "a") -> bool:
    return bool(np.array_equal(store[f"{run}@{step}"].state_dict()["w"], state(step)["w"]))


def row(number: int, step: int | None, metrics: dict[str, Any], fidelity: str = "exact") -> VersionRow:
    given = {item.name: None for item in dataclasses.fields(VersionRow)}
    given |= {"number": number, "run": "a", "step": step, "metrics": metrics, "fidelity": fidelity}
    given |= {"hot": False, "dropped": ()}
    return VersionRow(**given)  # type: ignore[arg-type]


# A plain model: the rules of the documentation, version by version.


#: Step, loss, fidelity, and dropped tensors.
Saved = tuple[int, float | None, str, tuple[str, ...]]


def model(said: Retention, there: list[Saved], kept: set[int]) -> list[Saved]:
    """Return the remaining versions; `there` is in the order of steps."""

    def is_first(step: int, every: int | None) -> bool:
        return every is not None and step == min(other for other, *_ in there if other // every == step // every)

    losses = [loss for _, loss, *_ in there if loss is not None]
    best = [step for step, loss, *_ in there if said.exact_best and losses and loss == min(losses)][:1]
    remains: list[Saved] = []
    for after, (step, loss, fidelity, dropped) in zip(range(len(there) - 1, -1, -1), there, strict=True):
        stays = step in kept or step in best
        if said.keep_last is not None and after >= said.keep_last and not stays and not is_first(step, said.keep_every):
            continue
        is_older = said.exact_last is not None and after >= said.exact_last
        thinned = is_older and not stays and not is_first(step, said.exact_every)
        whole_last = said.exact_last if said.whole_last is None else said.whole_last
        lessened = whole_last is not None and after >= whole_last and not stays and not is_first(step, said.exact_every)
        gone = (*dropped, *(glob for glob in said.drop if glob not in dropped)) if lessened else dropped
        remains.append((step, loss, "coarse" if thinned else fidelity, gone))
    return remains


@st.composite
def retentions(draw: st.DrawFn) -> Retention:
    exact = draw(st.none() | st.integers(1, 4))
    keep = draw(st.none() | st.integers(exact or 1, 8))
    every = st.none() | st.integers(1, 6)
    whole = draw(st.none() | st.integers(1, keep or 4))
    drop = draw(st.lists(st.sampled_from(["optimizer/*", "ema/*"]), min_size=bool(whole), unique=True))
    drop = drop if exact or whole else []
    return Retention(
        exact,
        draw(every) if exact or drop else None,
        ("loss:min",) if (exact or keep or drop) and draw(st.booleans()) else (),
        keep,
        draw(every) if keep else None,
        tuple(drop),
        whole,
    )


@given(
    said=retentions(),
    saves=st.lists(st.tuples(st.integers(1, 4), st.none() | st.sampled_from([1.0, 2.0, 3.0])), max_size=20),
    tagged=st.sets(st.integers(1, 60), max_size=5),
)
def test_remaining_versions_equal_those_of_a_plain_model(
    said: Retention, saves: list[tuple[int, float | None]], tagged: set[int]
) -> None:
    """After each save, and again: a policy that has been applied has nothing left to do."""
    there: list[Saved] = []
    rows: list[VersionRow] = []
    step = 0
    for distance, loss in saves:
        step += distance
        there = model(said, [*there, (step, loss, "exact", ())], tagged)
        rows.append(row(step, step, {} if loss is None else {"loss": loss}))
        found = due(rows, said, kept=tagged)
        for again in (False, True):
            gone = {item.number for item in found.forgotten}
            thinned = {item.number for item in found.thinned}
            dropped = {item.number for item in found.dropped}
            assert not (again and (gone or thinned or dropped))
            rows = [
                dataclasses.replace(
                    item,
                    fidelity="coarse" if item.number in thinned else item.fidelity,
                    dropped=with_globs(item.dropped, said.drop) if item.number in dropped else item.dropped,
                )
                for item in rows
                if item.number not in gone
            ]
            found = due(rows, said, kept=tagged)
        assert [(item.step, item.metrics.get("loss"), item.fidelity, item.dropped) for item in rows] == there


def test_the_last_ingested_version_stays_exact_whatever_its_step() -> None:
    """A training that resumes from step 3 saves step 4 next, and needs that exact."""
    rows = [row(1, 1, {}), row(2, 3, {}), row(3, 7, {}), row(4, 9, {}), row(5, 4, {}), row(6, 5, {})]
    found = due(rows, Retention(exact_last=2, keep_last=2))
    assert [item.number for item in found.forgotten] == [1, 2]
    found = due(rows, Retention(exact_last=1))
    assert [item.number for item in found.thinned] == [1, 2, 5, 3]


def test_versions_without_steps_are_counted_by_number() -> None:
    rows = [row(number, None, {}) for number in (3, 7, 9, 10, 12, 15, 21)]
    found = due(rows, Retention(exact_last=1, exact_every=5, keep_last=2, keep_every=10))
    assert [item.number for item in found.forgotten] == [7, 9, 12]
    assert [item.number for item in found.thinned] == []
    found = due(rows, Retention(exact_last=2, exact_every=5))
    assert [item.number for item in found.thinned] == [9, 12]


@pytest.mark.parametrize("value", ["nan", True, None, float("inf"), [1.0]])
def test_a_metric_without_a_number_is_not_the_best(value: Any) -> None:
    rows = [row(1, 1, {"loss": value}), row(2, 2, {"loss": 5}), row(3, 3, {"loss": 7}), row(4, 4, {})]
    found = due(rows, Retention(exact_last=1, exact_best=("loss:min",)))
    assert [item.number for item in found.thinned] == [1, 3]
    found = due(rows, Retention(exact_last=1, exact_best=("loss:max",)))
    assert [item.number for item in found.thinned] == [1, 2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"exact_last": 0}, "1 or more"),
        ({"exact_every": 5}, "`exact_last`"),
        ({"exact_best": ("loss:min",)}, "`exact_last` or `keep_last`"),
        ({"keep_every": 5}, "`keep_last`"),
        ({"drop": ("optimizer/*",)}, "`whole_last` or `exact_last`"),
        ({"drop": ("optimizer/*",), "keep_last": 3}, "`whole_last` or `exact_last`"),
        ({"whole_last": 3}, "`drop`"),
        ({"whole_last": 3, "drop": ("",)}, "`drop`"),
        ({"whole_last": 0, "drop": ("a",)}, "1 or more"),
        ({"whole_last": 5, "drop": ("a",), "keep_last": 3}, "at most `keep_last`"),
        ({"exact_last": 5, "keep_last": 3}, "at most `keep_last`"),
        ({"exact_last": 1, "exact_best": ("loss",)}, "loss:min"),
        ({"exact_last": 1, "exact_best": ("loss:least",)}, "loss:min"),
    ],
    ids=str,
)
def test_invalid_retentions_are_refused_in_a_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Retention(**given)


def test_a_policy_keeps_its_retention(directory: Path) -> None:
    policy = Policy(retention=Retention(3, 10, ("loss:min", "a:b:max"), 200, 1000))
    assert Policy.from_text(policy.to_text()) == policy
    with ckstore.init(directory / "store") as store:
        store.set_policy(policy, "a")
        assert store.policy("a") == policy
        assert store.policy("b") == Policy()
        store.ingest(state(0), run="a", step=0)
    assert recover(directory / "store").problems == []
    with ckstore.open(directory / "store") as store:
        assert store.policy("a") == policy
        assert store.verify().problems == []


def test_older_versions_are_thinned_and_forgotten(store: ckstore.Store) -> None:
    for step in range(12):
        store.ingest(state(step), run="a", step=step, metrics={"loss": abs(step - 5) + 1.0}, hot=0)
    store.ingest(state(0), run="other", step=0, hot=0)
    store.ingest(state(1), run="fork", step=100, parent="a@1", hot=0)
    store.tag("a@2", "best")
    store.set_policy(Policy(retention=Retention(2, 4, ("loss:min",), 6, 8)), "a")
    before = listing(store.place)
    predicted = store.retain("a", dry_run=True)
    assert listing(store.place) == before
    assert len(steps(store)) == 12
    report = store.retain()
    assert report.forgotten == predicted.forgotten
    assert report.thinned == predicted.thinned
    assert [item.step for item in report.forgotten] == [3, 4]
    assert steps(store) == {
        0: "exact", 1: "exact", 2: "exact", 5: "exact", 6: "coarse", 7: "coarse", 8: "exact", 9: "coarse",
        10: "exact", 11: "exact",
    }  # fmt: skip
    assert store.retain().forgotten == store.retain().thinned == []
    assert all(is_exact(store, step) for step, fidelity in steps(store).items() if fidelity == "exact")
    assert store.verify().problems == []
    assert steps(store, "other") == {0: "exact"}
    assert store["fork@100"].parent == store["a@1"].number


@pytest.mark.parametrize("hot", [0, 1])
def test_ingests_have_it_done_behind_the_program(store: ckstore.Store, hot: int) -> None:
    store.set_policy(Policy(hot=hot, retention=Retention(exact_last=2, keep_last=4)), "a")
    for step in range(8):
        store.ingest(state(step), run="a", step=step)
        settled(store)
    assert steps(store) == {4: "coarse", 5: "coarse", 6: "exact", 7: "exact"}
    assert [row.hot for row in store._catalog.versions()] == [False, False, False, bool(hot)]
    assert is_exact(store, 7)
    assert is_exact(store, 6)
    assert store.verify().problems == []


@pytest.mark.long
def test_a_program_that_never_waits(directory: Path) -> None:
    """Thinning, forgetting and collecting go on while versions are stored, read and tagged."""
    with ckstore.init(directory / "store") as store:
        store.set_policy(Policy(hot=1, retention=Retention(exact_last=3, exact_every=20, keep_last=10)), "a")
        for step in range(50):
            store.ingest(state(step), run="a", step=step)
            if step % 15 == 7:
                store.tag(f"a@{step}", f"t{step}")
            assert is_exact(store, max(step - 2, 0))
    with ckstore.open(directory / "store") as store:
        store.retain("a")
        assert list(steps(store)) == [7, 22, 37, *range(40, 50)]
        exact = [step for step, fidelity in steps(store).items() if fidelity == "exact"]
        assert exact == [7, 22, 37, 40, 47, 48, 49]
        assert all(is_exact(store, step) for step in exact)
        assert store.verify().problems == []


def test_hot_versions_become_coarse_when_they_are_encoded(store: ckstore.Store) -> None:
    for step in range(5):
        store.ingest(state(step), run="a", step=step, hot=9)
    store.set_policy(Policy(hot=3, retention=Retention(exact_last=1)), "a")
    store.retain()
    assert steps(store) == {0: "coarse", 1: "coarse", 2: "exact", 3: "exact", 4: "exact"}
    assert [row.hot for row in store._catalog.versions()] == [False, False, True, True, True]
    store.set_policy(Policy(hot=3, retention=Retention(exact_last=1, keep_last=2)), "a")
    store.retain()
    assert [row.step for row in store._catalog.versions()] == [3, 4]
    assert is_exact(store, 3)
    store.gc()
    assert store.verify().problems == []


def test_versions_without_lossy_tensors_are_examined_once(
    store: ckstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckstore.retention import retain as module

    for step in range(3):
        store.ingest({"n": np.arange(step, 100_000 + step)}, run="a", step=step, hot=0)
    store.set_policy(Policy(retention=Retention(exact_last=1)), "a")
    assert store.retain(dry_run=True).thinned == []
    assert store.retain().thinned == []
    monkeypatch.setattr(module, "thin", lambda *_: pytest.fail("it was looked into again"))
    assert store.retain().thinned == []


def test_two_processes_apply_a_policy_at_once(directory: Path) -> None:
    """A training's own thread and a concurrent `ckstore policy --apply` thin the same versions."""
    with ckstore.init(directory / "store") as store, ckstore.open(directory / "store") as other:
        for step in range(4):
            store.ingest(state(step), run="a", step=step, hot=0)
        store.set_policy(Policy(retention=Retention(exact_last=1)), "a")
        thinned: list[int] = []

        def other_is_first(count: int) -> None:
            if len(thinned) < 2:
                thinned.append(len(thinned))
                other.thin([f"a@{thinned[-1]}"])

        report = store.retain("a", progress=other_is_first)
        assert [row.step for row in report.thinned] == [0, 1, 2]
        assert steps(store) == {0: "coarse", 1: "coarse", 2: "coarse", 3: "exact"}
        assert store.verify().problems == []


def test_a_concurrent_tag_protects_its_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckstore.retention import retain as module

    with ckstore.init(directory / "store") as store, ckstore.open(directory / "store") as other:
        for step in range(4):
            store.ingest(state(step), run="a", step=step, hot=0)
        store.set_policy(Policy(retention=Retention(keep_last=1)), "a")
        looked, found = module._due, []

        def late(*given: Any) -> Any:
            found.append(looked(*given))
            if len(found) == 1:
                other.tag("a@1", "mine")
                return found[0]
            return found[-1]

        monkeypatch.setattr(module, "_due", late)
        assert [item.step for item in store.retain().forgotten] == [0, 2]
        assert [item.step for item in found[0].forgotten] == [0, 1, 2]
        assert list(steps(store)) == [1, 3]


@pytest.mark.long
def test_a_store_that_takes_hundreds_of_saves(store: ckstore.Store) -> None:
    """Its bytes stay bounded; recent versions, tags, forks and every fiftieth come back exactly."""
    saves, keep = 240, 40
    store.set_policy(Policy(hot=0, retention=Retention(3, 50, (), keep, 50)), "a")
    sizes = []
    for step in range(saves):
        values = {"w": np.random.default_rng(step).standard_normal(3000).astype(np.float32)}
        store.ingest(values, run="a", step=step)
        if step == 51:
            store.tag("a@51", "mine")
            store.ingest(values, run="fork", step=0, parent="a@49")
        if step % 20 == 19:
            settled(store)
            sizes.append(sum(present_packs(store).values()))
    kept = {0, 49, 50, 51, 100, 150, *range(saves - keep, saves)}
    assert set(steps(store)) == kept
    for step in (0, 50, 51, 100, 150, *range(saves - 3, saves)):
        expected = np.random.default_rng(step).standard_normal(3000).astype(np.float32)
        assert np.array_equal(store[f"a@{step}"].state_dict()["w"], expected)
    assert store.verify().problems == []
    print("bytes after every 20 saves:", sizes)
    assert max(sizes) < 3 * sizes[2]


_APPLYING = """
import sys, ckstore
with ckstore.open(sys.argv[1]) as store:
    print("begun", flush=True)
    store.retain()
    store.gc(grace=0)
"""


@pytest.mark.long
@pytest.mark.parametrize("turn", range(6))
def test_killed_while_it_is_applied(directory: Path, turn: int) -> None:
    """Nothing is lost that the policy keeps, and the next time finishes."""
    with ckstore.init(directory / "store") as store:
        for step in range(10):
            store.ingest(state(step) | {"m": state(step, 1)["w"]}, run="a", step=step, hot=0)
        store.set_policy(Policy(retention=Retention(2, 4, (), 7, None, ("m",), 3)), "a")
        expected = store.retain(dry_run=True)
    child = subprocess.Popen([sys.executable, "-c", _APPLYING, str(directory / "store")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.02 + 0.12 * turn)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    gone = {item.step for item in expected.forgotten}
    thinned = {item.step for item in expected.thinned}
    lessened = {item.step for item in expected.dropped}
    with ckstore.open(directory / "store") as store:
        assert {row.step for row in store._catalog.versions("a") if row.dropped} <= lessened
        assert all(("m" in store[row.number]) == (not row.dropped) for row in store._catalog.versions("a"))
        assert set(range(10)) - set(steps(store)) <= gone
        assert {step for step, fidelity in steps(store).items() if fidelity == "coarse"} <= thinned
        assert all(is_exact(store, step) for step, fidelity in steps(store).items() if fidelity == "exact")  # type: ignore[arg-type]
        assert store.verify().problems == []
        store.retain()
        assert steps(store) == {3: "coarse", 4: "exact", 5: "coarse", 6: "coarse", 7: "coarse", 8: "exact", 9: "exact"}
        assert [row.step for row in store._catalog.versions("a") if row.dropped] == [3, 5, 6]
        assert store.verify().problems == []


def test_a_retention_of_the_store_is_predicted_for_runs_without_their_own(store: ckstore.Store) -> None:
    for run in "ab":
        for step in range(5):
            store.ingest({"w": [step]}, run=run, step=step, allow_empty=True)
    store.set_policy(Policy(retention=Retention(keep_last=2)), "a")
    predicted = store.retain(dry_run=True, retention=Retention(keep_last=3)).forgotten
    assert [(row.run, row.step) for row in predicted] == [("b", 0), ("b", 1)]
    predicted = store.retain(dry_run=True).forgotten
    assert [(row.run, row.step) for row in predicted] == [("a", 0), ("a", 1), ("a", 2)]
    assert store.retain().forgotten == predicted


def test_a_step_that_would_be_forgotten_at_once(store: ckstore.Store) -> None:
    store.set_policy(Policy(retention=Retention(keep_last=3, keep_every=10)), "a")
    assert not outlived(store._repository, "a", 0)
    for step in (12, 15, 30, 31, 32):
        store.ingest(state(step), run="a", step=step, hot=0)
    store.retain()
    assert list(steps(store)) == [12, 30, 31, 32]
    assert [step for step in range(40) if outlived(store._repository, "a", step)] == [*range(13, 20)]
    store.set_policy(Policy(retention=Retention(keep_last=1, keep_every=1)), "b")
    store.ingest(state(0), run="b", step=0, hot=0)
    assert not outlived(store._repository, "b", 0)
    store.ingest(state(5), run="b", step=5, hot=0)
    assert not outlived(store._repository, "b", 1)


@pytest.mark.local
@pytest.mark.parametrize(
    "retention", [Retention(keep_last=1), Retention(exact_last=1), Retention(whole_last=1, drop=["w"])]
)
def test_a_damaged_parent_protects_its_version(store: ckstore.Store, retention: Retention) -> None:
    """Another run's version names a parent that stays as it is, unless its row is damaged: then nothing is done."""
    for step in range(3):
        store.ingest(state(step), run="a", step=step, hot=0)
    store.ingest(state(9), run="b", parent="a@0", hot=0)
    store.set_policy(Policy(retention=retention), run="a")
    edit(store.path / "catalog.sqlite", "UPDATE versions SET parent = NULL WHERE run = 2")
    before = listing(store.path)
    with pytest.raises(IntegrityError, match="ckstore recover"):
        store.retain("a")
    assert listing(store.path) == before
    assert recover(store.path).problems == []
    assert is_exact(store, 0)
