"""States in memory against versions: equal ones are not decoded, others are named."""

from __future__ import annotations

import argparse
import math
import warnings
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.integrations.torch import check_resumed
from ckstore.reading import live_comparison


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **rest: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}


@pytest.mark.parametrize("hot", [0, 1])
def test_an_equal_state_is_told_by_ids(store: ckstore.Store, monkeypatch: pytest.MonkeyPatch, hot: int) -> None:
    """Nothing is decoded. A module or an optimiser counts as its state dict."""
    model, optimizer = trained()
    rest = {"step": 7, "rate": 0.5, "nan": math.nan, "name": "x", "large": torch.randn(5, 1 << 20)}
    store.ingest(state_of(model, optimizer, **rest), run="a", step=7, hot=hot)

    def refused(*given: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(live_comparison, "read_tensor", refused)
    report = store["a@7"].compare({"model": model, "optimizer": optimizer, **rest})
    assert report, str(report)
    assert report.tensors == 4 + 3 * 4 + 1
    assert str(report).startswith("All 17 tensors and ")


def test_what_differs_is_named(store: ckstore.Store) -> None:
    model, optimizer = trained()
    store.ingest(state_of(model, optimizer, step=7, done=[1, 2]), run="a", step=7)
    fresh = torch.optim.AdamW(model.parameters())
    report = store["a@7"].compare(state_of(model, fresh, step=7, done=[1, 2]))
    assert not report
    assert len(report.missing) == 12
    assert all(name.startswith("optimizer/state/") for name in report.missing)
    assert "12 missing: optimizer/state/[0]/" in str(report)
    with torch.no_grad():
        model[1].bias[3] = torch.nextafter(model[1].bias[3], torch.tensor(9.0))
    state = state_of(model, optimizer, step=8, done=[1, 3], more=torch.ones(2))
    state["model"]["0.weight"] = state["model"]["0.weight"].double()
    report = store["a@7"].compare(state)
    assert report.differing == ("done/[1]", "model/1.bias", "step")
    assert report.forms == ("model/0.weight",)
    assert report.fresh == ("more",)
    assert report.missing == ()


def test_bits_count(store: ckstore.Store) -> None:
    """Also of tensors in another order in memory, without elements, of arrays and of coarse versions."""
    state = {
        "zero": torch.zeros(3), "nan": torch.full((3,), math.nan), "turned": torch.randn(300, 400).T,
        "none": torch.ones(0),
        "complex": torch.randn(300, 300, dtype=torch.complex64), "array": np.arange(5),
        "half": torch.randn(9).bfloat16(),
        "conj": torch.randn(4, dtype=torch.complex64).conj(), "scalar": torch.tensor(5),
        "view": torch.randn(9, 9)[2:, 3:],
    }  # fmt: skip
    store.ingest(state, run="a", step=1)
    assert store["a"].compare(state), str(store["a"].compare(state))
    assert store["a"].compare({**state, "turned": state["turned"].contiguous()})
    assert store["a"].compare({**state, "zero": -torch.zeros(3)}).differing == ("zero",)
    changed = state["complex"].clone()
    changed[299, 299] = 5
    assert store["a"].compare({**state, "complex": changed}).differing == ("complex",)
    rough = {"w": torch.randn(500, 500)}
    store.ingest(rough, run="b", policy="coarse")
    assert store["b"].compare(rough).differing == ("w",)
    assert store["b"].compare(store["b"].state_dict())


def kinds(change: int) -> dict[str, Any]:
    """Objects that differ with `change` in one value each."""
    values = torch.tensor([1.0, 2.0, 3.0 + change])
    noted, nested = torch.ones(3), torch.ones(3)
    noted.note, nested.other = change, values  # type: ignore[attr-defined]
    generator = torch.Generator()
    generator.manual_seed(change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = {
            "sparse": torch.diag(values).to_sparse(), "rows": torch.diag(values).to_sparse_csr(),
            "quantised": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
            "scale": torch.quantize_per_tensor(torch.zeros(3), 0.1 + change, 0, torch.qint8),
        }  # fmt: skip
    return others | {
        "number": np.array(2.5 + change), "noted": noted, "nested": nested, "generator": generator,
        "numpy": np.random.default_rng(change), "state": np.random.RandomState(change),
        "space": argparse.Namespace(tensor=values), "plain": SimpleNamespace(nan=math.nan, step=change),
        "class": (SimpleNamespace if change else argparse.Namespace)(tensor=torch.ones(3)),
        "queue": deque([values, 1], 5), "set": {1, 2 + change},
        "dtypes": {torch.float16, (torch.int8, torch.int16)[change]}, "complex": complex(change, math.nan),
        "text": np.array(["a", f"b{change}"]), "swapped": np.arange(3, dtype=">f4") + change,
        "key": {(torch.int8, torch.int16)[change]: 1}, "turned": np.arange(change, 3.0)[::-1],
        "still": np.frombuffer(bytes([change, 1]), np.uint8),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(Sparse|sparse|quantized).*")
@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("kind", kinds(0))
def test_objects_are_compared_by_their_parts(store: ckstore.Store, tmp_path: Path, kind: str, as_file: bool) -> None:
    if as_file:
        torch.save({"x": kinds(0)[kind], "w": torch.ones(3)}, tmp_path / "x.pt")
    store.ingest(tmp_path / "x.pt" if as_file else {"x": kinds(0)[kind], "w": torch.ones(3)}, run="a")
    version = store["a"]
    for state in ({"x": kinds(0)[kind], "w": torch.ones(3)}, version.state_dict()):
        report = version.compare(state)
        assert report, str(report)
    report = version.compare({"x": kinds(1)[kind], "w": torch.ones(3)})
    assert not report
    assert all(path.split("/")[0] == "x" for path in (*report.differing, *report.forms, *report.missing, *report.fresh))


def test_attributes_that_only_the_state_has_do_not_count(store: ckstore.Store) -> None:
    store.ingest({"w": torch.ones(3)}, run="a")
    assert store["a"].compare({"w": kinds(0)["noted"]})
    store.ingest({"w": kinds(0)["noted"]}, run="b")
    assert store["b"].compare({"w": torch.ones(3)}).missing == ("w/note",)


@pytest.mark.parametrize(
    ("state", "changed"),
    [
        ({0: torch.zeros(3), "0": torch.ones(3)}, 0),
        ({"a/b": torch.zeros(3), "a": {"b": torch.ones(3)}}, "a/b"),
        ({1.5: 1, "1.5": torch.ones(3)}, 1.5),
        ({True: 1, "True": 2}, True),
    ],
)
def test_no_paths_collide(store: ckstore.Store, state: dict[Any, Any], changed: Any) -> None:
    state = {"s": state, "w": torch.ones(3)}
    store.ingest(state, run="a")
    assert store["a"].compare(state)
    report = store["a"].compare({**state, "s": {**state["s"], changed: state["s"][changed] + 1}})
    assert len(report.differing) == 1
    assert report.tensors == len(store["a"])
    assert report.tensors + report.values == 3
    named = {path for path in report.differing if path in store["a"]}
    assert bool(named) == isinstance(state["s"][changed], torch.Tensor)


def test_paths_of_files_are_those_of_the_version(store: ckstore.Store, tmp_path: Path) -> None:
    (tmp_path / "in/part").mkdir(parents=True)
    torch.save({"w": [torch.ones(3)]}, tmp_path / "in/part/x.pt")
    store.ingest(tmp_path / "in", run="a")
    assert store["a"].compare({"part/x.pt": {"w": [torch.ones(3)]}})
    assert store["a"].compare({"part/x.pt": {"w": [torch.zeros(3)]}}).differing == (*store["a"],)
    store.ingest({"a/b": {"w": torch.ones(3)}, "c": torch.ones(3)}, run="b")
    with pytest.warns(UserWarning, match="1 missing: a%2Fb/w"):
        check_resumed(store["b"], {"a/b": {}})


@dataclass
class Settings:
    rate: float


def test_objects_of_allowed_classes_are_compared(store: ckstore.Store) -> None:
    store.ingest({"w": torch.ones(3), "s": Settings(0.1)}, run="a", on_unknown="pickle")
    assert store["a"].compare({"w": torch.ones(3), "s": Settings(0.1)}, [Settings])
    for rate, allow in ((0.1, []), (0.2, [Settings])):
        assert store["a"].compare({"w": torch.ones(3), "s": Settings(rate)}, allow).differing == ("s",)


def test_keys_of_all_kinds_are_resumed(tmp_path: Path) -> None:
    state = {
        (1, 2): torch.ones(3),
        None: torch.ones(2),
        1.5: torch.zeros(2),
        b"x": torch.ones(1),
        "m": {"w": torch.ones(4)},
    }
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(state, run="r", step=1)
        assert check_resumed(store["r@1"], state)
