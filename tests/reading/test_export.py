from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

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
    assert export(version._stored, tmp_path / "w.safetensors", "safetensors") == []
    assert len(version) == 9
    found = load_file(tmp_path / "w.safetensors")
    assert set(found) == set(version)
    for name, tensor in state["model"].items():
        assert_same(found[f"model/{name}"], tensor.contiguous(), name)
    assert_same(found["optimizer/state/[0]/exp_avg"], state["optimizer"]["state"][0]["exp_avg"])


def test_npz_holds_every_tensor_by_its_path(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    export(version._stored, tmp_path / "w.npz", "npz")
    found = np.load(tmp_path / "w.npz", allow_pickle=False)
    assert set(found) == set(version)
    np.testing.assert_array_equal(found["model/weight"], state["model"]["weight"].numpy(), strict=True)
    np.testing.assert_array_equal(found["model/part"], state["model"]["part"].numpy(), strict=True)
    np.testing.assert_array_equal(found["model/bf16"], state["model"]["bf16"].float().numpy(), strict=True)
    assert found["model/scalar"].shape == ()


def test_pt_keeps_nesting_values_and_ties(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    export(version._stored, tmp_path / "out.pt", "pt")
    found = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True)
    assert_same(found, state)
    assert storage_of(found["model"]["weight"]) == storage_of(found["model"]["tied"])


def test_globs_choose_tensors(version: Version, state: dict[str, Any], tmp_path: Path) -> None:
    left_out = export(version._stored, tmp_path / "a.safetensors", "safetensors", ["model/*"], ["*/tied", "*/bf16"])
    assert left_out == ["model/tied", "model/bf16", "optimizer/state/[0]/exp_avg", "optimizer/state/[1]/[0]"]
    assert set(load_file(tmp_path / "a.safetensors")) == {
        f"model/{name}" for name in ("weight", "t", "part", "empty", "scalar")
    }
    left_out = export(version._stored, tmp_path / "b.pt", "pt", ["optimizer"], ["*/exp_avg"])
    assert set(version).difference(left_out) == {"optimizer/state/[1]/[0]"}
    found = torch.load(tmp_path / "b.pt", map_location="cpu", weights_only=True)
    assert_same(found["optimizer"], {"state": {1: state["optimizer"]["state"][1]}, "lr": 0.5})
    assert "model" not in found
    assert (tmp_path / "b.pt").stat().st_size < 10_000
    with pytest.raises(NotFoundError, match="No tensor of version 1 is chosen"):
        export(version._stored, tmp_path / "c.pt", "pt", ["nothing*"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.pt"]


def test_flat_dictionaries_keep_plain_names(tmp_path: Path) -> None:
    state = {"layer/0.weight": torch.randn(4, 5), "__x": torch.randn(3)}
    save_file(state, tmp_path / "in.safetensors")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "in.safetensors")
        export(store["latest"]._stored, tmp_path / "out.safetensors", "safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(found) == sorted(state)
    for name, tensor in state.items():
        assert_same(found[name], tensor)


def test_a_directory_is_exported_by_file(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "opt_lora" / "checkpoint-500"
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(source)
        version = store["latest"]
        export(version._stored, tmp_path / "out.pt", "pt")
        found = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True)
        assert_same(found["optimizer.pt"], torch.load(source / "optimizer.pt", map_location="cpu", weights_only=True))
        export(version._stored, tmp_path / "a.safetensors", "safetensors", ["adapter_model.safetensors/*"])
        weights = load_file(source / "adapter_model.safetensors")
        assert {name.removeprefix("adapter_model.safetensors/") for name in load_file(tmp_path / "a.safetensors")} == {
            *weights
        }


def test_whole_models_become_plain_files(shared_data: Path, tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(shared_data / "espcn" / "model_epoch_5.pth")
        version = store["latest"]
        assert export(version._stored, tmp_path / "out.pt", "pt") == []
        found = torch.load(tmp_path / "out.pt", map_location="cpu", weights_only=True)
        assert_same({name.replace("/", "."): version[name].torch() for name in version}, found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    """A checkpoint of a module: state dict, optimiser, step, and a table that the model does not have."""
    place = tmp_path_factory.mktemp("trained")
    model = module()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": {"0.weight": torch.ones(1)}}
    torch.save(checkpoint | {"step": 7}, place / "step7.pt")
    with ckstore.init(place / "store") as store:
        store.ingest(place / "step7.pt")
        yield store["latest"]


def module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Sequential(nn.Linear(30, 5)))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.npz"])
@pytest.mark.parametrize("globs", [["model/*"], ["model"], ["model/0.*", "model/1*", "model/2.0.*"]], ids=" ".join)
def test_a_module_takes_a_subtree(trained: Version, tmp_path: Path, name: str, globs: list[str]) -> None:
    left_out = trained.checkout(tmp_path / name, include=globs, strip=True)
    assert left_out
    assert set(trained).difference(left_out) == {f"model/{key}" for key in module().state_dict()}
    if name.endswith("safetensors"):
        found = load_file(tmp_path / name)
    elif name.endswith("npz"):
        with np.load(tmp_path / name) as file:
            found = {key: torch.from_numpy(file[key]) for key in file.files}
    else:
        found = torch.load(tmp_path / name, weights_only=True)
        assert "step" not in found
    fresh = module()
    torch.nn.init.zeros_(fresh[0].weight)
    fresh.load_state_dict(found)
    assert_same(dict(fresh.state_dict()), dict(trained.state_dict()["model"]))


def test_an_optimizer_takes_a_subtree(trained: Version, tmp_path: Path) -> None:
    trained.checkout(tmp_path / "o.pt", include=["optimizer/*"], strip=True)
    optimizer = torch.optim.Adam(module().parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    assert_same(optimizer.state_dict(), trained.state_dict()["optimizer"])


def test_a_part_of_a_subtree_keeps_its_names(trained: Version, tmp_path: Path) -> None:
    trained.checkout(tmp_path / "part.safetensors", include=["model/2.*"], strip=True)
    assert set(load_file(tmp_path / "part.safetensors")) == {"2.0.weight", "2.0.bias"}
    trained.checkout(tmp_path / "one.safetensors", include=["model/2.0.bias"], strip=True)
    assert set(load_file(tmp_path / "one.safetensors")) == {"2.0.bias"}


@pytest.mark.parametrize("globs", [[], ["*.weight"], ["model/*", "ema/*"], ["*"]], ids=" ".join)
def test_several_subtrees_are_refused(trained: Version, tmp_path: Path, globs: list[str]) -> None:
    with pytest.raises(UsageError, match=r"lie in [23] subtrees \(ema, model.*`include` 'model/\*'"):
        trained.checkout(tmp_path / "w.safetensors", include=globs, strip=True)
    with pytest.raises(NotFoundError, match="No tensor"):
        trained.checkout(tmp_path / "w.safetensors", include=["modle/*"], strip=True)
    assert list(tmp_path.iterdir()) == []


def test_nested_names_are_joined_by_dots(tmp_path: Path) -> None:
    state = {"params": {"dense": {"kernel": torch.randn(2, 3), "more": [torch.randn(1)]}, "a.b": torch.ones(1)}}
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state | {"step": 1})
        version = store["latest"]
        version.checkout(tmp_path / "w.safetensors", include=["params/dense*"], strip=True)
        assert set(load_file(tmp_path / "w.safetensors")) == {"dense.kernel", "dense.more.0"}
        version.checkout(tmp_path / "w.pt", strip=True)
        assert_same(torch.load(tmp_path / "w.pt", weights_only=True), state["params"])
        store.ingest({"params": state["params"] | {"dense.kernel": torch.ones(2)}, "step": 2})
        version = store["latest"]
        expected = "params/dense/kernel and params/dense.kernel would both be called dense.kernel"
        with pytest.raises(UsageError, match=expected):
            version.checkout(tmp_path / "x.safetensors", strip=True)
        version.checkout(tmp_path / "x.safetensors", exclude=["*/dense.kernel"], strip=True)
    assert set(load_file(tmp_path / "x.safetensors")) == {"dense.kernel", "dense.more.0", "a.b"}


def test_shards_become_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    shards = [{"a": torch.randn(5), "b": torch.randn(2, 2)}, {"c": torch.randn(3)}]
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-0000{number + 1}-of-00002.safetensors")
    torch.save({"state": {0: {"m": torch.ones(3)}}, "a": torch.zeros(1)}, folder / "optimizer.pt")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(folder)
        version = store["latest"]
        left_out = version.checkout(tmp_path / "w.safetensors", include=["model-*"], strip=True)
        assert left_out == ["optimizer.pt/state/[0]/m", "optimizer.pt/a"]
        assert_same(load_file(tmp_path / "w.safetensors"), shards[0] | shards[1])
        version.checkout(tmp_path / "w.pt", include=["model-*"], strip=True)
        assert_same(torch.load(tmp_path / "w.pt", weights_only=True), shards[0] | shards[1])
        version.checkout(tmp_path / "o.pt", include=["optimizer.pt/state/*"], strip=True)
        assert_same(torch.load(tmp_path / "o.pt", weights_only=True), {0: {"m": torch.ones(3)}})
        with pytest.raises(UsageError, match="both be called a"):
            version.checkout(tmp_path / "x.pt", include=["*/a"], strip=True)


def test_a_pickled_module_is_stripped(tmp_path: Path) -> None:
    torch.save({"net": module(), "step": 3}, tmp_path / "m.pt")
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "m.pt")
        for name in ("w.pt", "w.safetensors"):
            store["latest"].checkout(tmp_path / name, include=["net"], strip=True)
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert_same(found, dict(module().state_dict()))
    module().load_state_dict(load_file(tmp_path / "w.safetensors"))


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
            export(version._stored, tmp_path / "w.safetensors", "safetensors")
        with pytest.raises(UsageError, match="Unknown format zarr"):
            export(version._stored, tmp_path / "w", "zarr")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="include"):
            version.checkout(tmp_path / "w", include=["*"])
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}


def test_progress_counts_every_byte(version: Version, tmp_path: Path) -> None:
    counted: list[int] = []
    export(version._stored, tmp_path / "w.npz", "npz", progress=counted.append)
    assert sum(counted) == sum(version[path].nbytes for path in version)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2fnuz", "complex32"])
def test_npz_holds_the_numbers_of_dtypes_that_numpy_lacks(dtype: str, tmp_path: Path) -> None:
    values = torch.randn(70, 300).to(getattr(torch, dtype))
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": values, "one": values[0, 0], "none": values[:0]})
        store["latest"].checkout(tmp_path / "w.npz")
        found = np.load(tmp_path / "w.npz")
        wanted = values.to(torch.complex64 if dtype == "complex32" else torch.float32).numpy()
        np.testing.assert_array_equal(found["w"], wanted, strict=True)
        np.testing.assert_array_equal(found["one"], wanted[0, 0])
        assert found["none"].shape == (0, 300)


def test_npz_holds_the_numbers_of_float4(tmp_path: Path) -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 64).view(torch.float4_e2m1fn_x2)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest({"w": packed})
        store["latest"].checkout(tmp_path / "w.npz")
        found = np.load(tmp_path / "w.npz")["w"]
        np.testing.assert_array_equal(found, np.asarray(store["latest"]["w"].numpy()).astype(np.float32), strict=True)
