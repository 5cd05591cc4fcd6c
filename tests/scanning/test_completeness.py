"""Directories that are not whole: the remains of killed savers and incomplete copies are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ckstore
from ckstore.errors import InputError
from tests.checkpoints import described, write_safetensors

Make = Callable[[Path], None]


def tensors(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        array = np.arange(300, dtype=np.float32)
        write_safetensors(path, dict.fromkeys(names or ("w",), ("float32", array.shape, array)))
    else:
        torch.save({name: torch.arange(300.0) for name in names or ("w",)}, path)


def index(path: Path, **weights: str) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 2400}, "weight_map": weights}))


def sharded(place: Path, ending: str = "safetensors", stem: str = "model") -> None:
    """Make a directory as transformers saves a large model."""
    for number, name in ((1, "a"), (2, "b")):
        tensors(place / f"{stem}-{number:05}-of-00002.{ending}", name)
    index(
        place / f"{stem}.{ending}.index.json",
        a=f"{stem}-00001-of-00002.{ending}",
        b=f"{stem}-00002-of-00002.{ending}",
    )
    (place / "config.json").write_text("{}")


def parts(place: Path) -> None:
    for number in range(3):
        tensors(place / f"shard{number}.pt", f"w{number}")


def deepspeed(place: Path) -> None:
    """Make a directory as DeepSpeed does, with one checkpoint."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        tensors(place / "global_step500" / name)
    (place / "latest").write_text("global_step500")
    (place / "zero_to_fp32.py").write_text("pass")


def died_while_saving(place: Path) -> None:
    parts(place)
    (place / "shard1.pt").write_bytes(b"")
    (place / "shard2.pt").rename(place / "shard2.pt.tmp")


def with_lost_shard(place: Path) -> None:
    sharded(place)
    (place / "model-00002-of-00002.safetensors").unlink()


def with_lost_bin(place: Path) -> None:
    sharded(place, "bin", "pytorch_model")
    (place / "pytorch_model-00001-of-00002.bin").unlink()


def with_all_shards_lost(place: Path) -> None:
    sharded(place)
    for path in place.glob("*.safetensors"):
        path.unlink()
    tensors(place / "optimizer.pt")


def without_index(place: Path) -> None:
    with_lost_shard(place)
    (place / "model.safetensors.index.json").unlink()


def with_cut_index(place: Path) -> None:
    sharded(place)
    path = place / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes()[:-30])


def with_lost_step(place: Path) -> None:
    deepspeed(place)
    (place / "latest").write_text("global_step600")


def with_name(name: str, content: bytes = b"half of it") -> Make:
    def make(place: Path) -> None:
        sharded(place)
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)

    return make


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"

