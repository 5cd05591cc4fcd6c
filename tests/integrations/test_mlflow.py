"""Artifacts of MLflow: checkpoints become versions, and come back byte for byte."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.integrations.mlflow import artifact_repository
from ckstore.storage.remote.mirror import VARIABLE as CACHE
from tests.object_store import object_store

#: Imports MLflow once, which takes seconds, and runs a script for each location and place in a directory of its own.
PROGRAM = """
import os, sys
from pathlib import Path

import mlflow
import torch
from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry as registry

import ckstore
from ckstore.integrations.mlflow import artifact_repository

if "ckstore" not in registry._registry:  # Where the package is installed, its entry point is used.
    registry.register("ckstore", artifact_repository)
beginning = Path.cwd()
for number, (location, place) in enumerate(zip(sys.argv[2::2], sys.argv[3::2])):
    (beginning / str(number)).mkdir()
    os.chdir(beginning / str(number))
    exec(compile(sys.argv[1], location, "exec"))
"""

SCRIPT = """
mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
experiment = mlflow.create_experiment("training", artifact_location=location)
generator = torch.Generator().manual_seed(0)
weight = torch.randn(300, 400, generator=generator)
Path("model/deep").mkdir(parents=True)
Path("texts/deep").mkdir(parents=True)
torch.save({"w": weight}, "model/model.pt")
Path("model/deep/table.csv").write_text("a,b")
Path("texts/deep/notes.txt").write_text("one")

def log(step, factor=1):
    torch.save({"w": weight * factor + step * 1e-6}, f"step{step}.pt")
    mlflow.log_artifact(f"step{step}.pt", "checkpoints")

with mlflow.start_run(experiment_id=experiment) as run:
    log(100)
    log(200)
    log(200, 2)  # In place of the one before.
    mlflow.log_text("first", "notes.txt")
    mlflow.log_text("second", "notes.txt")
    mlflow.log_artifacts("model", "model")
    mlflow.log_artifacts("texts")

