"""A way to run the command line in this process, and a small store of three versions to run it on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ckstore as library
from ckstore.cli.program import run


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """The only line on stderr, without its prefix."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("ckstore: ")
        return lines[0].removeprefix("ckstore: ")


Ckstore = Callable[..., Result]


@pytest.fixture
def ckstore(capfd: pytest.CaptureFixture[str]) -> Ckstore:
    """Runs the command line with these arguments; asserts its exit code, 0 unless `code` says otherwise."""

    def call(*arguments: object, code: int | None = 0) -> Result:
        capfd.readouterr()
        found = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        result = Result(found, out, err)
        assert code is None or found == code, result
        return result

    return call


def checkpoint(step: int) -> dict[str, Any]:
    """Return a large moving tensor, a constant one, small ones, and one that comes with step 20."""
    import torch

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(320, 256, generator=generator)
    frozen = torch.randn(300, 256, generator=generator)
    weight += torch.randn(weight.shape, generator=generator.manual_seed(step)) * 1e-3 * (step > 0)
    model = {"weight": weight, "frozen": frozen, "bias": torch.full((7,), 1.0 + step), "scale": torch.ones(3)}
    if step >= 20:
        model["late"] = torch.zeros(2, 2, dtype=torch.bfloat16)
    return {"model": model, "step": step, "order": [torch.arange(5)]}


@pytest.fixture(scope="session")
def _files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    import torch

    for step in (0, 10, 20):
        torch.save(checkpoint(step), directory / f"step{step}.pt")
    return directory


@pytest.fixture(scope="session")
def _filled(_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("filled") / ".ckstore"
    assert run(["init", str(directory)]) == 0
    names = [str(_files / f"step{step}.pt") for step in (20, 0, 10)]
    assert run(["--store", str(directory), "ingest", *names, "--run", "gpt", "--tag", "best"]) == 0
    return directory


@pytest.fixture
def place(tmp_path: Path, _files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with an empty store and, in `in/`, the files of three steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKSTORE", raising=False)
    shutil.copytree(_files, tmp_path / "in")
    assert run(["init"]) == 0
    with library.open(".ckstore") as store:
        if isinstance(store.place, str):  # For processes that know nothing of `tests.places`.
            monkeypatch.setenv("CKSTORE", store.place)
    return tmp_path


@pytest.fixture
def filled(place: Path, _filled: Path) -> Path:
    """The same with the three files stored as `gpt@0`, `gpt@10` and `gpt@20`, which is tagged `best`."""
    shutil.rmtree(place / ".ckstore")
    shutil.copytree(_filled, place / ".ckstore")
    return place
