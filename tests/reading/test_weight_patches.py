"""Patches between versions: applied to the base they give the new weights, in the forms that engines read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zstandard
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckstore

State = dict[str, torch.Tensor]


def write(directory: Path, state: State) -> Path:
    """Write two shards."""
    directory.mkdir(exist_ok=True)
    names = sorted(state)
    for number, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: state[name] for name in part}, directory / f"model-{number:05}-of-00002.safetensors")
    return directory


def states() -> tuple[State, State]:
    """Return weights before and after: few elements differ in one tensor, most in another, none in a third."""
    torch.manual_seed(0)
    before = {"a": torch.randn(300, 400).bfloat16(), "b": torch.randn(50), "c": torch.randn(40, 50).half()}
    after = {name: value.clone() for name, value in before.items()}
    after["a"].view(-1)[::1000] += 1
    after["b"] += 1
    return before, after


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ckstore.Store]:
    monkeypatch.chdir(tmp_path)
    with ckstore.open("store", create=True) as made:
        for step, state in enumerate(states(), 4):
            made.ingest(write(Path("model"), state), run="policy", step=step)
        yield made


def test_patches_lead_from_the_base_to_the_version(store: ckstore.Store) -> None:
    before, after = states()
    found = {patch.name: patch for patch in store["policy@5"].patches("policy@4")}
    assert found.keys() == {"a", "b"}
    assert (found["a"].shape, found["a"].dtype, found["a"].values.numel()) == ((300, 400), torch.bfloat16, 120)
    assert found["b"].indices is None
    for patch in found.values():
        flat = before[patch.name].view(-1)
        flat[slice(None) if patch.indices is None else patch.indices] = patch.values
    assert all(torch.equal(before[name], after[name]) for name in after)
    assert list(store["policy@5"].patches("policy@5")) == []


def test_a_delta_directory_is_applied_as_engines_do(store: ckstore.Store) -> None:
    before, after = states()
    nbytes = store["policy@5"].write_patch(store["policy@4"], "delta")
    index = json.loads(Path("delta/model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": "000005", "base_version": "000004", "delta_encoding": "overwrite", "compression_format": "zstd",
        "checksum_format": "blake3",
    }  # fmt: skip
    assert index["weight_map"] == dict.fromkeys(("a", "b"), "model-00000-of-00001.safetensors")
    file = Path("delta") / index["weight_map"]["a"]
    with safe_open(file, "np") as opened:
        digests = opened.metadata()
    frames = load_file(file)
    assert sum(frame.numel() for frame in frames.values()) == nbytes
    for name, frame in frames.items():
        data = zstandard.ZstdDecompressor().decompress(frame.numpy().tobytes())
        count = int.from_bytes(data[:4], "little")
        places = torch.frombuffer(bytearray(data[4 : 4 + 4 * count]), dtype=torch.int32).long()
        flat = before[name].view(-1).view(torch.uint8)
        flat[places] = torch.frombuffer(bytearray(data[4 + 4 * count :]), dtype=torch.uint8)
        assert blake3(flat.numpy().tobytes()).hexdigest() == digests[name]
        assert torch.equal(before[name], after[name])


def test_the_name_of_a_delta_directory_numbers_it(store: ckstore.Store) -> None:
    """SGLang applies one after the other and compares `base_version` with the version before."""
    Path("deltas").mkdir()
    for name, expected in (
        ("weight_v000001", (0, 1)),
        ("weight_v1000000", (999_999, 1_000_000)),
        ("weight_v1", (4, 5)),
    ):
        store["policy@5"].write_patch("policy@4", Path("deltas") / name)
        said = json.loads(Path("deltas", name, "model.safetensors.index.json").read_text())["metadata"]
        assert (int(said["base_version"]), int(said["version"])) == expected
    with pytest.raises(ckstore.UsageError, match="deltas begin at weight_v000001"):
        store["policy@5"].write_patch("policy@4", "weight_v000000")


def test_other_models_are_refused(store: ckstore.Store) -> None:
    _, after = states()
    store.ingest(write(Path("model"), {**after, "d": torch.ones(3)}), run="policy", step=6)
    assert {patch.name for patch in store["policy@6"].patches("policy@5")} == {"d"}
    with pytest.raises(ckstore.UsageError, match="d is new"):
        store["policy@6"].write_patch("policy@5", "delta")
    with pytest.raises(ckstore.UsageError, match="lacks d"):
        list(store["policy@5"].patches("policy@6"))
    assert not Path("delta").exists()
    store["policy@5"].write_patch("policy@5", "same")
    with pytest.raises(ckstore.ConflictError):
        store["policy@5"].write_patch("policy@4", "same")


def test_a_tensor_with_the_name_of_the_metadata_is_refused(store: ckstore.Store) -> None:
    for step in (1, 2):
        store.ingest({"w": torch.ones(9), "__metadata__": torch.full((9,), step)}, run="odd", step=step)
    assert [patch.name for patch in store["odd@2"].patches("odd@1")] == ["__metadata__"]
    with pytest.raises(ckstore.UsageError, match="named __metadata__"):
        store["odd@2"].write_patch("odd@1", "delta")
