"""Metrics: added to an existing version, kept by every operation on it, and printed as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import ckstore
from ckstore.recovery.recover import recover
from ckstore.storage import catalog_reader
from ckstore.storage.connection import Connection
from tests.catalog_edits import edit
from tests.checkpoints import listing, write_safetensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    weights = np.random.default_rng(0).normal(size=(300, 256)).astype(np.float32)
    write_safetensors(tmp_path / "step5.safetensors", {"w": ("float32", weights.shape, weights)})
    return tmp_path / "step5.safetensors"


def kept(store: Path) -> list[dict[str, Any]]:
    with ckstore.open(store, "r") as opened:
        assert opened.verify().problems == []
        return [dict(row.metrics) for row in opened._catalog.versions()]


def test_metrics_are_added_to_an_existing_version(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest(source, metrics={"loss": 2.5, "seen": 10})
        report = store.ingest(source, metrics={"loss": 2.25, "accuracy": 0.5})
        merged = {"loss": 2.25, "seen": 10, "accuracy": 0.5}
        assert not report.is_new
        assert report.version.metrics == store[report.version.number].metrics == merged
        records = listing(path)
        store.ingest(source, metrics={"seen": 10})  # nothing to be noted
        store.ingest(source)
        assert listing(path) == records
    assert kept(path) == [merged]
    for _ in range(2):
        assert recover(path).problems == []
        assert kept(path) == [merged]


def test_a_version_keeps_them_when_it_is_thinned_collected_and_healed(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ckstore.init(path) as store:
        store.ingest(source, metrics={"loss": 2.5})
        store.ingest(source, metrics={"accuracy": 0.5})
        merged = {"loss": 2.5, "accuracy": 0.5}
        store.thin([1])
        store.gc(grace=0)
    assert kept(path) == [merged]
    recover(path)
    assert kept(path) == [merged]
    with ckstore.open(path) as store:
        assert store.ingest(source, metrics={"late": 1}).is_new  # exact again
    merged["late"] = 1
    assert kept(path) == [merged]
    recover(path)
    assert kept(path) == [merged]


def test_a_catalog_with_other_metrics_than_manifest_and_log_is_found(source: Path, store: ckstore.Store) -> None:
    number = store.ingest(source, metrics={"loss": 2.5}).version.number
    store.ingest(source, metrics={"loss": 2.25})
    store._catalog.update_version(number, metrics={"loss": 1.0})
    assert "metrics" in store.verify().problems[0]


def test_metrics_are_read_from_files_of_frameworks(store: ckstore.Store, tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(3), "metrics": {"top1": 0.5}, "loss_scale": 8.0, "accuracy": float("nan"), "epoch": 3,
         "callbacks": {"ModelCheckpoint": {"monitor": "val/acc", "current_score": torch.tensor(0.75)}}},
        tmp_path / "lightning.ckpt",
    )  # fmt: skip
    trained = tmp_path / "checkpoint-5"
    trained.mkdir()
    torch.save({"w": torch.ones(3)}, trained / "pytorch_model.bin")
    history = [{"eval_loss": 3.0, "step": 1}, {"loss": 1.5, "step": 5}, {"eval_loss": 2.25, "step": 5}]
    (trained / "trainer_state.json").write_text(json.dumps({"global_step": 5, "log_history": history}))
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "st.safetensors", {"eval_loss": "0.125", "format": "pt"})
    found = [
        store.ingest(path, run=path.name).version
        for path in (tmp_path / "lightning.ckpt", trained, tmp_path / "st.safetensors")
    ]
    assert [dict(row.metrics) for row in found] == [
        {"top1": 0.5, "val/acc": 0.75, "accuracy": "NaN"},
        {"eval_loss": 2.25, "loss": 1.5},
        {"eval_loss": 0.125},
    ]
    assert store["best:eval_loss"].number == 3
    assert [row["version"] for row in store.log().where("accuracy=NaN")] == [1]
    with pytest.raises(ckstore.NotFoundError, match="No version has a number as metric accuracy"):
        store["best:accuracy"]
    store.encode()
    assert store[2].describe()["metrics_from"] == {
        "eval_loss": "trainer_state.json",
        "loss": "trainer_state.json",
    }


@pytest.mark.parametrize(
    "log", ["", "[]", "{}", '{"log_history": 3}', '{"log_history": [3, {"loss": "x"}]}', "[" * 9999]
)
def test_damaged_logs_hold_no_metrics(tmp_path: Path, log: str) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.bin")
    (tmp_path / "trainer_state.json").write_text(log)
    with ckstore.init(tmp_path.with_name(f"{tmp_path.name}-store")) as store:
        assert store.ingest(tmp_path, run="r", force=True).version.metrics == {}


def test_numbers_that_json_lacks_are_kept_as_text(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from ckstore.cli.program import run

    def refused(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    given = {"nan": math.nan, "high": math.inf, "low": np.float32(-math.inf), "list": [math.nan, 1]}
    with ckstore.init(tmp_path / "store") as store:
        metrics = store.ingest(source, metrics=given).version.metrics
        before = listing(store.place)
        store.ingest(source, metrics={"again": math.nan})
        noted = listing(store.place)
        store.ingest(source, metrics={"again": math.nan})
        assert listing(store.place) == noted
        assert len(noted) == len(before) + 1
    assert math.isnan(float(metrics["nan"]))
    assert [float(metrics[name]) for name in ("high", "low")] == [math.inf, -math.inf]
    assert math.isnan(float(metrics["list"][0]))
    assert run(["--store", str(tmp_path / "store"), "log", "--json"]) == 0
    [shown] = json.loads(capfd.readouterr().out, parse_constant=refused)
    assert shown["metrics"] == {**metrics, "again": "NaN"}


def test_extreme_metrics_are_those_of_all_versions(tmp_path: Path) -> None:
    """After random ingests, replacements, metrics, renamed, superseded, forgotten and restored versions."""
    rng = np.random.default_rng(0)
    values = [0, 1, 2, -1.5, 2**53, 2.0**53, -0.0, 1e300, True, "7", None, math.nan, math.inf, -(2**70)]
    with ckstore.init(tmp_path / "store") as store:
        for turn in range(120):
            versions = store.versions()
            chosen = versions[rng.integers(len(versions))] if versions else None
            metrics = {f"m{name}": values[rng.integers(len(values))] for name in range(int(rng.integers(4)))}
            run, step = f"r{rng.integers(3)}", int(rng.integers(9))
            state = {"w": np.full(3, turn)}
            kind = int(rng.integers(9)) if chosen else 0
            if kind == 6 and chosen:
                store.set_metrics(chosen.number, metrics)
            elif kind == 7 and chosen:
                store.forget(chosen.number)
                if rng.integers(2):
                    store.undo()
            elif kind == 8 and chosen:
                store.rename_run(chosen.run, f"other{turn}")
            elif kind == 5 and chosen:  # The run goes back to it.
                state, step = {"w": np.full(3, -turn)}, 100 + turn
                store.ingest(state, run=chosen.run, step=step, parent=chosen.number, metrics=metrics, hot=0)
            else:
                store.ingest(state, run=run, step=step, metrics=metrics, replace=True, hot=0)
            check_extremes(store)
        assert any(row.superseded for row in store._catalog.versions())
        assert store.verify().problems == []


@pytest.mark.parametrize("name", ["made", "config", "signature"])
def test_metrics_do_not_replace_what_a_version_has_besides(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKSTORE_MADE", "1")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": np.ones(3), "metrics": {name: 3, "loss": 2.5}}, run="r", step=1, config={"lr": 1})
        version = store["r@1"]
        assert (version.metrics, version.config) == ({"loss": 2.5}, {"lr": 1})
        before = dict(version.made)
        assert before
        for change in (
            lambda: store.ingest({"w": np.ones(3)}, run="r", step=2, metrics={name: 1}),
            lambda: store.set_metrics("r@1", {name: {"lr": 99}}),
        ):
            with pytest.raises(ckstore.UsageError, match=f"cannot be called {name}"):
                change()
        with pytest.raises(ckstore.NotFoundError, match=f"no metric {name}; it has loss"):
            store.set_metrics("r@1", remove=[name])
        assert (dict(store["r@1"].made), store["r@1"].config) == (before, {"lr": 1})


def check_extremes(store: ckstore.Store) -> None:
    """Compare the versions that are named by a metric, and the summaries of runs, with those of all versions."""
    rows = store._catalog.versions()
    runs = {row.run for row in rows}
    for name in ("m0", "m1", "m2"):
        for run in (None, *runs):
            own = [row for row in rows if run in (None, row.run) and not row.superseded]
            known = {row.number: row.metrics.get(name) for row in own}
            known = {
                number: value
                for number, value in known.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            for sense, best in (("least", min), ("most", max)):
                if known:
                    wanted = best(known, key=lambda number: float(known[number]))
                    assert store[f"{sense}:{name}" if run is None else f"{run}@{sense}:{name}"].number == wanted
    summaries = {summary.name: summary for summary in store._catalog.summaries()}
    assert set(summaries) == runs
    for run, summary in summaries.items():
        own = [row for row in rows if row.run == run]
        assert (summary.versions, summary.first) == (len(own), own[0])
        assert summary.stored_bytes == sum(row.stored_bytes for row in own)
        assert summary.original_bytes == sum(row.original_bytes for row in own)
        steps = [row.step for row in own if row.step is not None and not row.superseded]
        assert (summary.lowest.step if summary.lowest else None) == min(steps, default=None)
        assert summary.highest == store._catalog.highest(run)


@pytest.mark.local
@pytest.mark.parametrize("number", [1, 3])
def test_the_loss_of_an_extreme_version_is_told(tmp_path: Path, number: int) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest({"w": np.full(3, step)}, run="r", step=step, metrics={"loss": step}, hot=0)
    edit(tmp_path / "store" / "catalog.sqlite", "DELETE FROM versions WHERE number = ?", (number,))
    with ckstore.open(tmp_path / "store", "r") as store:
        for read in (store._catalog.summaries, lambda: store["least:loss" if number == 1 else "most:loss"]):
            with pytest.raises(ckstore.errors.IntegrityError, match=f"version {number} is missing"):
                read()
    edit(tmp_path / "store" / "catalog.sqlite", "DELETE FROM runs")
    with ckstore.open(tmp_path / "store", "r") as store, pytest.raises(ckstore.errors.IntegrityError, match="runs"):
        store["best:loss"]


@pytest.mark.local
@pytest.mark.parametrize("change", ["metric", "forget"])
def test_another_process_changes_the_best_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Between the look at the index and at the version itself."""
    original, done = Connection.rows_of, []

    def late(self: Connection, *arguments: Any) -> list[Any]:
        if not done:
            done.append(True)
            with ckstore.open(tmp_path / "store") as other:
                other.set_metrics("r@0", {"loss": 9}) if change == "metric" else other.forget("r@0")
        return original(self, *arguments)

    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest({"w": np.full(3, step)}, run="r", step=step, metrics={"loss": step}, hot=0)
        monkeypatch.setattr(Connection, "rows_of", late)
        assert store["least:loss"].step == 1
        assert done


