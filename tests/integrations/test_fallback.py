"""Helpers that resume a training take the newest sound version where the latest one is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import IntegrityError
from ckstore.integrations.lightning import StoreIO
from ckstore.integrations.torch import load
from ckstore.integrations.transformers import resume_path
from tests.checkpoints import draw, flip

Resume = Callable[[ckstore.Store, str, Path], Any]


def by_torch(store: ckstore.Store, name: str, directory: Path) -> Any:
    return load(f"ckstore:{name}", store)["file.pt"]["step"]


def by_torch_elsewhere(store: ckstore.Store, name: str, directory: Path) -> Any:
    return load(f"ckstore:{name}", store.place)["file.pt"]["step"]


def by_lightning(store: ckstore.Store, name: str, directory: Path) -> Any:
    io = StoreIO(store, run="run")
    step = io.load_checkpoint(f"ckstore:{name}")["file.pt"]["step"]
    assert io._first == step, "later versions are replaced from the restored step on"
    return step


def by_transformers(store: ckstore.Store, name: str, directory: Path) -> Any:
    found = resume_path(store, name, directory)
    assert found is not None
    [restored] = directory.iterdir()
    assert restored == Path(found)
    step = torch.load(restored / "file.pt")["step"]
    assert restored.name == f"checkpoint-{step}"
    return step


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckstore.Store]:
    """A store with four versions of a run, one of another, and damage in the third and the fourth."""
    monkeypatch.setattr("ckstore.integrations.lightning._PARENTS", ())
    with ckstore.init(tmp_path / "store") as store:
        for number, (run, step) in enumerate([("run", 1), ("run", 2), ("other", 9), ("run", 3), ("run", 4)]):
            path = tmp_path / f"in{number}"
            path.mkdir()
            torch.save({"weight": draw(300, 300, seed=number), "step": step}, path / "file.pt")
            store.ingest(path, run=run, step=step, hot=0)
        packs = [store[f"run@{step}"]._stored.row.pack for step in (3, 4)]
    for pack in packs:
        flip(tmp_path / "store", pack, lambda size: size // 2)
    with ckstore.open(tmp_path / "store") as store:
        yield store


@pytest.mark.long
@pytest.mark.parametrize("resume", [by_torch, by_torch_elsewhere, by_lightning, by_transformers])
@pytest.mark.parametrize("name", ["run@latest", "run", "latest"])
def test_the_latest_sound_version_is_resumed_from(
    damaged: ckstore.Store, tmp_path: Path, resume: Resume, name: str
) -> None:
    with pytest.warns(UserWarning, match="The training resumes from run@2, the newest sound version"):
        assert resume(damaged, name, tmp_path / "out") == 2


@pytest.mark.parametrize("resume", [by_torch, by_lightning, by_transformers])
def test_a_version_that_is_named_by_itself_is_not_replaced(
    damaged: ckstore.Store, tmp_path: Path, resume: Resume
) -> None:
    for name in ("run@4", str(damaged["run@4"].number), damaged["run@4"].id):
        with pytest.raises(IntegrityError, match=r"The newest sound version before run@4 is run@2\.$"):
            resume(damaged, name, tmp_path / "out")
    assert resume(damaged, "run@2", tmp_path / "out") == 2


def test_without_a_sound_version_the_damage_is_named(damaged: ckstore.Store, tmp_path: Path) -> None:
    packs = [damaged[f"run@{step}"]._stored.row.pack for step in (1, 2)]
    for pack in packs:
        flip(damaged.place, pack, lambda size: size // 2)
    with ckstore.open(damaged.place, "r") as store, pytest.raises(IntegrityError) as raised:
        load("ckstore:run@latest", store)
    assert "sound" not in str(raised.value)


def test_dropped_tensors_are_no_state_to_resume_from(damaged: ckstore.Store) -> None:
    from ckstore.writing.drop import drop

    drop(damaged._repository, [damaged["run@2"]._stored.row], ["*weight"])
    assert damaged["run@4"].fallback() == damaged["run@1"]
    assert damaged["run@1"].fallback() is None
