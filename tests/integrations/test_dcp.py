"""`dcp.save`, `dcp.async_save` and `dcp.load` with a store, on one rank, two and three."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckstore
from ckstore.integrations.dcp import StopSignal, StoreReader, StoreWriter
from ckstore.objects.likeness import BANDS
from ckstore.saving import termination
from ckstore.storage import pack
from ckstore.writing import ingest
from tests.distributed import STEPS, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of two ranks under FSDP2, saved as directories, as files, and to a store."""
    place = tmp_path_factory.mktemp("trained")
    ckstore.init(place / "writer").close()
    run_ranks(2, "train", place=str(place))
    return place


def left_over(store: ckstore.Store) -> list[str]:
    return [name for name in os.listdir(store.path / "packs") if name.startswith(".tmp-")]


@pytest.mark.long
def test_versions_hold_the_tensors_of_all_ranks(trained: Path) -> None:
    """The tensors are whole, as in the file with all of it, and nothing that was staged is left."""
    with ckstore.open(trained / "writer") as opened:
        assert [row.step for row in opened._catalog.versions("sync")] == list(STEPS)
        for step in STEPS:
            expected = torch.load(trained / "pt" / f"step-{step}.pt")
            found = opened[f"sync@{step}"].state_dict()
            assert found["step"] == step
            assert found["model"].keys() == expected["model"].keys()
            for name, value in expected["model"].items():
                assert torch.equal(found["model"][name], value)
            for name, moments in expected["optimizer"]["state"].items():
                for key, value in moments.items():
                    assert torch.equal(found["optimizer"]["state"][name][key], value)
            assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
        assert left_over(opened) == []


@pytest.mark.parametrize("run", ["thread", "process"])
def test_saves_behind_the_training(trained: Path, run: str) -> None:
    with ckstore.open(trained / "writer") as opened:
        found, expected = opened[f"{run}@{STEPS[-1]}"], opened[f"sync@{STEPS[-1]}"]
        assert list(found) == list(expected)
        assert all(torch.equal(found[path].torch(), expected[path].torch()) for path in found)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 3])
def test_loaded_on_another_number_of_ranks(trained: Path, world: int) -> None:
    """Values are those of `FileSystemReader`, from a version of the writer and from one of a directory."""
    directory = trained / "dcp" / f"step-{STEPS[-1]}"
    with ckstore.open(trained / "writer") as opened:
        opened.ingest(directory, run="directory")
    places = {"directory": str(directory), "store": str(trained / "writer")}
    for version in ("sync@latest", "directory@latest"):
        run_ranks(world, "load", place=str(trained), version=version, **places)


@pytest.mark.long
def test_a_series_takes_the_bytes_of_files(trained: Path, tmp_path: Path) -> None:
    """Directories, the writer's versions and files with all of it: within two per cent."""
    stored = {}
    for kind, ending in (("dcp", ""), ("pt", ".pt")):
        with ckstore.init(tmp_path / kind) as opened:
            reports = [opened.ingest(trained / kind / f"step-{step}{ending}", run="a", hot=0) for step in STEPS]
            assert [report.version.depth for report in reports] == [0, 1, 2, 3]
            stored[kind] = sum(report.version.stored_bytes for report in reports)
    with ckstore.open(trained / "writer") as opened:
        stored["writer"] = sum(row.stored_bytes for row in opened._catalog.versions("sync"))
    assert stored["dcp"] < 1.02 * stored["pt"]
    assert stored["writer"] < 1.02 * stored["pt"]


def test_objects_lists_and_dtypes(store: ckstore.Store) -> None:
    state = {
        "half": torch.randn(3, 4).bfloat16(), "scalar": torch.tensor(3.5), "none": torch.zeros(0, 2),
        "turned": torch.arange(12).reshape(3, 4).T, "list": [torch.ones(2), {"x": torch.zeros(1)}],
        "objects": {"rate": 0.5, "pair": (torch.arange(3), [1, "b"])}, "complex": torch.randn(3, dtype=torch.complex64),
    }  # fmt: skip
    with pytest.raises(ckstore.errors.UsageError, match="has no option metric;"):
        StoreWriter(store, "a", 1, metric={"loss": 0.25})
    with pytest.raises(ckstore.errors.UsageError, match="`config` takes a mapping"):
        StoreWriter(store, "a", 1, config=7)
    dcp.save(state, storage_writer=StoreWriter(store, "a", 1, metrics={"loss": 0.25}, config={"lr": 3e-4}))
    assert store["a@1"].metrics == {"loss": 0.25}
    assert store["a@1"].config == {"lr": 3e-4}
    loaded: dict[str, Any] = {
        "half": torch.zeros(3, 4).bfloat16(), "scalar": torch.tensor(0.0), "none": torch.zeros(0, 2),
        "turned": torch.zeros(4, 3, dtype=torch.int64), "list": [torch.zeros(2), {"x": torch.ones(1)}],
        "objects": {"rate": 0, "pair": None}, "complex": torch.zeros(3, dtype=torch.complex64),
    }  # fmt: skip
    dcp.load(loaded, storage_reader=StoreReader(store, "a@latest"))
    assert loaded["objects"]["rate"] == 0.5
    assert torch.equal(loaded["objects"]["pair"][0], torch.arange(3))
    assert loaded["objects"]["pair"][1] == [1, "b"]
    assert torch.equal(loaded["list"][1]["x"], torch.zeros(1))
    for name in ("half", "scalar", "none", "turned", "complex"):
        assert torch.equal(loaded[name], state[name])