FAULTS: dict[str, tuple[Make, list[str]]] = {
    "a killed saver": (died_while_saving, ["shard2.pt.tmp is unfinished", "shard1.pt is empty"]),
    "a lost shard": (with_lost_shard, ["model-00002-of-00002.safetensors is missing, which model.safetensors.index.j"]),
    "a lost bin": (with_lost_bin, ["pytorch_model-00001-of-00002.bin is missing, which pytorch_model.bin.index.json"]),
    "all shards lost": (with_all_shards_lost, ["model-00001-of-00002.safetensors is missing", "model-00002-of"]),
    "no index": (without_index, ["model-00002-of-00002.safetensors is missing, which is one of 2 parts"]),
    "a cut index": (with_cut_index, ["model.safetensors.index.json is no sound JSON"]),
    "DeepSpeed": (with_lost_step, ["global_step600 is missing, which latest names"]),
    "partial": (with_name("optimizer.pt.partial"), ["optimizer.pt.partial is unfinished"]),
    "incomplete": (with_name("x/optimizer.bin.incomplete"), ["x/optimizer.bin.incomplete is unfinished"]),
    "Orbax": (with_name("default.orbax-checkpoint-tmp-3/d"), ["default.orbax-checkpoint-tmp-3 is unfinished"]),
    "an empty config": (with_name("config.json", b""), ["config.json is empty"]),
    "an empty generator": (with_name("random_states_0.pkl", b""), ["random_states_0.pkl is empty"]),
    "an empty metadata": (with_name(".metadata", b""), [".metadata is empty"]),
    "a pointer": (with_name("optimizer.pt", POINTER), ["optimizer.pt is a Git LFS pointer"]),
    "a first block": (with_name("optimizer.pt", b"PK\3\4\0\0"), ["optimizer.pt is cut off"]),
    "zeros": (with_name("optimizer.pt", bytes(5000)), ["optimizer.pt holds only zeros"]),
    "another file": (with_name("adapter.safetensors", b"\xff" * 99), ["does not begin as a .safetensors file does"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_incomplete_directories_are_refused_by_name(store: ckstore.Store, tmp_path: Path, fault: str) -> None:
    make, said = FAULTS[fault]
    place = tmp_path / "job"
    place.mkdir()
    make(place)
    with pytest.raises(InputError, match="`force`") as refused:
        store.ingest(place, run="a")
    assert str(refused.value).startswith(f"{place} is not a complete checkpoint: ")
    for text in said:
        assert text in str(refused.value)
    [item] = store.ingest_many(place, run="a")
    assert str(item.error) == str(refused.value)
    assert len(store) == 0
    store.ingest(place, run="a", force=True)
    store["a"].checkout(tmp_path / "back")
    assert described(tmp_path / "back") == described(place)


@pytest.mark.parametrize(
    "make",
    [
        sharded,
        parts,
        deepspeed,
        with_name("merges.txt", b""),
        with_name("model.safetensors.lock", b""),
        with_name("templates/x.txt", b"x"),
        with_name("temperature.pt.txt", b"1"),
        with_name("latest", b"the best so far\n"),
        with_name("tokens.bin", bytes(5000)),
        with_name("config.json~", b"{}"),
        with_name("train-00000-of-00010.txt", b"text"),
    ],
)
def test_whole_directories_are_stored(store: ckstore.Store, tmp_path: Path, make: Make) -> None:
    place = tmp_path / "job"
    place.mkdir()
    make(place)
    store.ingest(place, run="a")
    store["a"].checkout(tmp_path / "back")
    assert described(tmp_path / "back") == described(place)


def test_an_index_of_files_that_were_not_fetched_is_left_over(store: ckstore.Store, tmp_path: Path) -> None:
    """Repositories offer weights in two formats, and a download takes one of them with both indexes."""
    place = tmp_path / "job"
    sharded(place)
    sharded(place, "bin", "pytorch_model")
    for path in place.glob("*.bin"):
        path.unlink()
    store.ingest(place, run="a")
    shutil.copy(place / "model-00001-of-00002.safetensors", place / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(InputError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        store.ingest(place, run="b")


def test_all_damaged_files_are_named(store: ckstore.Store, tmp_path: Path) -> None:
    place = tmp_path / "job"
    place.mkdir()
    for name in ("a.pt", "b.pt", "c.pt"):
        torch.save({"w": torch.ones(300)}, place / name)
    for name in ("a.pt", "c.pt"):
        (place / name).write_bytes((place / name).read_bytes()[:-100])
    (place / "d.pt").write_bytes(bytes(500))
    with pytest.raises(
        InputError, match=r"^3 files are damaged: a\.pt is .*; c\.pt is .*; d\.pt holds only zeros; `force` stores"
    ) as said:
        store.ingest(place, run="a")
    assert str(said.value).count("`force`") == 1
    assert store.ingest(place, run="a", force=True).is_new


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("step3.pt", bytes(500), "holds only zeros"), ("w.gguf", b"GG" * 50, "does not begin as a .gguf file does")],
)
def test_a_damaged_file_is_refused_in_a_folder_and_alone(
    store: ckstore.Store, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(500))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} {said}; save or copy it again"):
        store.ingest(tmp_path / name, run="a")
    refused = {Path(item.path).name: item.refused for item in store.plan(tmp_path, recursive=True)}
    assert refused == {name: True, "tokens.bin": False}
    store.ingest(tmp_path / name, run="a", force=True)
