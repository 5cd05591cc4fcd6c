"""`save` and `load` under names of versions, as with `torch.save` and `torch.load`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.integrations.lineage import ingest_next
from ckstore.integrations.torch import load, save
from ckstore.writing.drop import drop
from tests.equality import assert_same, storage_of


class Custom:
    """A class that no store knows."""

    def __init__(self, value: int) -> None:
        self.value = value


def state(step: int = 3) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.full((70, 50), float(step)))
    return {"weight": weight, "tied": weight, "half": torch.ones(5, dtype=torch.bfloat16), "step": step, "lr": 0.5}


@pytest.mark.parametrize("how", [{}, {"map_location": "cpu"}, {"map_location": torch.device("cpu")}])
def test_a_name_loads_like_a_file_with_torch(store: ckstore.Store, tmp_path: Path, how: dict[str, Any]) -> None:
    save(state(), "ckstore:gpt@3", store)
    save(state(), tmp_path / "state.pt", store)
    found = load("ckstore:gpt@3", store, **how)
    assert_same(found, torch.load(tmp_path / "state.pt"))
    assert_same(load(tmp_path / "state.pt", store, **how), found)
    assert storage_of(found["weight"]) == storage_of(found["tied"])
    assert [row.run for row in store._catalog.versions()] == ["gpt"], "the file is none"


def test_other_devices_are_torch_s_business(store: ckstore.Store) -> None:
    save(state(), "ckstore:gpt@3", store)
    assert load("ckstore:gpt@3", store, map_location="meta")["weight"].device.type == "meta"
    assert_same(load("ckstore:gpt@3", store, map_location=lambda storage, _: storage), state())


@pytest.mark.parametrize("name", ["ckstore:gpt@latest", "ckstore:gpt", "ckstore:1", "ckstore:best", "ckstore:latest"])
def test_every_name_of_a_version_loads_it(store: ckstore.Store, name: str) -> None:
    """The store may be given as a path, and the step by the state."""
    report = save(state(), "ckstore:gpt", store.place, metrics={"loss": 0.5})
    assert report is not None
    assert (report.version.step, report.version.metrics) == (3, {"loss": 0.5})
    store.tag("gpt@3", "best")
    assert_same(load(name, store.place), state())


def test_the_store_is_found_by_default(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKSTORE", str(store.place))
    save(state(), "ckstore:gpt@3")
    assert_same(load("ckstore:gpt@3"), state())


def test_objects_of_other_classes_need_trust(store: ckstore.Store) -> None:
    save({"w": torch.ones(3), "config": [Custom(7)]}, "ckstore:gpt@3", store)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        load("ckstore:gpt@3", store)
    found = load("ckstore:gpt@3", store, weights_only=False)
    assert found["config"][0].value == 7
    assert_same(found["w"], torch.ones(3))


def test_the_rest_of_a_version_loads_for_every_reader(store: ckstore.Store) -> None:
    """With tensors dropped it is no file any more, for torch neither."""
    moments = {"m": torch.ones(300, 300)}
    store.ingest(state() | {"optimizer": moments}, run="gpt", step=3, hot=0)
    store.ingest(state() | {"optimizer": moments, "own": Custom(7)}, run="own", step=3, hot=0, on_unknown="pickle")
    drop(store._repository, store._catalog.versions(), ["optimizer/*"])
    assert load("ckstore:gpt@3", store, map_location="meta")["weight"].device.type == "meta"
    assert "optimizer" not in load("ckstore:gpt@3", store)
    with pytest.raises(NotFoundError, match=r"has dropped optimizer/\*"):  # Exports hold no such objects.
        load("ckstore:own@3", store, weights_only=False)


def test_files_of_other_kinds_load_on_the_cpu(store: ckstore.Store, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "model" / "model.safetensors")
    store.ingest(tmp_path / "model" / "model.safetensors", run="file")
    store.ingest(tmp_path / "model", run="directory")
    assert_same(load("ckstore:file", store), {"w": torch.ones(3)})
    assert_same(load("ckstore:directory", store), {"model.safetensors": {"w": torch.ones(3)}})
    for run in ("file", "directory"):
        with pytest.raises(UsageError, match="load it without `map_location`"):
            load(f"ckstore:{run}", store, map_location="meta")


def test_existing_versions_are_replaced_on_demand_alone(store: ckstore.Store) -> None:
    save(state(), "ckstore:gpt@3", store)
    with pytest.raises(ConflictError):
        save(state(4), "ckstore:gpt@3", store)
    save(state(4), "ckstore:gpt@3", store, replace=True)
    assert_same(load("ckstore:gpt@3", store), state(4))


def superseded(store: ckstore.Store, run: str = "gpt") -> list[int | None]:
    return [row.step for row in store._catalog.versions(run) if row.superseded]


def trained(store: ckstore.Store, *steps: int) -> None:
    """Save steps as another process would."""
    for step in steps:
        store.ingest(state(step), run="gpt", step=step)


@pytest.mark.parametrize("name", ["ckstore:gpt@12", "ckstore:gpt"])
def test_a_training_that_loads_an_earlier_version_goes_back_to_it(store: ckstore.Store, name: str) -> None:
    trained(store, 4, 8, 12, 16)
    for step in (16, 8, 4):  # The others are compared.
        load(f"ckstore:gpt@{step}", store)
    for step in (12, 14):
        save(state(step) | {"step": step, "lr": 0.25}, name if step == 12 else f"ckstore:gpt@{step}", store)
    assert superseded(store) == [12, 16]
    assert [store[f"gpt@{step}"].parent for step in (12, 14)] == [2, 5]
    assert load("ckstore:gpt@12", store)["lr"] == 0.25
    assert_same(store[3].state_dict(), state(12))
    assert load("ckstore:gpt@latest", store)["step"] == 14


def test_a_version_that_is_loaded_for_a_comparison_is_no_parent(store: ckstore.Store) -> None:
    """Nor if it is replaced, or if the training has stored other versions since it was loaded."""
    for step in (4, 8, 12):
        save(state(step), f"ckstore:gpt@{step}", store)
        load("ckstore:gpt@4", store)
    load("ckstore:gpt@8", store)
    save(state(8) | {"lr": 0.25}, "ckstore:gpt@8", store, replace=True)
    trained(store, 16)
    save(state(20), "ckstore:gpt@20", store)
    load("ckstore:gpt@8", store)
    save(state(3), "ckstore:other@3", store)
    assert superseded(store) == []
    assert store["other@3"].parent is None


def test_a_training_may_go_back_in_its_own_process(store: ckstore.Store) -> None:
    for step in (4, 8, 12):
        save(state(step), f"ckstore:gpt@{step}", store)
    load("ckstore:gpt@4", store)
    for step in (8, 10):
        save(state(step) | {"lr": 0.25}, f"ckstore:gpt@{step}", store)
    assert superseded(store) == [8, 12]
    assert [store[f"gpt@{step}"].parent for step in (8, 10)] == [1, 4]


def test_a_version_that_was_forgotten_is_no_parent(store: ckstore.Store) -> None:
    trained(store, 4, 8)
    load("ckstore:gpt@4", store)
    store.forget("gpt@4")
    save(state(9), "ckstore:gpt@9", store)
    assert store["gpt@9"].parent == 2


@pytest.mark.parametrize("name", ["ckstore:gpt@latest", "ckstore:gpt@", "ckstore:gpt@-1", "ckstore:@3", "ckstore:"])
def test_names_that_no_version_can_have_are_refused(store: ckstore.Store, name: str) -> None:
    with pytest.raises(UsageError, match=r"write ckstore:RUN@STEP|cannot name a run"):
        save(state(), name, store)
    assert store._catalog.versions() == []


def test_a_version_that_is_not_there_is_named(store: ckstore.Store) -> None:
    with pytest.raises(NotFoundError, match="gpt@7"):
        load("ckstore:gpt@7", store)


def test_steps_have_every_notation(store: ckstore.Store) -> None:
    """Also where the run has versions, and after a load."""
    for step, means in (("9k", 9000), ("10k", 10_000), (11e3, 11_000), (torch.tensor(12_000), 12_000)):
        report = ingest_next(store, state(means), run="gpt", step=step, replace=False)  # type: ignore[arg-type]
        assert report.version.step == means
        load("ckstore:gpt@latest", store)
    for step in ("x", 2.5):
        with pytest.raises(UsageError, match="A step must be an integer"):
            ingest_next(store, state(), run="gpt", step=step, replace=False)  # type: ignore[arg-type]