def test_a_wrapped_model_with_a_larger_vocabulary_is_stored_against_the_former_one(store: ckstore.Store) -> None:
    generator = torch.Generator().manual_seed(0)
    model = {"emb.weight": torch.randn(3000, 32, generator=generator), "w.weight": torch.randn(300, 300)}
    new = torch.randn(100, 32, generator=generator)
    larger = {f"module.{name}": value + 1e-4 for name, value in model.items()}
    larger["module.emb.weight"] = torch.cat([larger["module.emb.weight"], new])
    for step, state in enumerate([model, larger, {name: value + 1e-4 for name, value in larger.items()}]):
        dcp.save(dict(state), storage_writer=StoreWriter(store, "a", step, hot=0))
        assert all(torch.equal(store[f"a@{step}"].state_dict()[name], value) for name, value in state.items())
    first, second, third = (version.stored_bytes for version in store.run("a"))
    assert max(second, third) < 0.7 * first


def test_a_first_version_finds_its_parent_by_likeness(store: ckstore.Store, tmp_path: Path) -> None:
    """Of ranks, and of others against one of ranks; its bands are those of a file with the same values."""
    generator = torch.Generator().manual_seed(0)
    state = {f"{name}.weight": torch.randn(300, 300, generator=generator) for name in "abc"}
    dcp.save(dict(state), storage_writer=StoreWriter(store, "ranks", 0))
    with ckstore.init(tmp_path / "other") as other:
        other.ingest(state, run="ranks", step=0)
        bands = [one["ranks@0"]._stored.document.bands for one in (store, other)]
    assert len(bands[0]) == BANDS
    assert bands[0] == bands[1]
    tuned = {name: value + 0.005 * torch.randn(300, 300, generator=generator) for name, value in state.items()}
    writer = StoreWriter(store, "tuned", 0, hot=0)
    dcp.save(dict(tuned), storage_writer=writer)
    assert writer.report is not None
    assert writer.report.note == "Against ranks@0, by likeness."
    store.ingest({name: value + 0.005 for name, value in tuned.items()}, run="third", step=0, hot=0)
    first, second, third = (store[f"{run}@0"] for run in ("ranks", "tuned", "third"))
    assert [version.parent for version in (first, second, third)] == [None, first.number, second.number]
    assert max(second.stored_bytes, third.stored_bytes) < 0.85 * first.stored_bytes
    assert all(torch.equal(second.state_dict()[name], value) for name, value in tuned.items())


def test_a_training_that_loads_an_earlier_version_goes_back_to_it(store: ckstore.Store) -> None:
    """The parent is known when the writer is made: another process may store the version."""

    def save(step: int, value: float, run: str | None = "a") -> None:
        dcp.save({"w": torch.full((3,), value)}, storage_writer=StoreWriter(store.place, run, step))

    for step in (4, 8, 12):
        store.ingest({"w": torch.full((3,), float(step))}, run="a", step=step)
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=StoreReader(store, "a@4"))
    assert pickle.loads(pickle.dumps(StoreWriter(store, "a", 8)))._options.parent == 1
    for step in (8, 10):
        save(step, -step)
    save(8, 1.0, "a/ema")
    rows = store._catalog.versions("a")
    assert [(row.step, row.superseded) for row in rows] == [
        (4, False), (8, True), (12, True), (8, False), (10, False)
    ]  # fmt: skip
    assert [store[f"a@{step}"].parent for step in (8, 10)] == [1, 4]
    with pytest.raises((ckstore.ConflictError, CheckpointException)):
        save(8, 2.0)
    for name, value in ((2, 8.0), ("a@8", -8.0), ("a/ema@8", 1.0)):
        dcp.load(state, storage_reader=StoreReader(store, name))
        assert (state["w"] == value).all()