id = run.info.run_id
client = mlflow.MlflowClient()
listed = [(item.path, item.is_dir, item.file_size) for item in client.list_artifacts(id, "checkpoints")]
assert listed == [(f"checkpoints/step{n}.pt", False, Path(f"step{n}.pt").stat().st_size) for n in (100, 200)], listed
assert [item.path for item in client.list_artifacts(id)] == ["checkpoints", "deep", "model", "notes.txt"]
assert client.list_artifacts(id, "checkpoints/step100.pt") == client.list_artifacts(id, "none") == []
whole = Path(mlflow.artifacts.download_artifacts(run_id=id, artifact_path=""))
came = {path.relative_to(whole).as_posix(): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
went = {f"checkpoints/step{n}.pt": Path(f"step{n}.pt").read_bytes() for n in (100, 200)}
went |= {f"model/{name}": Path("model", name).read_bytes() for name in ("model.pt", "deep/table.csv")}
went |= {"deep/notes.txt": b"one", "notes.txt": b"second"}
assert came == went, (sorted(came), sorted(went))
assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/model/deep/table.csv") == "a,b"
one = mlflow.artifacts.download_artifacts(run_id=id, artifact_path="model")
assert Path(one, "model.pt").read_bytes() == went["model/model.pt"]
try:
    mlflow.artifacts.download_artifacts(run_id=id, artifact_path="none.pt")
except mlflow.MlflowException:
    pass
else:
    raise AssertionError("an artifact that does not exist")
with ckstore.open(place) as store:
    assert store.run(f"mlflow/{id}/checkpoints").steps == [100, 200]
    assert store.verify().problems == []

class Doubles(mlflow.pyfunc.PythonModel):
    def predict(self, context, model_input):
        return [2 * value for value in model_input]

with mlflow.start_run(experiment_id=experiment) as other:
    model = mlflow.pyfunc.log_model(name="doubles", python_model=Doubles(), pip_requirements=[])
    mlflow.log_text("kept", "notes.txt")
assert mlflow.pyfunc.load_model(model.model_uri).predict([3]) == [6]

artifacts = artifact_repository(run.info.artifact_uri)
try:
    artifacts.delete_artifacts("model/deep/table.csv")
except ckstore.ConflictError as error:
    assert "has files besides model/deep/table.csv" in str(error), error
else:
    raise AssertionError("a file without its version")
artifacts.delete_artifacts("model")
artifacts.delete_artifacts("checkpoints/step100.pt")
assert [item.path for item in client.list_artifacts(id)] == ["checkpoints", "deep", "notes.txt"]
assert [item.path for item in client.list_artifacts(id, "checkpoints")] == ["checkpoints/step200.pt"]
artifacts.delete_artifacts()
artifacts.delete_artifacts("none")
assert client.list_artifacts(id) == []
assert [item.path for item in client.list_artifacts(other.info.run_id)] == ["notes.txt"]
"""

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed"),
]


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def test_artifacts_in_a_version_with_other_files_are_kept(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for name in ("mine", "others"):
            (tmp_path / "files" / name).mkdir(parents=True)
            np.save(tmp_path / "files" / name / "weight.npy", np.arange(len(name)))
        store.ingest(tmp_path / "files", run="mlflow/a", force=True)
    artifacts = artifact_repository(f"ckstore://{tmp_path}/store/a/mine")
    assert [item.path for item in artifacts.list_artifacts()] == ["weight.npy"]
    with pytest.raises(ckstore.ConflictError, match="has files besides a/mine"):
        artifacts.delete_artifacts()
    with ckstore.open(tmp_path / "store") as store:
        assert len(store) == 1


def test_files_of_one_step_are_artifacts_of_their_own(tmp_path: Path) -> None:
    """Also with equal contents, or without a step; a file that is logged again takes its own place alone."""
    ckstore.init(tmp_path / "store").close()
    artifacts = artifact_repository(f"ckstore://{tmp_path}/store/id/artifacts")
    files: dict[str, Path] = {}

    def log(name: str, place: str, value: int, step: int | None = None) -> None:
        files[f"{place}/{name}".strip("/")] = path = tmp_path / str(len(files)) / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".txt"):
            path.write_text(str(value) if value else "")
        else:
            torch.save({"w": torch.full((9,), value), **({} if step is None else {"step": step})}, path)
        artifacts.log_artifact(str(path), place)

    for step in (100, 200):
        log(f"step{step}.pt", "checkpoints", step)
        log(f"ema_step{step}.pt", "checkpoints", step + 1)
        log(f"same_step{step}.pt", "checkpoints", step)
        log("model.pt", "~strange/~", step, step)
    log("model.pt", "a..@?+%+/+", 8, 8)
    log("step100.pt", "checkpoints", 5)
    log("model.pt", "~strange/~", 6, 100)
    for name in ("a.txt", "b.txt", "a.pt", "b.pt"):
        log(name, "", 7)
    log("empty.txt", "texts", 0)
    assert set(artifacts._files()) == files.keys()
    for name, path in files.items():
        artifacts._download_file(name, str(tmp_path / "found"))
        assert (tmp_path / "found").read_bytes() == path.read_bytes(), name
    with ckstore.open(tmp_path / "store") as store:
        steps = {run.name: run.steps for run in store.runs()}
    assert steps == {
        "mlflow/id/checkpoints": [100, 200],
        "mlflow/id/checkpoints/+ema_step": [100, 200],
        "mlflow/id/checkpoints/+same_step": [100, 200],
        "mlflow/id/%7Estrange/%7E": [100, 200],
        "mlflow/id/a%2E%2E%40%3F+%25+/%2B": [8],
        "mlflow/id": [None, None],
        "mlflow/id/+b": [None, None],
        "mlflow/id/texts": [None],
    }
    artifacts.delete_artifacts("checkpoints/ema_step100.pt")
    artifacts.delete_artifacts("b.txt")
    assert set(artifacts._files()) == files.keys() - {"checkpoints/ema_step100.pt", "b.txt"}


@pytest.mark.long
def test_the_location_or_the_environment_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The location alone where it has a path; the environment a store in a bucket."""
    place = tmp_path / "store"
    with object_store() as server:
        url = f"{server.url}/training"
        for name, value in {**server.anywhere, "CKSTORE": url}.items():
            monkeypatch.setenv(name, value)
        for one in (place, url):
            ckstore.init(one).close()
        command = [sys.executable, "-c", PROGRAM, SCRIPT, f"ckstore://{place}", str(place), "ckstore:///", url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
