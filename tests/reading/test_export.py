from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckstore
from ckstore.errors import ConflictError, NotFoundError, UsageError
from ckstore.reading.export import export
from ckstore.version import Version
from tests.equality import assert_same, storage_of


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    torch.manual_seed(11)
    weight = torch.randn(700, 600)
    return {
        "model": {"weight": weight, "tied": weight, "t": torch.randn(50, 40).t(), "bf16": torch.randn(9).bfloat16(),
                  "part": torch.randn(70, 90)[3:60, ::3], "empty": torch.empty(0, 3), "scalar": torch.tensor(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(700, 600)}, 1: [torch.randn(3), "kept"]}, "lr": 0.5},
        "epoch": 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def version(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    place = tmp_path_factory.mktemp("export")
    torch.save(state, place / "state.pt")
    with ckstore.init(place / "store") as store:
        store.ingest(place / "state.pt")
        yield store["latest"]


def test_safetensors_hold_every_tensor_by_its_path(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    assert export(version.stored, tmp_path / "w.safetensors", "safetensors") == 9
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == set(version)
    for name, tensor in state["model"].items():
        assert_same(found[f"model/{name}"], tensor.contiguous(), name)
    assert_same(found["optimizer/state/[0]/exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_npz_holds_every_tensor_by_its_path(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    export(version.stored, tmp_path / "w.npz", "npz")
    found = np.load(tmp_path / "w.npz", allow_pickle=False)
    assert set(found) == set(version)
    np.testing.assert_array_equal(found["model/weight"], state["model"]["weight"].numpy(), strict=True)
    np.testing.assert_array_equal(found["model/part"], state["model"]["part"].numpy(), strict=True)
    np.testing.assert_array_equal(found["model/bf16"], state["model"]["bf16"].view(torch.uint16).numpy(), strict=True)
    assert found["model/scalar"].shape == ()


def test_pt_keeps_nesting_values_and_ties(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    export(version.stored, tmp_path / "out.pt", "pt")
    found = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True)
    assert_same(found, state)
    assert storage_of(found["model"]["weight"]) == storage_of(found["model"]["tied"])


def test_globs_choose_tensors(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    assert export(version.stored, tmp_path / "a.safetensors", "safetensors", ["model/*"], ["*/tied", "*/bf16"]) == 5
    assert set(load_file(tmp_path / "a.safetensors")) == {
        f"model/{name}" for name in ("weight", "t", "part", "empty", "scalar")
    }
    assert export(version.stored, tmp_path / "b.pt", "pt", ["optimizer"], ["*/exp_avg"]) == 1
    found = torch.load(tmp_path / "b.pt", map_location="cpu", weights_only=True)
    assert_same(found["optimizer"], {"state": {1: state["optimizer"]["state"][1]}, "lr": 0.5})
    assert "model" not in found
    assert (tmp_path / "b.pt").stat().st_size < 10_000
    with pytest.raises(NotFoundError, match="No tensor of version 1 is chosen"):
        export(version.stored, tmp_path / "c.pt", "pt", ["nothing*"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.pt"]


def test_flat_dictionaries_keep_plain_names(tmp_path: Path) -> None:
    state = {"layer/0.weight": torch.randn(4, 5), "__x": torch.randn(3)}
    save_file(state, tmp_path / "in.safetensors")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "in.safetensors")
        export(store["latest"].stored, tmp_path / "out.safetensors", "safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(found) == sorted(state)
    for name, tensor in state.items():
        assert_same(found[name], tensor)


def test_a_directory_is_exported_by_file(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "opt_lora" / "checkpoint-500"
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(source)
        version = store["latest"]
        export(version.stored, tmp_path / "out.pt", "pt")
        found = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True)
        assert_same(found["optimizer.pt"], torch.load(source / "optimizer.pt", map_location="cpu", weights_only=True))
        export(version.stored, tmp_path / "a.safetensors", "safetensors", ["adapter_model.safetensors/*"])
        weights = load_file(source / "adapter_model.safetensors")
        assert {name.removeprefix("adapter_model.safetensors/") for name in load_file(tmp_path / "a.safetensors")} == {
            *weights
        }


def test_whole_models_become_plain_files(shared_data: Path, tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(shared_data / "espcn" / "model_epoch_5.pth")
        version = store["latest"]
        assert export(version.stored, tmp_path / "out.pt", "pt") == len(version)
        found = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True)
        assert_same({name.replace("/", "."): version[name].torch() for name in version}, found)


def test_targets_are_not_overwritten(version: Version, tmp_path: Path) -> None:
    target = tmp_path / "w.npz"
    target.write_bytes(b"mine")
    with pytest.raises(ConflictError):
        version.checkout(target, format="npz")
    assert target.read_bytes() == b"mine"
    version.checkout(target, format="npz", force=True, include=["model/t"])
    assert list(np.load(target)) == ["model/t"]
    assert [path.name for path in tmp_path.iterdir()] == ["w.npz"]


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"c": torch.randn(3, dtype=torch.complex128)})
        version = store["latest"]
        with pytest.raises(UsageError, match="complex128"):
            export(version.stored, tmp_path / "w.safetensors", "safetensors")
        with pytest.raises(UsageError, match="no format zarr"):
            export(version.stored, tmp_path / "w", "zarr")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="include"):
            version.checkout(tmp_path / "w", include=["*"])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_progress_counts_every_byte(version: Version, tmp_path: Path) -> None:
    counted: list[int] = []
    export(version.stored, tmp_path / "w.npz", "npz", progress=counted.append)
    assert sum(counted) == sum(version[path].nbytes for path in version)
