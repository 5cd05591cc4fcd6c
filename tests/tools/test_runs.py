"""The trained runs: the same files again from the same settings, no second training, and the properties of each."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tools import runs


def load(path: Path) -> dict[str, object]:
    return torch.load(path, weights_only=True)


def test_same_files_again(ema_run: list[Path], tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = runs.train("ema", tmp_path)
    assert torch.equal(torch.get_rng_state(), state), "training changes the caller's random numbers"
    for left, right in zip(ema_run, again, strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_trained_once(gpt_run: list[Path], trained_runs: Path) -> None:
    before = [path.stat() for path in gpt_run]
    assert runs.train("gpt", trained_runs) == gpt_run
    assert [path.stat() for path in gpt_run] == before


def test_foreign_directory_is_kept(tmp_path: Path) -> None:
    kept = tmp_path / "cnn" / "epoch01.pt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(FileExistsError, match="not written by tools/train"):
        runs.train("cnn", tmp_path)
    assert kept.read_text() == "mine"


def test_gpt(gpt_run: list[Path]) -> None:
    first, *_, last = (load(path) for path in gpt_run)
    assert [load(path)["step"] for path in gpt_run] == [20, 40, 60, 80, 100, 120]
    assert last["loss"] < first["loss"] - 0.3
    sizes = [value.numel() for value in last["model"].values()]
    assert max(sizes) >= 2**16 > min(sizes)
    assert {"exp_avg", "exp_avg_sq"} < set(last["optimizer"]["state"][0])


def test_cnn(cnn_run: list[Path]) -> None:
    last = load(cnn_run[-1])
    assert last["accuracy"] > 0.9
    assert max(value.numel() for value in last["model"].values()) >= 2**16


def test_bf16(bf16_run: list[Path], gpt_run: list[Path]) -> None:
    assert len(bf16_run) >= 6
    for path, source in zip(bf16_run, gpt_run, strict=True):
        with safe_open(path, "pt") as file:
            assert file.metadata()["step"] == path.stem.removeprefix("step").lstrip("0")
            for name, value in load(source)["model"].items():
                assert torch.equal(file.get_tensor(name), value.bfloat16())


def test_policy(trained_runs: Path) -> None:
    weights = [load_file(path) for path in runs.train("policy", trained_runs)]
    assert all(value.dtype == torch.bfloat16 for value in weights[0].values())
    for before, after in itertools.pairwise(weights):
        changed = sum(int((after[name] != value).sum()) for name, value in before.items())
        assert 0.005 < changed / sum(value.numel() for value in before.values()) < 0.05


def test_embedding(trained_runs: Path) -> None:
    states = [load(path) for path in runs.train("embedding", trained_runs)]
    tables = [state["model"]["table.weight"] for state in states]
    sums = [state["optimizer"]["state"][0]["sum"] for state in states]
    for values in (tables, sums):
        for before, after in itertools.pairwise(values):
            assert 0.005 < (after != before).any(1).double().mean().item() < 0.03


def test_frozen(frozen_run: list[Path]) -> None:
    first, *_, last = (load(path) for path in frozen_run)
    assert last["loss"] < first["loss"]
    share = {True: 0, False: 0}
    for name, value in last["model"].items():
        same = torch.equal(value, first["model"][name])
        assert same == name.startswith("backbone.")
        share[same] += value.numel()
    assert share[True] > 0.9 * sum(share.values())


def test_ema(ema_run: list[Path]) -> None:
    first, *_, last = (load(path) for path in ema_run)
    assert all(torch.equal(value, first["ema"][name]) for name, value in first["model"].items())
    assert not torch.equal(last["ema"]["h.0.attn.weight"], last["model"]["h.0.attn.weight"])
    tied = [last["model"][name].untyped_storage().data_ptr() for name in ("wte.weight", "lm_head.weight")]
    assert tied[0] == tied[1]
