"""Publishers: states become directories like a model's, encoded at once, without being written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import numpy
from safetensors.torch import load_file, save_file

import ckstore
from ckstore.encoding.estimator import Estimator
from ckstore.saving import saver
from ckstore.saving.process import cache_bytes

State = dict[str, torch.Tensor]


def state(step: int) -> State:
    """Return float32 weights that move a little with each step."""
    generator = torch.Generator().manual_seed(0)
    found = {f"layer.{number}": torch.randn(256, 512, generator=generator) for number in range(4)}
    for _ in range(step):
        for value in found.values():
            value += 3e-5 * torch.randn(value.shape, generator=generator)
    return found | {"norm": torch.full((64,), 1.0 + step)}


@pytest.fixture
def like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two shards, index, configuration and tokenizer."""
    monkeypatch.chdir(tmp_path)
    directory, values = tmp_path / "like", state(0)
    directory.mkdir()
    shards = {
        "model-00001-of-00002.safetensors": ["layer.0", "layer.1"],
        "model-00002-of-00002.safetensors": ["layer.2", "layer.3", "norm"],
    }
    for file, names in shards.items():
        save_file({name: values[name] for name in names}, directory / file, {"format": "pt"})
    places = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"torch_dtype": "float32", "layers": 4}')
    (directory / "tokenizer.json").write_text("tokens" * 20_000)
    (directory / ".cache").mkdir()
    (directory / ".cache" / "lock").write_text("")
    return directory


@pytest.fixture
def store(like: Path) -> Iterator[ckstore.Store]:
    with ckstore.open("store", create=True) as made:
        yield made


def read(directory: Path) -> State:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def test_versions_are_directories_in_the_dtype_that_was_asked_for(store: ckstore.Store, like: Path) -> None:
    with store.publish("policy", like=like, dtype="bfloat16") as publisher:
        rows = [publisher.save(state(step), step=step, metrics={"reward": step}).result().version for step in range(3)]
    assert [(row.step, row.hot, row.metrics["reward"]) for row in rows] == [(0, False, 0), (1, False, 1), (2, False, 2)]
    # Each one against the last, in memory.
    assert max(row.stored_bytes for row in rows[1:]) < rows[0].stored_bytes / 10
    for step in range(3):
        store[f"policy@{step}"].checkout(f"out{step}")
        out = Path(f"out{step}")
        assert {path.name for path in out.iterdir()} == {path.name for path in like.iterdir()} - {".cache"}
        found = read(out)
        assert found.keys() == state(step).keys()
        assert all(torch.equal(found[name], value.bfloat16()) for name, value in state(step).items())
        assert json.loads((out / "config.json").read_text()) == {"torch_dtype": "bfloat16", "layers": 4}
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 2 * sum(value.numel() for value in found.values())
        assert (out / "tokenizer.json").read_bytes() == (like / "tokenizer.json").read_bytes()


def test_without_a_dtype_the_bytes_are_those_of_the_directory(store: ckstore.Store, like: Path) -> None:
    with store.publish("policy", like=like) as publisher:
        publisher.save(state(0), step=0).result()
    store["policy"].checkout("out")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == {
        path.name: path.read_bytes() for path in like.iterdir() if path.is_file()
    }


def test_followers_get_published_versions(store: ckstore.Store, like: Path) -> None:
    with store.publish("policy", like=like, dtype="bfloat16") as publisher:
        for step in range(3):
            publisher.save(state(step), step=step).result()
            (found,) = ckstore.follow(store.place, "policy", "local", once=True)
            assert torch.equal(read(Path("local"))["layer.2"], state(step)["layer.2"].bfloat16())
            assert step == 0 or found.bytes_read < 100_000


def test_names_and_shapes_must_be_those_of_the_directory(store: ckstore.Store, like: Path) -> None:
    values = state(0)
    with store.publish("policy", like=like) as publisher:
        with pytest.raises(ckstore.UsageError, match=r"lacks norm, which `like` has"):
            publisher.save({name: value for name, value in values.items() if name != "norm"}, step=1)
        with pytest.raises(ckstore.UsageError, match="`like` lacks head"):
            publisher.save(values | {"head": torch.ones(3)}, step=1)
        with pytest.raises(ckstore.UsageError, match="norm has the shape"):
            publisher.save(values | {"norm": torch.ones(3)}, step=1)
        with pytest.raises(ckstore.UsageError, match="state dict of tensors"):
            publisher.save([1, 2], step=1)
        # Tied weights have a second name.
        assert publisher.save(values | {"head": values["layer.0"]}, step=1).result().is_new


def test_arrays_of_any_number_of_axes_are_published(store: ckstore.Store, tmp_path: Path) -> None:
    state = {"scale": np.array(2.5, np.float32), "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    (tmp_path / "arrays").mkdir()
    numpy.save_file(
        {name: np.zeros(value.shape, np.float32) for name, value in state.items()}, tmp_path / "arrays/a.safetensors"
    )
    with store.publish("policy", like=tmp_path / "arrays") as publisher:
        publisher.save(state, step=1).result()
    found = {path.rpartition("/")[2]: tensor[...] for path, tensor in store["policy@1"].items()}
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], value) for name, value in state.items())


def test_a_directory_without_safetensors_is_refused(store: ckstore.Store, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, said in (("empty", "no safetensors file"), ("missing", "not a directory")):
        with pytest.raises(ckstore.UsageError, match=said):
            store.publish("policy", like=tmp_path / place)
    with pytest.raises(ckstore.UsageError, match="is one of float32"):
        store.publish("policy", like=tmp_path / "like", dtype="int8")


@pytest.mark.parametrize("nbytes", [0, 1 << 20, 1 << 34])
def test_the_cache_keeps_a_version_of_any_size_that_memory_holds(store: ckstore.Store, nbytes: int) -> None:
    reader, values = store._repository.reader, Mock(size=nbytes, layouts=[], units=[])
    for memory, is_kept in ((None, True), (4 * nbytes + (1 << 28), True), (3 * nbytes, nbytes < 1 << 30)):
        reader.cache.limit = cache_bytes(nbytes, memory)
        assert Estimator(reader, values, ckstore.Policy(), {})._exact._keep == is_kept
    assert cache_bytes(nbytes, 3 * nbytes) == 64 << 20


def test_the_process_knows_the_free_memory(store: ckstore.Store, like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, started = [], saver.start
    monkeypatch.setattr(saver, "start", lambda settings: made.append(settings) or started(settings))
    monkeypatch.setattr(saver, "available", lambda: 1 << 29)
    with store.publish("policy", like=like) as publisher, store.saver("policy"):
        publisher.save(state(0), step=1).result()
    assert [settings.memory for settings in made] == [1 << 29, None]
