"""The bench of others' series on small directories that are laid out like theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import public

pytestmark = pytest.mark.local

Write = Callable[[Path, int, dict[str, Any], dict[str, Any]], None]


def zero(root: Path, step: int, model: dict[str, Any], moments: dict[str, Any]) -> None:
    """Write a step as GPT-NeoX does: half-precision modules, and ZeRO's flat partitions of the optimiser."""
    directory = root / f"global_step{step}"
    directory.mkdir(parents=True)
    half = {name: value.half() for name, value in model.items()}
    torch.save({"module": half, "global_steps": step}, directory / "mp_rank_00_model_states.pt")
    flat = {name: torch.cat([value.flatten() for value in values.values()]) for name, values in moments.items()}
    optimizer = {
        "zero_stage": 1,
        "base_optimizer_state": [{"step": step, **flat}],
        "single_partition_of_fp32_groups": [torch.cat([value.flatten() for value in model.values()])],
    }
    torch.save({"optimizer_state_dict": optimizer}, directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def fabric(root: Path, step: int, model: dict[str, Any], moments: dict[str, Any]) -> None:
    """Write a step as pico-train does: Fabric's state in a directory next to a configuration."""
    directory = root / f"step_{step}"
    (directory / "fabric_state").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "pico_decoder"}))
    state = {
        number: {"step": torch.tensor(float(step))} | {name: values[weight] for name, values in moments.items()}
        for number, weight in enumerate(model)
    }
    torch.save({"_model": model, "_optimizer": {"state": state}}, directory / "fabric_state" / "checkpoint.pt")


@pytest.mark.parametrize("write", [zero, fabric])
def test_series_of_other_trainers(write: Write, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (300, 256), "layers.0.norm.weight": (256,), "layers.0.up.weight": (512, 256)}
    model = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for step in (0, 9, 100):
        noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        moments = {
            "exp_avg": {name: 1e-4 * value for name, value in noise.items()},
            "exp_avg_sq": {name: 1e-8 * (value**2 + 0.1) for name, value in noise.items()},
        }
        model = {name: value + 1e-4 * noise[name] for name, value in model.items()}
        write(tmp_path / "run", step, model, moments)
    said: list[str] = []
    rows = public.measure(tmp_path / "run", tmp_path, said.append)
    exact, coarse, coarser = rows
    assert [row.policy for row in rows] == list(public.POLICIES)
    assert (
        exact.sizes
        == coarse.sizes
        == [
            sum(file.stat().st_size for file in (tmp_path / "run" / name).rglob("*") if file.is_file())
            for name in sorted((path.name for path in (tmp_path / "run").iterdir()), key=len)
        ]
    )
    assert exact.deviation == 0 < coarse.deviation < coarser.deviation < 1
    assert sum(exact.sizes) > sum(exact.stored) > 4 * sum(coarse.stored) > 4 * sum(coarser.stored)
    assert len(said) == 9
    assert coarse.cells()[:4] == ["run", "coarse 1.5", "3", f"{sum(coarse.sizes):,}"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_one_checkpoint_is_no_series(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    torch.save({"weight": torch.zeros(8), "step": 3}, tmp_path / "run" / "step3.pt")
    with pytest.raises(ValueError, match="has fewer than two checkpoints with a step"):
        public.measure(tmp_path / "run", tmp_path, print)
