"""Steps in names, contents and arguments: one grammar, and a sentence on a number that is no step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckstore
from ckstore.errors import UsageError
from ckstore.scanning.inputs import open_path
from ckstore.scanning.steps import plan_steps
from ckstore.steps import (
    Every,
    by_step,
    natural,
    periods_of,
    plain_number,
    seconds_of,
    step_of_name,
    step_of_text,
    step_of_value,
    steps_of_names,
    without_numbers,
)

NAMES = {
    "step_000120.pt": 120, "checkpoint-1500": 1500, "runs/checkpoint-1500/": 1500, "epoch=70-step=4331.ckpt": 4331,
    "step=4331-epoch=70.ckpt": 4331, "model_epoch_12.pth": 12, "checkpoint_epoch_1.pt": 1, "model-nn-epoch15.pt": 15,
    "opt-nn-checkpoint_epoch5.tar": 5, "iter_0001000": 1000, "global_step1000": 1000, "checkpoint.pth.tar": None,
    "checkpoint_20.pth.tar": 20, "last.ckpt": None, "pytorch_model-00001-of-00002.bin": None,
    "model-00002-of-00003.safetensors": None, "gpt2-10.safetensors": 10, "model.12": 12, "model.12.pt": 12,
    "a/step9/model.pt": None, "": None, "99999999999999999999999999.pt": None,
    # Lightning, transformers, DeepSpeed, Megatron, DCGAN, AlphaZero, Keras.
    "epoch=3-step=400-v1.ckpt": 400, "last-v2.ckpt": None, "best-v1": None, "checkpoint-500": 500,
    "global_step1200": 1200, "iter_0010000": 10000, "netG_epoch_4_7.pth": 4, "netG_epoch_4_100.pth": 4,
    "x_50sims_1.pth.tar": 1, "checkpoint_50sims_1.pth.tar": 1, "weights.03-1.26.h5": 3, "seed1_step1000.pth": 1000,
    # Exponents, suffixes, separators, whole floats.
    "ckpt-1e5": 100_000, "ckpt-2e5.pt": 200_000, "ckpt-10k": 10_000, "ckpt-1M.pt": 1_000_000, "ckpt-2.5k": 2500,
    "ckpt-3K": 3000,
    "10ksteps.pt": 10_000, "step_1_000": 1000, "step-1_000_000.pt": 1_000_000, "step1,000.pt": 1000,
    "step_3.0.pt": 3, "epoch_1e2": 100, "1000steps_seed3.pt": 1000, "ckpt1000final.pt": 1000,
    # Signs, fractions, dates, versions, ids, sizes.
    "step=-1.ckpt": None, "checkpoint_-1": None, "step-100": 100, "step_2.5.pt": None, "lr1e-3.pt": None,
    "lr-1e-3_step7.pt": 7, "2024-05-01": None, "model_20240501_120000.pt": None, "20240501-120000_100.pt": 100,
    "Dec03_15-41-11_host": None, "step20240501.pt": 20_240_501, "model_3-v2.pt": 3, "model-30-v2.pt": 30,
    "version_3": None, "1.2.3": None, "model-1.0.pt": None, "a1b2c3d.pt": None, "yolov5s.pt": None, "llama-7b": None,
    "run_50s-x": None,
    "run-550e8400-e29b-41d4-a716-446655440000": None, "checkpoint_0.93_100.pth": 100,
    # Sizes, and numbers of models.
    "conv2d.pt": None, "float16.pt": None, "model-f16.gguf": None, "gpt-2.gguf": None, "resnet50.pt": None,
    "gpt2-124M.pt": None, "pythia-160M": None, "SmolLM-135M-instruct.pt": None, "gpt2-124M-1000.pt": 1000,
    "gpt2-124M_step1M.pt": 1_000_000, "10M.pt": 10_000_000, "ckpt-2M-tokens": 2_000_000,
    # Metrics.
    "ppl=12.pt": None, "val_loss=1,5.pt": None, "acc=.95.pt": None, "loss=1e-3.pt": None, "acc@1=76-300.pt": 300,
    "val_loss=2-100.pt": 100, "episode=500.pt": 500, "epoch=1-val_acc=0.51-v1.ckpt": 1,
    "v2_1000.pt": 1000, "model_3.pt": 3, "gpt-2_100.pt": 100, "best.h5": None, "x.pt2": None, "resnet50-10.mp3": 10,
}  # fmt: skip

#: Values of steps in contents, their steps, and the beginning of the sentence on a value that is none.
VALUES: list[tuple[Any, int | None, str]] = [
    (3, 3, ""), (3.0, 3, ""), (np.int32(3), 3, ""), (np.float64(3), 3, ""), (torch.tensor(3), 3, ""),
    (torch.tensor(3.0), 3, ""), (np.array(3), 3, ""), ("3", 3, ""), ("1e5", 100_000, ""), ("1_000", 1000, ""),
    (torch.tensor(3.0, dtype=torch.bfloat16), 3, ""), (torch.tensor([3]), 3, ""),
    (-1, None, "step -1"), (2.5, None, "step 2.5"), (torch.tensor(-1), None, "step -1"), (1 << 63, None, "step 922"),
    (float("nan"), None, "step nan"), ("2.5", None, "step '2.5'"), (torch.tensor(2.5), None, "step 2.5"),
    (None, None, ""), (True, None, ""), ("last", None, ""), ([1, 2], None, ""), (torch.arange(3), None, ""),
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ckstore.Store]:
    with ckstore.init(tmp_path / "store") as made:
        yield made


@pytest.mark.parametrize(("name", "step"), NAMES.items())
def test_of_a_name(name: str, step: int | None) -> None:
    assert step_of_name(name).step == step


def test_of_the_names_of_real_series(shared_data: Path) -> None:
    expected: dict[str, Callable[[str], str]] = {
        "lightning_a": lambda name: name.partition("step=")[2].removesuffix(".ckpt"),
        "opt_lora": lambda name: name.rpartition("-")[2],
        "espcn": lambda name: name.rpartition("_")[2].removesuffix(".pth"),
        "willmore_pinn": lambda name: name.rpartition("_")[2].removesuffix(".pt"),
    }
    for folder, digits in expected.items():
        paths = sorted((shared_data / folder).iterdir())
        assert paths
        for path in paths:
            assert step_of_name(path.name).step == (int(digits(path.name)) if digits(path.name) else None), path


@given(st.integers(0, 2**63 - 1), st.sampled_from(["step", "iter_", "ckpt-", "epoch=", "global_step", "x_", ""]))
def test_a_number_comes_back_from_its_name(step: int, word: str) -> None:
    assert step_of_name(f"{word}{step}.pt").step in (step, None if len(str(step)) == 8 else step)
    assert step_of_name(f"{word}{step:,}.pt").step == step
    assert step_of_name(f"seed-v3_{word}{step:020}.pt").step == step
    assert step_of_text(str(step)) == step_of_text(f"{step:,}") == step_of_text(f"{step:_}") == step
    assert step_of_text(f"-{step}") == -step
    if word not in ("epoch=", "x_", ""):
        assert step_of_name(f"{word}{step:_}.pt").step == step


@given(st.integers(0, 999), st.sampled_from([("k", 3), ("K", 3), ("M", 6), ("e5", 5), ("e+05", 5), ("E3", 3)]))
def test_a_scaled_number_comes_back_from_its_name(number: int, scale: tuple[str, int]) -> None:
    suffix, zeros = scale
    for name in (f"ckpt-{number}{suffix}.pt", f"step{number}{suffix}", f"net_{number}{suffix}.safetensors"):
        assert step_of_name(name).step == number * 10**zeros
    assert step_of_text(f"{number}{suffix}") == step_of_value(float(number * 10**zeros)) == number * 10**zeros


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=6, unique=True), st.sampled_from(["", ",", "_"]))
def test_a_series_keeps_its_steps_and_its_order(steps: list[int], separator: str) -> None:
    names = [f"netG_step_{step:{separator}}.pth" for step in steps]
    assert [found.step for found in steps_of_names(names)] == steps
    if separator != "_":
        assert sorted(names, key=natural) == [names[steps.index(step)] for step in sorted(steps)]
        assert len({without_numbers(name) for name in names}) == 1


@given(st.text(max_size=40))
def test_any_name_and_text_has_a_step_or_none(text: str) -> None:
    for step in (step_of_name(text).step, step_of_text(text)):
        assert step is None or -(2**63) <= step < 2**63
    natural(text)
    without_numbers(text)


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["netG_epoch_4_7.pth", "netG_epoch_4_100.pth"], [7, 100]),
        (["checkpoint_4_7.pth", "checkpoint_4_100.pth"], [7, 100]),
        (["step_900", "step_1_000", "step_1_500"], [900, 1000, 1500]),
        (["ckpt-10k", "ckpt-900", "ckpt-1M", "ckpt-1e5"], [10_000, 900, 1_000_000, 100_000]),
        (["best-v1.ckpt", "best-v2.ckpt"], [None, None]),
        (["model-1.pt", "model-2.pt"], [1, 2]),
        (["model8.pt", "model16.pt"], [8, 16]),
        (["conv2d.pt"], [None]),
        (["gpt-2.gguf"], [None]),
        (["sac-10M.pt", "sac-20M.pt"], [10_000_000, 20_000_000]),
        (["pythia-160M.pt", "pythia-160M-v2.pt"], [None, None]),
        (["net_1_loss=30.pt", "net_2_loss=25.pt"], [1, 2]),
        (["model_20240501_120000.pt", "model_20240501_130000.pt"], [None, None]),
    ],
)
def test_of_names_together(names: list[str], steps: list[int | None]) -> None:
    assert [found.step for found in steps_of_names(names)] == steps


@pytest.mark.parametrize(("value", "step", "unused"), VALUES)
def test_of_contents(
    store: ckstore.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any, step: int | None, unused: str
) -> None:
    state = {"w": torch.full((3,), 1.0), "step": value}
    caplog.set_level(logging.WARNING, "ckstore")
    live = store.ingest(state, run="live")
    torch.save(state, tmp_path / "a.pt")
    file = store.ingest(tmp_path / "a.pt", run="file")
    (tmp_path / "d").mkdir()
    torch.save(state, tmp_path / "d" / "model.pt")
    directory = store.ingest(tmp_path / "d", run="directory")
    [planned] = plan_steps([tmp_path / "a.pt"])
    for report in (live, file, directory):
        assert report.version.step == step
        assert report.note.startswith(unused) if unused else report.note == ""
    assert (planned.step, planned.note) == (step, file.note)
    assert len(caplog.records) == (3 if unused else 0)
    assert all("in the contents is not used" in record.getMessage() for record in caplog.records)


def test_of_contents_in_other_formats(store: ckstore.Store, tmp_path: Path) -> None:
    weights = {"w": torch.zeros(3)}
    save_file(weights | {"step": torch.tensor(7)}, tmp_path / "a.safetensors")
    save_file(weights, tmp_path / "b.safetensors", {"step": "1e5"})
    np.savez(tmp_path / "c.npz", w=np.zeros(3), global_step=np.float32(9))
    np.savez(tmp_path / "d.npz", w=np.zeros(3), global_step=np.float32(9.5))
    notes = []
    for name, step in (("a.safetensors", 7), ("b.safetensors", 100_000), ("c.npz", 9), ("d.npz", None)):
        report = store.ingest(tmp_path / name, run=name)
        assert report.version.step == step
        notes.append(report.note.partition(" in ")[0])
    assert notes == ["", "", "", "global_step 9.5"]


def test_floats_do_not_hide_the_latest_version(store: ckstore.Store) -> None:
    for step in (1, 2, 3.0, torch.tensor(4)):
        store.ingest({"w": torch.full((3,), float(step)), "step": step}, run="gpt")
    assert store["gpt@latest"].step == 4


def test_a_number_in_a_name_that_is_no_step_is_told(tmp_path: Path) -> None:
    for name, number in (("step=-1.ckpt", "-1"), ("step_2.5.ckpt", "2.5")):
        torch.save({"w": torch.zeros(3)}, tmp_path / name)
        with_note = open_path(tmp_path / name)
        with_note.close()
        assert with_note.step is None
        assert re.search(rf"(^|[^-]){re.escape(number)} in the name is not used", with_note.unused)


@pytest.mark.parametrize(("steps", "order"), [([5, 3, 0, 4], [3, 2, 4, 1]), ([5, None, 0, 4], [1, 2, 3, 4])])
def test_versions_are_in_order_of_steps_if_all_have_one(steps: list[int | None], order: list[int]) -> None:
    versions = [SimpleNamespace(number=number, step=step) for number, step in enumerate(steps, 1)]
    assert [version.number for version in by_step(versions[::-1])] == order


def test_floats_are_numbers_of_python_up_to_the_bounds() -> None:
    assert type(plain_number(np.float64(0.5))) is float
    assert (step_of_value(float(-(2**63))), step_of_value(float(2**63))) == (-(2**63), None)


@pytest.mark.parametrize(
    "value", [np.float64, SimpleNamespace(item=3, shape=()), SimpleNamespace(item=list, shape=0), np.zeros(1), {}, None]
)
def test_other_values_are_no_numbers(value: Any) -> None:
    assert plain_number(value) is value


def test_durations() -> None:
    texts = ("1.5s", "2m", "36h", "2d", "1w")
    assert [seconds_of(text) for text in texts] == [1.5, 120, 129_600, 172_800, 604_800]


def test_periods() -> None:
    assert periods_of(200) == periods_of("200") == [Every(200, False)]
    assert periods_of("1h:24, 7d:1") == [Every(3600, True, 24), Every(7 * 86_400, True, 1)]
    for text in (0, -5, "0", "0d", "0s:3", "1d:0", "1d:x", "1d:-1", "3:1d"):
        with pytest.raises(UsageError, match="keeps nothing"):
            periods_of(text)
    for text in ("", ":3", "v1"):
        with pytest.raises(UsageError, match="not a duration"):
            periods_of(text)


def test_a_step_as_text_has_at_most_40_characters() -> None:
    assert (step_of_text("0" * 39 + "5"), step_of_text("0" * 40 + "5")) == (5, None)
    assert steps_of_names(["w_" + "0" * 39 + "5", "w_" + "0" * 40 + "5"])[1].step is None


def test_arguments_take_the_same_steps(store: ckstore.Store) -> None:
    for step in (3.0, "1e5", np.int64(-2), torch.tensor(4), np.array(5.0), "10k"):
        row = store.ingest({"w": np.full(3, 1.0)}, run="a", step=step).version  # type: ignore[arg-type]
        assert row.step == step_of_value(step)
        assert store.run("a")[step].number == row.number  # type: ignore[index]
    assert store["a@1e5"].number == store["a@100_000"].number == store["a@100k"].number == store["a@100,000"].number
    assert [version.step for version in store.select("a@4..a@10k")] == [4, 5, 10_000]
    assert store.run("a")[np.int64(4) : 10_000.0].steps == [4, 5]  # type: ignore[misc]
    for step in (2.5, True, "v1", Decimal("2.5"), [1], 1 << 63, "", torch.arange(2), np.nan):
        with pytest.raises(UsageError, match="A step must be an integer"):
            store.ingest({"w": np.zeros(3)}, run="a", step=step)  # type: ignore[arg-type]