def test_any_version_is_read(store: ckstore.Store) -> None:
    """Also one that was stored from memory, with integers as keys and arrays."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store.ingest({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run="a", step=1)
    other = torch.nn.Linear(3, 2)
    state = {"model": other.state_dict()}
    dcp.load(state, storage_reader=StoreReader(store.place, 1))
    assert torch.equal(other.weight, model.weight)
    moment = {"optimizer": {"state": {"0": {"exp_avg": torch.zeros(2, 3)}}}}
    dcp.load(moment, storage_reader=StoreReader(store, "a"))
    assert torch.equal(moment["optimizer"]["state"]["0"]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    store.ingest([torch.ones(2)], run="list")
    with pytest.raises(CheckpointException, match="holds no dictionary"):
        dcp.load({"x": torch.ones(2)}, storage_reader=StoreReader(store, "list"))


class _Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise RuntimeError("no such value")


def test_a_save_that_fails_leaves_nothing(store: ckstore.Store) -> None:
    state = {"x": torch.ones(100)}
    writer = StoreWriter(store, "a", 1)
    with pytest.raises(CheckpointException, match="no such value"):
        dcp.save(state, storage_writer=writer, planner=_Failing())
    assert store._catalog.versions() == []
    # The exception holds the writer in a cycle: it is freed with its next save, or some time later.
    del writer
    gc.collect()
    dcp.save(state, storage_writer=StoreWriter(store, "a", 1))
    with pytest.raises(CheckpointException, match="a@1"):
        dcp.save({"x": torch.zeros(100)}, storage_writer=StoreWriter(store, "a", 1))
    assert len(store._catalog.versions()) == 1
    assert left_over(store) == []


def test_a_full_disk_is_reported(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pack.ZipStream, "add_stored", full)
    with pytest.raises(CheckpointException, match="400 more bytes are needed"):
        dcp.save({"x": torch.ones(100)}, storage_writer=StoreWriter(store, "a", 1))
    assert store._catalog.versions() == []
    assert left_over(store) == []


def test_unsupported_calls_are_refused(store: ckstore.Store) -> None:
    state = {"x": torch.ones(2)}
    with pytest.raises(ckstore.UsageError, match="leave checkpoint_id out"):
        dcp.save(state, checkpoint_id="here", storage_writer=StoreWriter(store, "a", 1))
    with pytest.raises(ckstore.UsageError, match="use_collectives"):
        dcp.save(state, storage_writer=StoreWriter(store, "a", 1), use_collectives=False)
    dcp.save(state, storage_writer=StoreWriter(store, "a", 1), planner=DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        dcp.save(state, storage_writer=StoreWriter(store, "a", 2), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert pickle.loads(pickle.dumps(StoreWriter(store, "a", 3))).report is None


def test_the_first_process_of_a_container_ends_by_the_status_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It survives the signal itself. After an error, the error ends the program."""
    monkeypatch.setattr(termination, "_asked", None)
    monkeypatch.setattr(termination, "_has_failed", False)
    monkeypatch.setattr(signal, "raise_signal", lambda number: None)
    stop = StopSignal(grace=60)
    assert (stop.is_asked(), stop.remaining) == (False, None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_asked()
    assert stop.remaining is not None
    assert 50 < stop.remaining <= 60
    with pytest.raises(SystemExit) as ended:
        stop.close()
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(ValueError, match="mine"), StopSignal():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: print)
        with pytest.raises(ckstore.UsageError, match="without a handler"):
            StopSignal()


class _Converting(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.double() if isinstance(found, torch.Tensor) else found


class _Cutting(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        [item] = plans[0].items
        half = dataclasses.replace(item.tensor_data.chunk, sizes=torch.Size([50]))
        cut = dataclasses.replace(item, tensor_data=dataclasses.replace(item.tensor_data, chunk=half))
        return [dataclasses.replace(plans[0], items=[cut])], metadata

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object[:50]


@pytest.mark.parametrize(
    ("planner", "words"), [(_Converting(), "another tensor for x"), (_Cutting(), "do not add up to the tensor")]
)
def test_planners_that_contradict_themselves_are_refused(
    store: ckstore.Store, planner: DefaultSavePlanner, words: str
) -> None:
    with pytest.raises(CheckpointException, match=words):
        dcp.save({"x": torch.ones(100)}, storage_writer=StoreWriter(store, "a", 1), planner=planner)
    assert store._catalog.versions() == []


def test_another_job_that_commits_first_is_noticed(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same content there is one version; other content is a conflict."""
    dcp.save({"x": torch.ones(100)}, storage_writer=StoreWriter(store, "a", 1))
    found = ingest.existing_of
    late = [True, True]
    monkeypatch.setattr(ingest, "existing_of", lambda *given: None if late and late.pop() else found(*given))
    for value in (1.0, 2.0):
        late[:] = [False, True]  # The first look is too early.
        writer = StoreWriter(store, "a", 1)
        state = {"x": torch.full((100,), value)}
        if value == 1.0:
            dcp.save(state, storage_writer=writer)
            assert writer.report is not None
            assert not writer.report.is_new
        else:
            with pytest.raises(CheckpointException, match="holds other content"):
                dcp.save(state, storage_writer=writer)
        assert late == []
    assert len(store) == 1
    assert len(os.listdir(store.path / "packs")) == 2
    assert store.verify().problems == []
