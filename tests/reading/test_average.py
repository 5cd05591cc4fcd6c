"""Averages of versions: numbers against NumPy, files that load, tensors that are kept, and refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckstore
from tools.fidelity.evaluation import held_out_sources, mean_loss
from tools.runs import text_settings

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weights: dict[str, Any] = {
        str(dtype).removeprefix("torch."): torch.randn(400, 300, generator=generator, dtype=torch.float64).to(dtype)
        for dtype in DTYPES
    }
    turned = torch.randn(30, 20, generator=generator).T
    return {
        "model": {
            **weights, "tied": weights["float32"], "turned": turned, "empty": turned[:0], "flag": torch.tensor([True]),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((3,), float(step))}}},
        "seen": torch.tensor([step]),
        "eight": torch.ones(4).to(torch.float8_e5m2),
        "loss": step / 10,
    }  # fmt: skip


def ingest(store: ckstore.Store, directory: Path, states: list[Any]) -> None:
    for step, given in enumerate(states, 1):
        torch.save(given, directory / "state.pt")
        store.ingest(directory / "state.pt", run="r", step=step, hot=0)


def mean(parts: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    wide = torch.complex128 if parts[0].is_complex() else torch.float64
    total = sum(part.to(wide) * weight for part, weight in zip(parts, weights, strict=True))
    assert isinstance(total, torch.Tensor)
    return total / sum(weights)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_numbers_and_what_is_kept(tmp_path: Path, ema: float | None) -> None:
    states = [state(step) for step in (1, 2, 3)]
    with ckstore.init(tmp_path / "store") as store:
        ingest(store, tmp_path, states)
        report = store.average("r@1..r@3", tmp_path / "soup.pt", ema=ema)
    weights = [1.0, 1.0, 1.0] if ema is None else [ema**2, ema * (1 - ema), 1 - ema]
    soup = torch.load(tmp_path / "soup.pt", weights_only=True)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        wanted = mean([given["model"][name] for given in states], weights)
        assert soup["model"][name].dtype == dtype
        if dtype == torch.bfloat16:  # NumPy has none, and torch rounds to float32 first.
            assert ((soup["model"][name].double() - wanted).abs() <= wanted.abs() * 2**-8).all()
        else:
            np.testing.assert_array_equal(soup["model"][name].numpy(), wanted.numpy().astype(name))
    assert torch.equal(soup["model"]["turned"], mean([given["model"]["turned"] for given in states], weights).float())
    assert soup["model"]["tied"].data_ptr() == soup["model"]["float32"].data_ptr()
    assert soup["optimizer"]["state"][0]["step"] == 3
    assert (soup["seen"], soup["loss"]) == (3, 0.3)
    assert report.versions == [1, 2, 3]
    assert set(report.kept) == {"model/flag", "optimizer/state/[0]/step", "seen", "eight"}
    assert {*report.kept, *report.averaged} == {*report.kept, "optimizer/state/[0]/exp_avg"} | {
        f"model/{name}" for name in soup["model"] if name != "flag"
    }


def test_the_suffix_of_the_target_is_what_is_written(tmp_path: Path) -> None:
    """Tensors that are not contiguous are read in another way than the others."""
    states = [{**state(step)["model"], "step": torch.tensor(step)} for step in (1, 2)]
    with ckstore.init(tmp_path / "store") as store:
        ingest(store, tmp_path, states)
        for name in ("soup.pt", "soup.npz", "SOUP.safetensors"):
            report = store.average("r@1..r@2", tmp_path / name)
        with pytest.raises(ckstore.UsageError, match="named as a file of another format"):
            store.average("r@1..r@2", tmp_path / "soup.onnx")
    assert report.kept == ["flag", "step"]
    soup = torch.load(tmp_path / "soup.pt", weights_only=True)
    exported, arrays = load_file(tmp_path / "SOUP.safetensors"), np.load(tmp_path / "soup.npz")
    assert soup.keys() == exported.keys() == set(arrays)
    for name, tensor in soup.items():
        assert torch.equal(exported[name], tensor), name
        if name != "bfloat16":
            np.testing.assert_array_equal(arrays[name], tensor.numpy(), strict=True)


def test_a_mean_of_equal_versions_is_that_version(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(3):
            store.ingest({"w": torch.randn(500, generator=torch.Generator().manual_seed(1))}, run="r", step=step)
        store["r@2"].checkout(tmp_path / "last.pt")
        store.average("r@0..r@2", tmp_path / "soup.pt")
    assert (tmp_path / "soup.pt").read_bytes() == (tmp_path / "last.pt").read_bytes()


def test_safetensors_and_directories(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in (1, 2):
            for run, place in (("file", tmp_path), ("folder", tmp_path / "model")):
                place.mkdir(exist_ok=True)
                save_file({"w": torch.full((9,), float(step), dtype=torch.bfloat16)}, place / "m.safetensors")
                store.ingest(place if run == "folder" else place / "m.safetensors", run=run, step=step)
        store.average("file@1..file@2", tmp_path / "soup.safetensors")
        store.average("folder@1..folder@2", tmp_path / "soup")
    for path in ("soup.safetensors", "soup/m.safetensors"):
        assert torch.equal(load_file(tmp_path / path)["w"], torch.full((9,), 1.5, dtype=torch.bfloat16))


def test_refusals(tmp_path: Path) -> None:
    plain = {"w": torch.ones(3), "b": torch.ones(2)}
    with ckstore.init(tmp_path / "store") as store:
        ingest(
            store, tmp_path, [plain, {"w": torch.ones(3)}, {**plain, "w": torch.ones(4)}, dict(reversed(plain.items()))]
        )
        for versions, text in (
            ([1, 2], "Only one of .* has b"),
            ([1, 3], "w has another shape"),
            ([1, 4], "other ways"),
        ):
            with pytest.raises(ckstore.ConflictError, match=text):
                store.average(versions, tmp_path / "soup.pt")
        with pytest.raises(ckstore.UsageError, match="two or more"):
            store.average("r@1", tmp_path / "soup.pt")
        with pytest.raises(ckstore.UsageError, match="between 0 and 1"):
            store.average([1, 1], tmp_path / "soup.pt", ema=1.0)
    assert not (tmp_path / "soup.pt").exists()


def test_the_loss_of_a_mean_is_near_that_of_its_parts(tmp_path: Path, gpt_run: list[Path]) -> None:
    settings = text_settings("gpt", "tiny")
    windows = held_out_sources(settings, 32)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest_many(gpt_run[-3:], run="gpt")
        store.average("gpt@80..gpt@120", tmp_path / "soup.pt")
    losses = []
    for path in (*gpt_run[-3:], tmp_path / "soup.pt"):
        model = settings.model()
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
        losses.append(mean_loss(model, windows))
    *parts, soup = losses
    assert soup < max(parts)


MEASURED = """
import re, sys, ckstore
def peak():  # That of `getrusage` begins with the parent's.
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
with ckstore.open(sys.argv[1], "r", 32 << 20) as store:
    for _ in range(3):  # The allocator keeps memory of the first ones.
        store.average([1, 2], sys.argv[2], force=True)
    before = peak()
    store.average(list(store), sys.argv[3])
    print(before, peak())
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_grows_with_neither_versions_nor_tensors(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        for step in range(1, 7):
            generator = np.random.default_rng(step)
            np.savez(tmp_path / "m.npz", **{name: generator.random((512, 4096), np.float32) for name in "abcd"})
            store.ingest(tmp_path / "m.npz", run="r", step=step)
    arguments = [str(tmp_path / name) for name in ("store", "two.npz", "all.npz")]
    done = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 1 << 10
    assert after - before < 24 << 10, "a version has 32 MiB"
