from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray

import ckstore
from ckstore.errors import NotFoundError, UsageError
from ckstore.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    torch.manual_seed(12)
    weight = torch.randn(900, 400)
    with ckstore.init(tmp_path_factory.mktemp("run") / "store") as store:
        for step in range(4):
            state = {
                "model": {"w": weight + 0.01 * step, "version": torch.tensor(step), "bf16": torch.ones(3).bfloat16()}
            }
            if step > 0:
                state["optimizer"] = {"m": torch.full((5,), float(step))}
            state["model"]["grows"] = torch.zeros(3 + (step == 3))
            store.ingest(state, run="gpt", step=10 * step)
        store.ingest({"other": torch.zeros(2)}, run="else")
        yield store.run("gpt")


def test_a_run_is_its_versions_in_order(run: Run) -> None:
    store = ckstore.open(run.latest._stored.repository.place)
    assert len(run) == 4
    assert [version.step for version in run] == run.steps == [0, 10, 20, 30]
    assert run.latest.number == run.versions[-1].number == 4
    assert Run("gpt", [run.versions[2], run.versions[1]]).latest.step == 20
    assert repr(run.tail(3)) == "<ckstore.Run gpt, 3 versions>"
    with pytest.raises(NotFoundError, match="Unknown run gpt2"):
        store.run("gpt2")
    with pytest.raises(NotFoundError):
        _ = run.tail(0).latest


def test_a_run_is_in_order_of_step(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in (30, 20, 100, 3):
            store.ingest({"w": np.full(3, step)}, run="gpt", step=step, metrics={"at": step})
        found = store.run("gpt")
        assert found.steps == found.metrics["at"] == found.arrays["w"][:, 0].tolist() == [3, 20, 30, 100]  # type: ignore[index, union-attr]
        assert store.runs() == [found]
        assert found.tail(2).steps == found[30:].steps == [30, 100]
        assert [version["step"] for version in store.report("gpt").contents["runs"][0]["versions"]] == found.steps
        store.ingest({"w": np.zeros(3)}, run="gpt")
        assert store.run("gpt").steps == [30, 20, 100, 3, None]


def test_the_parent_of_a_step_is_the_step_below(store: ckstore.Store) -> None:
    """Also if other steps came in between, and for a step below all."""
    for step, parent in ((300, None), (400, 300), (600, 400), (100, 600), (500, 400), (700, 600), (200, 100)):
        row = store.ingest({"w": torch.full((4,), float(step))}, run="filled", step=step).version
        assert row.parent == (None if parent is None else store[f"filled@{parent}"].number)
    assert repr(store.run("filled").tail(1)) == "<ckstore.Run filled, 1 version>"


def test_the_history_of_a_weight_is_a_slice(run: Run) -> None:
    array = run.arrays["model/w"]
    assert array.shape == (4, 900, 400)
    assert array.chunks == (1, 655, 400)
    history = array[:, 3, 5]
    np.testing.assert_array_equal(history, [version["model/w"][3, 5] for version in run])
    np.testing.assert_array_equal(
        array[1:3, 650:660], np.stack([run[10]["model/w"][650:660], run[20]["model/w"][650:660]])
    )
    np.testing.assert_array_equal(run.arrays["model/version"][...], [0, 1, 2, 3])
    assert run.arrays["model/bf16"].attrs["dtype"] == "bfloat16"


def test_tensors_that_not_all_versions_share_are_listed(run: Run) -> None:
    attributes = dict(run.arrays.attrs)
    assert attributes["left_out"] == {"missing": ["optimizer/m"], "changed": ["model/grows"]}
    assert (attributes["versions"], attributes["steps"], attributes["run"]) == ([1, 2, 3, 4], [0, 10, 20, 30], "gpt")
    assert set(run.arrays["model"].keys()) == {"w", "version", "bf16"}
    np.testing.assert_array_equal(run[10:30].arrays["optimizer/m"][:, 0], [1, 2])
    assert run[10:30].arrays["model/grows"].shape == (2, 3)


def test_only_the_versions_that_are_asked_for_are_decoded(run: Run) -> None:
    reader = run.latest._stored.repository.reader
    array = run.arrays["model/w"]
    reader.cache = type(reader.cache)(reader.cache.limit)
    before = reader.decoded_chunks
    array[0, 0]
    one = reader.decoded_chunks - before
    assert one in (1, 2)
    before = reader.decoded_chunks
    run[0]["model/w"][1]
    assert reader.decoded_chunks == before


def test_xarray_labels_versions(run: Run) -> None:
    dataset = xarray.open_zarr(run.arrays.store, group="model", consolidated=True)
    assert dataset["w"].dims == ("version_", "w_dim0", "w_dim1")
    labelled = dataset.assign_coords(version_=run.steps)
    np.testing.assert_array_equal(labelled["w"].sel(version_=20)[7], run[20]["model/w"][7])


def test_a_run_survives_pickling(run: Run) -> None:
    array = pickle.loads(pickle.dumps(run.tail(3).arrays["optimizer/m"]))
    np.testing.assert_array_equal(array[:, 0], [1, 2, 3])


def test_a_run_without_common_tensors_is_an_empty_group(run: Run) -> None:
    assert list(run.tail(0).arrays.keys()) == []


def test_a_step_selects_a_version_and_a_range_of_steps_a_run(run: Run) -> None:
    assert run[20] == run.versions[2]
    assert run[20] in run
    assert run[10:30].steps == [10, 20]
    assert run[10:].steps == [10, 20, 30]
    assert run[:30:2].steps == run[::2].steps == [0, 20]
    assert run[0:40] == run.tail(9)
    with pytest.raises(NotFoundError, match=r"no version at step 15; the nearest are 0, 10, 20"):
        run[15]
    with pytest.raises(UsageError, match=r"tail\(n\)"):
        run[-2:]
    for every in (0, -1):
        with pytest.raises(UsageError, match=f"every nth version, not every {every}"):
            run[::every]


def test_metrics_are_columns(store: ckstore.Store) -> None:
    for step, metrics in enumerate([{"loss": 2.0}, {"loss": 1.5, "accuracy": 0.5}]):
        store.ingest({"w": torch.full((4,), float(step))}, run="r", step=step, metrics=metrics)
    assert store.run("r").metrics == {"loss": [2.0, 1.5], "accuracy": [None, 0.5]}


def test_versions_are_taken_where_names_are(store: ckstore.Store) -> None:
    for step in range(3):
        store.ingest({"1": torch.full((4,), float(step))}, run="r", step=step, parent=None)
    last = store["r@2"]
    assert last in store
    assert store[last] == last
    store.tag(last, "best")
    assert store.diff(store[1], last).count("values") == 1
    assert list(store.map(len, last)) == [1]
    store.forget(store["r@1"])
    assert list(store) == [1, 3]
    assert [version.step for version in reversed(store.run("r"))] == [2, 0]
    with pytest.raises(UsageError, match="indexed by step"):
        _ = store.run("r")["best"]