def test_long_names_of_metrics_are_found_without_the_index(tmp_path: Path) -> None:
    name = "a" * 300
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest({"w": np.full(3, step)}, run="r", step=step, metrics={name: -step, "loss": 1})
        assert store[f"least:{name}"].step == 2
        assert store._catalog.summaries()[0].extremes.keys() == {"loss"}
        assert store.verify().problems == []


@pytest.mark.local
@pytest.mark.parametrize("statement", ["DELETE FROM metrics", "UPDATE metrics SET value = value - 1"])
def test_a_damaged_index_of_metrics_is_told(source: Path, tmp_path: Path, statement: str) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(source, metrics={"loss": 2.5})
    edit(tmp_path / "store" / "catalog.sqlite", statement)
    with ckstore.open(tmp_path / "store", "r") as store:
        assert "metrics" in " ".join(store.verify().problems)
        if statement.startswith("UPDATE"):
            with pytest.raises(ckstore.errors.IntegrityError, match="version 1 is named in place of another"):
                store["best:loss"]
    recover(tmp_path / "store")
    with ckstore.open(tmp_path / "store", "r") as store:
        assert store["best:loss"].number == 1


@pytest.mark.parametrize("value", ["NULL", "7", "x'ff'", "'[]'", "'{'"])
def test_metrics_of_another_type_are_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A flipped bit changes the type of a value, too."""
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": np.zeros(4)}, run="r", metrics={"loss": 1.0})
        monkeypatch.setattr(catalog_reader, "_METRICS", f"SELECT 0, 'r', '', {value}, 1")
        assert store._catalog.check() == []
        monkeypatch.setattr(
            catalog_reader, "_METRICS", f"SELECT 1, 'r', 'm', 1, 1 UNION ALL SELECT 0, 'r', '', {value}, 1"
        )
        assert "rows of metrics" in store._catalog.check()[0]
