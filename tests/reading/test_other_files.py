"""Files of other libraries in a store: as small as torch files of the same tensors, byte for byte, sliced, exported."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from tests.checkpoints import sha256
from tests.formats.written import flax_bytes, hdf5_bytes, keras_bytes, learner_bytes

Arrays = dict[str, np.ndarray]


def arrays_of(checkpoint: Path) -> Arrays:
    """Return the float32 tensors of a checkpoint, flat."""
    state = torch.load(checkpoint, weights_only=True)
    found = {name: value.numpy() for name, value in state["model"].items()}
    for number, moments in state["optimizer"]["state"].items():
        found |= {f"{name}.{number}": value.numpy() for name, value in moments.items() if value.ndim}
    return {name: array for name, array in found.items() if array.dtype == np.float32}


def write_gguf(path: Path, arrays: Arrays) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "gpt2")
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_flax(path: Path, arrays: Arrays) -> None:
    path.write_bytes(flax_bytes({"params": arrays}))


def write_learner(path: Path, arrays: Arrays) -> None:
    steps = int(path.name.removeprefix("step").removesuffix("_steps.zip"))
    path.write_bytes(learner_bytes({name: torch.from_numpy(array) for name, array in arrays.items()}, {}, steps))


def nested(arrays: Arrays) -> dict[str, Any]:
    """Return arrays as the variables of layers."""
    return {"layers": {name: {"vars": {"0": array}} for name, array in arrays.items()}}


def write_hdf5(path: Path, arrays: Arrays) -> None:
    pytest.importorskip("h5py")
    path.write_bytes(hdf5_bytes(nested(arrays)))


def write_keras(path: Path, arrays: Arrays) -> None:
    pytest.importorskip("h5py")
    path.write_bytes(keras_bytes(nested(arrays)))


def below(prefix: str, suffix: str = "") -> Callable[[Arrays], Arrays]:
    return lambda arrays: {f"{prefix}/{name}{suffix}": array for name, array in arrays.items()}


def one_array(arrays: Arrays) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays.values()])


#: Ending of a file, its writer, and its arrays by path.
WRITERS: dict[str, tuple[str, Callable[[Path, Arrays], None], Callable[[Arrays], Arrays]]] = {
    "flax": (".msgpack", write_flax, below("params")),
    "learner": ("_steps.zip", write_learner, below("policy")),
    "hdf5": (".weights.h5", write_hdf5, below("layers", "/vars/0")),
    "keras": (".keras", write_keras, below("model.weights/layers", "/vars/0")),
    "gguf": (".gguf", write_gguf, dict),
    "npz": (".npz", lambda path, arrays: np.savez(path, **arrays), dict),
    "npy": (".npy", lambda path, arrays: np.save(path, one_array(arrays)), lambda arrays: {"array": one_array(arrays)}),
}


def stored(place: Path, paths: list[Path]) -> tuple[int, ckstore.Store]:
    store = ckstore.init(place)
    for path in paths:
        store.ingest(path, run="a")
    store.encode()
    return sum(row.stored_bytes for row in store._catalog.versions()), store


@pytest.fixture(scope="module")
def series(gpt_run: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Arrays], int]:
    """Arrays of two steps, a base and a delta, and the bytes that a store of their torch files takes."""
    arrays = [arrays_of(checkpoint) for checkpoint in gpt_run[-2:]]
    return arrays, torch_bytes_of(arrays, tmp_path_factory.mktemp("series"))


def torch_bytes_of(series: list[Arrays], place: Path) -> int:
    """Return the bytes that a store of torch files takes."""
    for number, one in enumerate(series):
        torch.save({name: torch.from_numpy(array) for name, array in one.items()}, place / f"step{number}.pt")
    size, store = stored(place / "store", sorted(place.glob("*.pt")))
    store.close()
    return size


@pytest.mark.long
@pytest.mark.parametrize("kind", WRITERS)
def test_a_series_takes_the_bytes_of_torch_files(kind: str, series: tuple[list[Arrays], int], tmp_path: Path) -> None:
    ending, write, content = WRITERS[kind]
    arrays, torch_bytes = series
    paths = [tmp_path / f"step{number}{ending}" for number in range(len(arrays))]
    for path, one in zip(paths, arrays, strict=True):
        write(path, one)
    if kind == "npy":  # Its tensors are one array.
        (tmp_path / "torch").mkdir()
        torch_bytes = torch_bytes_of([content(one) for one in arrays], tmp_path / "torch")
    size, store = stored(tmp_path / "store", paths)
    assert size < 1.01 * torch_bytes, f"{kind} takes {size:,} bytes, torch files {torch_bytes:,}"
    with store:
        assert store.verify().problems == []
        for number, (path, one) in enumerate(zip(paths, arrays, strict=True), 1):
            version = store[number]
            version.checkout(tmp_path / "out")
            assert sha256(tmp_path / "out") == sha256(path)
            (tmp_path / "out").unlink()
            for name, array in content(one).items():
                np.testing.assert_array_equal(version[name][...], array, strict=True)
        name, array = max(content(one).items(), key=lambda item: item[1].size)
        tensor = version.state_dict()
        for segment in name.split("/") if isinstance(tensor, dict) else ():
            tensor = tensor[segment]
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_tensors_that_lie_side_by_side_have_storages_that_fit(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    weights = {"a": np.arange(3, dtype="i1"), "b": np.arange(5, dtype="f4"), "c": np.arange(2, dtype="f8")}
    with h5py.File(tmp_path / "x.h5", "w") as file:  # Space is taken when a dataset is written.
        datasets = {name: file.create_dataset(name, array.shape, array.dtype) for name, array in weights.items()}
        for name, dataset in datasets.items():
            dataset[:] = weights[name]
    with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
        archive.write(tmp_path / "x.h5", "model.weights.h5")
    with ckstore.init(tmp_path / "store") as store:
        for step, name in enumerate(("x.keras", "x.h5")):
            store.ingest(tmp_path / name, run="a", step=step)
        extents = store["a@1"]._stored.layout.files[0].extents
        assert [extent.start - extents[0].start for extent in extents] == [0, 3, 23]
        for found in (store["a@0"].state_dict()["model.weights"], store["a@1"].state_dict()):
            assert set(found) == set(weights)
            for name, array in weights.items():
                np.testing.assert_array_equal(found[name].numpy(), array, strict=True)


def test_calls_that_need_torch_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", w=np.ones(3))
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(tmp_path / "x.npz", run="a", step=1)
        monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.delitem(sys.modules, "ckstore.reading.state_dict", raising=False)
        with pytest.raises(ckstore.UsageError, match=r"^torch is not installed; install it"):
            store["a@1"].state_dict()
        with pytest.raises(ckstore.UsageError, match=r"^torch is not installed; install it"):
            store["a@1"]["w"].torch()
        np.testing.assert_array_equal(store["a@1"]["w"][...], np.ones(3))
