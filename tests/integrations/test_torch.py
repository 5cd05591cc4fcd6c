from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckstore
from ckstore.errors import InputError, IntegrityError, UsageError
from ckstore.formats.layout import Unknown
from tests.equality import assert_same, storage_of

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def ingested(source: Any, path: Path) -> Any:
    with ckstore.init(path) as store:
        store.ingest(source)
        return store["latest"].state_dict()


def raw(dtype: str, count: int) -> torch.Tensor:
    """Return elements of random bits, NaN payloads and signed zeros among them."""
    wanted = getattr(torch, dtype)
    item = torch.empty(0, dtype=wanted).element_size()
    bytes_ = torch.randint(0, 2 if dtype == "bool" else 256, (count * item,), dtype=torch.uint8)
    return bytes_.view(wanted)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_comes_back_as_torch_reads_it(tmp_path: Path, legacy: bool) -> None:
    torch.manual_seed(8)
    weight, flat = torch.randn(300, 300), torch.randn(5000)
    state = {
        "model": {"weight": weight, "tied": weight, "t": weight.t(), "part": weight[3:7, ::2], "e": torch.empty(3, 0)},
        "flat": [flat[:1000], flat[2000:3000].view(10, 100)],
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, "0": (1, 2.5, None)}, "groups": [{"lr": 1e-3}, True]},
        7: {1, 2, 3}, "expanded": torch.randn(4, 1).expand(4, 5), "b": b"bytes", "size": (1, ()),
    }  # fmt: skip
    path = tmp_path / "state.pt"
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    found = ingested(path, tmp_path / "store")
    assert_same(found, torch.load(path, map_location="cpu", weights_only=True))
    model = found["model"]
    assert (
        storage_of(model["weight"]) == storage_of(model["tied"]) == storage_of(model["part"]) == storage_of(model["t"])
    )
    assert storage_of(found["flat"][0]) == storage_of(found["flat"][1])
    assert found["flat"][0].untyped_storage().nbytes() == flat.untyped_storage().nbytes()
    model["weight"][5, 0] = 41.0
    assert model["part"][2, 0] == 41.0


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("count", [11, 70_000])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, count: int) -> None:
    torch.manual_seed(9)
    state = {dtype: raw(dtype, count) for dtype in DTYPES if hasattr(torch, dtype)}
    path = tmp_path / "state.pt"
    torch.save(state, path)
    assert_same(ingested(path, tmp_path / "store"), torch.load(path, map_location="cpu", weights_only=True))
    assert_same(ingested(state, tmp_path / "live"), state)


@pytest.mark.parametrize("legacy", [False, True])
def test_parameters_and_wanted_gradients_come_back(tmp_path: Path, legacy: bool) -> None:
    kept = torch.nn.Parameter(torch.randn(3))
    kept.note = "kept by torch"  # type: ignore[attr-defined]
    state = {
        "weight": torch.nn.Parameter(torch.randn(4, 5)), "frozen": torch.nn.Parameter(torch.arange(3), False),
        "wanted": torch.randn(6, requires_grad=True), "result": torch.ones(2, requires_grad=True) * 2, "kept": kept,
        "empty": torch.nn.Parameter(torch.empty(0, 3)), "plain": torch.ones(2),
    }  # fmt: skip
    torch.save(state, tmp_path / "state.pt", _use_new_zipfile_serialization=not legacy)
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(ingested(tmp_path / "state.pt", tmp_path / "store"), loaded)
    assert_same(ingested(state, tmp_path / "live"), loaded)
    with ckstore.open(tmp_path / "live", "r") as store:
        store[1].checkout(tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt", weights_only=True), loaded)


def test_a_whole_module_is_a_tree_of_unknown_objects_with_tensors(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    path = tmp_path / "module.pt"
    torch.save(module, path)
    tree = ingested(path, tmp_path / "store")
    assert isinstance(tree, Unknown)
    assert tree.name == "torch.nn.modules.linear.Linear"
    assert_same(tree.state["_parameters"]["weight"], module.weight)


def test_safetensors_are_a_flat_dictionary(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = {"a.b": torch.randn(3, 5), "a/c": torch.arange(4), "e": torch.empty(0)}
    save_file(state, tmp_path / "model.safetensors")
    found = ingested(tmp_path / "model.safetensors", tmp_path / "store")
    assert sorted(found) == sorted(state)
    for name, tensor in state.items():
        assert_same(found[name], tensor)
    assert storage_of(found["a.b"]) != storage_of(found["a/c"])


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.bin"
    path.write_bytes(b"anything" * 20)
    with pytest.raises(InputError, match=r"notes\.bin holds no tensors"):
        ingested(path, tmp_path / "store")


def test_a_damaged_file_that_was_forced_in_is_not_parsed(store: ckstore.Store, tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt"
    torch.save({"w": torch.randn(100_000)}, path)
    data = bytearray(path.read_bytes())
    data[200_000] ^= 1
    path.write_bytes(data)
    store.ingest(path, force=True)
    with pytest.raises(UsageError, match="has no readable tensors"):
        store["latest"].state_dict()


def test_a_directory_is_a_dictionary_by_file(shared_data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = shared_data / "opt_lora" / "checkpoint-1500"
    found = ingested(source, tmp_path / "store")
    assert set(found) >= {"adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt"}
    assert "README.md" not in found
    weights = load_file(source / "adapter_model.safetensors")
    assert sorted(found["adapter_model.safetensors"]) == sorted(weights)
    for name, tensor in weights.items():
        assert_same(found["adapter_model.safetensors"][name], tensor, name)
    assert_same(found["optimizer.pt"], torch.load(source / "optimizer.pt", map_location="cpu", weights_only=True))


@pytest.mark.parametrize("name", ["willmore_pinn/checkpoint_epoch_5.pt", "trades_sgd/opt-nn-checkpoint_epoch5.tar"])
def test_real_files_come_back_as_torch_reads_them(shared_data: Path, tmp_path: Path, name: str) -> None:
    assert_same(
        ingested(shared_data / name, tmp_path / "store"),
        torch.load(shared_data / name, map_location="cpu", weights_only=True),
    )


def test_flushing_subnormals_in_the_process_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"w": torch.full((70_000,), 1e-40)}, path)
    expected = torch.load(path, map_location="cpu", weights_only=True)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(path)
    torch.set_flush_denormal(True)
    try:
        with ckstore.open(tmp_path / "store") as store:
            found = store["latest"].state_dict()
    finally:
        torch.set_flush_denormal(False)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "changes", [{"shape": (1 << 45,)}, {"shape": (-5,)}, {"start": 1 << 40}, {"dtype": "int32"}], ids=str
)
def test_a_layout_that_contradicts_its_bytes_is_refused(
    store: ckstore.Store, tmp_path: Path, changes: dict[str, Any]
) -> None:
    torch.save({"v": torch.randn(100), "w": torch.randn(1000, 100)}, tmp_path / "x.pt")
    store.ingest(tmp_path / "x.pt")
    version = store["latest"]
    layout = version._stored.layout.files[0]
    extents = [*layout.extents[:-1], replace(layout.extents[-1], **changes)]
    version._stored.layout.files[0] = dataclasses.replace(layout, extents=extents)
    with pytest.raises(IntegrityError):
        version.state_dict()
