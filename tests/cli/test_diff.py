"""`ckstore diff`: added, removed and changed tensors, by ids and by values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .conftest import checkpoint


def test_changes(ckstore, filled: Path) -> None:
    changes = {item["path"]: item for item in ckstore("diff", "gpt@0", "gpt@20", "--json").json}
    assert {path: item["change"] for path, item in changes.items()} == {
        "model/weight": "values",
        "model/bias": "values",
        "model/late": "added",
    }
    assert changes["model/late"] == {
        "path": "model/late",
        "change": "added",
        "after": {"dtype": "bfloat16", "shape": [2, 2]},
    }
    assert [item["change"] for item in ckstore("diff", "3", "1", "--json").json].count("removed") == 1
    assert ckstore("diff", "best", "latest", "--json").json == []


def test_values(ckstore, filled: Path) -> None:
    changes = {item["path"]: item for item in ckstore("diff", "1", "2", "--json").json}
    before, after = (checkpoint(step)["model"]["weight"].double() for step in (0, 10))
    distance = (after - before).abs()
    assert changes["model/weight"]["max_abs"] == pytest.approx(distance.max().item())
    assert changes["model/weight"]["rms"] == pytest.approx(distance.square().mean().sqrt().item())
    assert changes["model/weight"]["drift"] == pytest.approx((distance.norm() / before.norm()).item())
    assert changes["model/bias"] == {
        "path": "model/bias", "change": "values", "before": {"dtype": "float32", "shape": [7]},
        "after": {"dtype": "float32", "shape": [7]}, "share": 1.0, "drift": 10.0, "cosine": pytest.approx(1),
        "max_abs": 10.0, "rms": 10.0, "nonfinite": [0, 0],
    }  # fmt: skip


def test_diff_finds_differences_that_equality_misses(ckstore, place: Path) -> None:
    nan, view = torch.tensor([float("nan"), 1.0]), torch.arange(6.0).reshape(2, 3)
    steps = [
        {"nan": nan, "zero": torch.zeros(2), "view": view, "n": torch.tensor(3)},
        {"nan": nan, "zero": -torch.zeros(2), "view": view, "n": torch.tensor(4)},
        {"nan": nan[None], "zero": torch.zeros(2).half(), "view": view.T.contiguous().T, "n": torch.tensor(4)},
    ]
    for step, state in enumerate(steps):
        torch.save(state, place / f"odd{step}.pt")
        ckstore("ingest", f"odd{step}.pt", "--step", step)
    changes = ckstore("diff", "1", "2", "--json").json
    assert [(item["path"], item["change"], item["max_abs"]) for item in changes] == [
        ("zero", "values", 0.0),
        ("n", "values", 1.0),
    ]
    assert [(item["path"], item["change"]) for item in ckstore("diff", "2", "3", "--json").json] == [
        ("nan", "shape"),
        ("zero", "dtype"),
    ]


def test_another_layout_of_the_same_values(ckstore, place: Path) -> None:
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(1))
    torch.save({"a": weight, "b": weight[:2]}, place / "tied.pt")
    torch.save({"b": weight[:2].clone(), "a": weight.clone()}, place / "apart.pt")
    torch.save({"b": weight[1:3].clone(), "a": weight.T.contiguous().T}, place / "turned.pt")
    for step, name in enumerate(["tied.pt", "apart.pt", "turned.pt"]):
        ckstore("ingest", name, "--step", step)
    assert ckstore("diff", "1", "2", "--json").json == []
    assert [item["path"] for item in ckstore("diff", "1", "3", "--json").json] == ["b"]


def test_table_and_glob(ckstore, filled: Path) -> None:
    lines = ckstore("diff", "1", "3", "model/*").out.splitlines()
    assert lines[0] == "1 added, 2 changed; 3 of 5 tensors differ."
    assert lines[1].split() == ["CHANGE", "DTYPE", "SHAPE", "PATH"]
    assert lines[3].split() == ["CHANGED", "DRIFT", "COSINE", "RMS", "MAX", "ABS", "PATH"]
    assert lines[4].endswith("model/bias")
    assert "██████████" in lines[4]
    assert ckstore("diff", "1", "3", "*/frozen").out == "no difference; 0 of 1 tensors differ.\n"
    assert "nowhere" in ckstore("diff", "1", "3", "nowhere", code=13).sentence


def test_a_summary_comes_first(ckstore, place: Path) -> None:
    for step in (1, 2):
        state = {part: {f"{layer}.w": torch.full((3,), float(step)) for layer in range(8)} for part in ("model", "ema")}
        torch.save(state, place / f"many{step}.pt")
        ckstore("ingest", f"many{step}.pt", "--step", step)
    lines = ckstore("diff", "1", "2").out.splitlines()
    assert lines[:3] == ["16 changed; 16 of 16 tensors differ.", "      8  model", "      8  ema"]
    assert len(lines) == 3 + 1 + 16


def test_orders(ckstore, place: Path) -> None:
    small, far = torch.ones(100), torch.ones(100)
    far[0] = 90
    for step, state in enumerate([{"near": torch.ones(100), "far": torch.ones(100)}, {"near": small + 1, "far": far}]):
        torch.save(state, place / f"two{step}.pt")
        ckstore("ingest", f"two{step}.pt", "--step", step)
    for sort, first in (("drift", "far"), ("rms", "far"), ("share", "near"), ("path", "near")):
        assert ckstore("diff", "1", "2", "--sort", sort, "--json").json[0]["path"] == first


def test_counters_come_last_and_flatten_no_bars(ckstore, place: Path) -> None:
    weight = torch.ones(4096)
    for step in (1, 20):
        weight[0] += step
        torch.save({"w": weight, "step": torch.tensor(float(step))}, place / f"counted{step}.pt")
        ckstore("ingest", f"counted{step}.pt", "--step", step)
    lines = ckstore("diff", "1", "2").out.splitlines()
    assert lines[0] == "2 changed; 2 of 2 tensors differ."
    assert lines[2].startswith("1 of 4,096  0.31")
    assert "██████████" in lines[2]
    assert lines[3].split()[0] == "100"
    assert lines[3].endswith("  step")
    assert "█" not in lines[3]


def test_infinities_and_nans_are_counted(ckstore, place: Path) -> None:
    for step, value in enumerate([1.0, float("nan")]):
        torch.save({"w": torch.tensor([value, 2.0, 3.0 + step])}, place / f"odd{step}.pt")
        ckstore("ingest", f"odd{step}.pt", "--step", step)
    assert ckstore("diff", "1", "2").out.splitlines()[-1] == "w has 0 infinities and NaNs before, 1 after."
    [change] = ckstore("diff", "1", "2", "--json").json
    assert (change["max_abs"], change["nonfinite"], change["share"]) == (1.0, [0, 1], pytest.approx(2 / 3))


def test_several_globs(ckstore, filled: Path) -> None:
    changes = ckstore("diff", "gpt@0", "gpt@20", "model/late", "*bias", "--json").json
    assert {item["path"] for item in changes} == {"model/bias", "model/late"}
    assert "nothing or none" in ckstore("diff", "gpt@0", "gpt@20", "nothing", "none", code=13).sentence


def test_a_rename_is_said_once(ckstore, place: Path) -> None:
    for step, wrapper in enumerate(["", "module."]):
        torch.save({f"{wrapper}{name}.weight": torch.ones(3, 4) for name in "abc"}, place / "state.pt")
        ckstore("ingest", "state.pt", "--run", "wrapped", "--step", str(step))
    lines = ckstore("diff", "wrapped@0", "wrapped@1").out.splitlines()
    assert lines == ["no difference; 0 of 3 tensors differ.", "3 tensors renamed: * → module.*."]
