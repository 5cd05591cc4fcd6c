"""Which steps several inputs are stored at, and directories that hold several checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore.errors import InputError
from ckstore.scanning.steps import StepSource, plan_steps
from ckstore.steps import steps_of_names


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (
            ["checkpoint_50sims_1.pth.tar", "checkpoint_50sims_10.pth.tar", "checkpoint_50sims_100.pth.tar"],
            [1, 10, 100],
        ),
        (["netG_epoch_4_1.pth", "netG_epoch_4_2.pth", "netG_epoch_4_11.pth"], [1, 2, 11]),
        (["epoch=1-step=100.ckpt", "epoch=2-step=200.ckpt"], [100, 200]),
        (["checkpoint_0", "checkpoint_1"], [0, 1]),
        (["model-3-v2.pt", "model-4-v2.pt"], [3, 4]),
        (["w_3", "w_3"], [3, 3]),
        (["w3", "w3"], [None, None]),
        (["last.ckpt", "step7.ckpt"], [None, 7]),
        (["a.pt", "b.pt"], [None, None]),
        (["step5.pt"], [5]),
        (["epoch_1_0.pt", "epoch_1_1.pt", "epoch_2_0.pt"], [1, 1, 2]),
    ],
)
def test_of_names(names: list[str], steps: list[int | None]) -> None:
    assert [found.step for found in steps_of_names(names)] == steps


def saved(directory: Path, inside: dict[str, int | None]) -> list[Path]:
    for name, step in inside.items():
        torch.save(
            {"w": torch.full((3,), float(len(name)))} | ({} if step is None else {"step": step}), directory / name
        )
    return [directory / name for name in inside]


@pytest.mark.parametrize(
    ("inside", "source", "planned"),
    [
        # Contents that differ count before names.
        ({"run1_1.pt": 500, "run1_2.pt": 1000}, None, [("run1_1.pt", 500), ("run1_2.pt", 1000)]),
        ({"run1_1.pt": 500, "run1_2.pt": 1000}, "name", [("run1_1.pt", 1), ("run1_2.pt", 2)]),
        # Contents that say the same of all do not.
        (
            {"m_50_1.pt": 0, "m_50_2.pt": 0, "m_50_10.pt": 0},
            None,
            [("m_50_1.pt", 1), ("m_50_2.pt", 2), ("m_50_10.pt", 10)],
        ),
        ({"m_50_1.pt": 0, "m_50_2.pt": 0}, "content", [("m_50_1.pt", 0), ("m_50_2.pt", 0)]),
        ({"b.pt": 7, "a.pt": 7}, None, [("a.pt", 7), ("b.pt", 7)]),
        ({"b.pt": 7, "a10.pt": 7, "a9.pt": 7}, "order", [("a9.pt", 40), ("a10.pt", 41), ("b.pt", 42)]),
        (
            {"last.pt": None, "step3.pt": None, "step2.pt": 2},
            None,
            [("step2.pt", 2), ("step3.pt", 3), ("last.pt", None)],
        ),
        ({"a.pt": 9, "b.pt": 7, "c.pt": 8}, None, [("b.pt", 7), ("c.pt", 8), ("a.pt", 9)]),
    ],
)
def test_of_inputs(
    tmp_path: Path, inside: dict[str, int | None], source: StepSource | None, planned: list[tuple[str, int | None]]
) -> None:
    found = plan_steps(saved(tmp_path, inside), source, first=40)
    assert [(item.path.name, item.step) for item in found] == planned
    assert not any(item.refused for item in found)


def test_steps_have_sources_and_are_in_order(tmp_path: Path) -> None:
    found = plan_steps(saved(tmp_path, {"a.pt": 3, "step30.pt": None, "c.pt": 20, "last.pt": None}))
    assert [(item.path.name, item.step, item.step_from) for item in found] == [
        ("a.pt", 3, "content"), ("c.pt", 20, "content"), ("step30.pt", 30, "name"), ("last.pt", None, None),
    ]  # fmt: skip


def test_a_link_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, {"step3.pt": None})
    (tmp_path / "step5.pt").symlink_to("step3.pt")
    assert [item.step for item in plan_steps([tmp_path / "step5.pt"])] == [5]
    (tmp_path / "step-7").mkdir()
    monkeypatch.chdir(saved(tmp_path / "step-7", {"model.pt": None})[0].parent)
    assert [item.step for item in plan_steps([Path()])] == [7]


def test_directories_with_equal_contents(tmp_path: Path) -> None:
    """As `accelerate` writes them: the number of the save is in the name alone."""
    for number in range(3):
        place = tmp_path / f"checkpoint_{number}"
        place.mkdir()
        torch.save({"w": torch.full((3,), float(number))}, place / "pytorch_model.bin")
        torch.save({"step": 0, "random": [1]}, place / "random_states_0.pkl")
    with ckstore.init(tmp_path / "store") as store:
        for item in plan_steps(list(tmp_path.glob("checkpoint_*"))):
            store.ingest(item.path, step=item.step)
        assert [row.step for row in store._catalog.versions()] == [0, 1, 2]


def tree(root: Path, *paths: str) -> Path:
    for path in paths:
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.suffix == ".json":
            place.write_text(json.dumps({"a": 1}))
        else:
            torch.save({"w": torch.zeros(3)}, place)
    return root


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (
            ["checkpoint-500/pytorch_model.bin", "checkpoint-1000/pytorch_model.bin", "pytorch_model.bin"],
            "checkpoint-*",
        ),
        (["step1.pt", "step2.pt", "config.json"], "step*"),
        (["checkpoints/epoch=1.ckpt", "epoch_1/x.pt", "epoch_2/deep/x.pt"], "epoch_*"),
    ],
)
def test_a_directory_of_several_checkpoints_is_no_version(tmp_path: Path, paths: list[str], pattern: str) -> None:
    output = tree(tmp_path / "output", *paths)
    with ckstore.init(tmp_path / "store") as store:
        with pytest.raises(InputError, match="2 checkpoints, not one") as raised:
            store.ingest(output)
        assert str(raised.value).endswith(f"/{pattern}.")
        assert len(list(output.glob(pattern))) == 2
        assert store._catalog.versions() == []


@pytest.mark.parametrize(
    "paths",
    [
        ["unet/model.pt", "vae/model.pt", "text_encoder/model.pt", "text_encoder_2/model.pt"],
        ["model-00001-of-00002.pt", "model-00002-of-00002.pt"],
        ["pytorch_model_fsdp_0/x.pt", "pytorch_model_fsdp_1/x.pt"],
        ["global_step500/mp_rank_00_model_states.pt", "global_step500/mp_rank_01_model_states.pt", "latest.json"],
        ["checkpoint-1/notes.json", "checkpoint-2/notes.json", "model.pt"],
        ["step-00001-of-00002.pt", "step-00002-of-00002.pt"],
    ],
)
def test_a_directory_of_one_checkpoint(tmp_path: Path, paths: list[str]) -> None:
    with ckstore.init(tmp_path / "store") as store:
        assert store.ingest(tree(tmp_path / "output", *paths)).is_new


def test_a_damaged_file_has_no_step_unless_it_counts_as_bytes(tmp_path: Path) -> None:
    saved(tmp_path, {"step7.pt": 7})
    damaged = tmp_path / "step7.pt"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    (refused,) = plan_steps([damaged], "content")
    assert refused.refused
    assert damaged.name in refused.note
    (taken,) = plan_steps([damaged], "content", force=True)
    assert not taken.refused
