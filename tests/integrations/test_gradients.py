"""Gradients gathered while a model is trained, and a version's gain from them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckstore
from ckstore import GradientAccumulator
from ckstore.errors import UsageError
from ckstore.policy import Policy
from ckstore.writing.tuning import Search

Batches = list[torch.Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(count: int) -> Batches:
    return list(torch.randn(count, 8, 4, generator=torch.Generator().manual_seed(1)))


def train(model: nn.Module, accumulator: GradientAccumulator, inputs: Batches, first: int = 1) -> list[dict[str, Any]]:
    """Train with SGD as a user writes it; return the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step, batch in enumerate(inputs, first):
        model(batch).square().mean().backward()
        accumulator.after_backward(step)
        optimizer.step()
        accumulator.before_clearing()
        seen.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.zero_grad()
    return seen


def mean_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Compute the mean in a plain loop, in float64."""
    mean = torch.zeros_like(gradients[0], dtype=torch.float64)
    for gradient in gradients:
        mean = 0.9 * gradient.double() + 0.1 * mean
    return mean.float()


def test_the_mean_is_that_of_a_plain_loop() -> None:
    model = network()
    accumulator = GradientAccumulator({"model": model}, every=20, window=5)
    seen = train(model, accumulator, batches(20))
    found = accumulator.gradients()
    assert list(found) == [f"model/{name}" for name, _ in model.named_parameters()]
    for name in seen[0]:
        torch.testing.assert_close(
            found[f"model/{name}"], mean_of([step[name] for step in seen[-5:]]), rtol=1e-6, atol=0
        )


def test_eight_steps_approximate_fifty() -> None:
    means = []
    for window in (8, 50):
        model = network()
        accumulator = GradientAccumulator(model, every=60, window=window)
        train(model, accumulator, batches(60))
        means.append(accumulator.gradients())
    for name, mean in means[0].items():
        torch.testing.assert_close(mean, means[1][name], rtol=1e-5, atol=1e-8)


def test_gradients_are_gathered_before_saves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps before each save, of a run that goes on at step 18; a second window begins from nothing."""
    model = network()
    accumulator = GradientAccumulator(model, every=10, window=3)
    taken: list[int] = []
    add = GradientAccumulator._add
    steps = iter(range(18, 31))

    def noted(self: GradientAccumulator, parameter: Any, gradient: Any) -> None:
        taken.append(parameter is model[0].weight)  # type: ignore[index]
        add(self, parameter, gradient)

    monkeypatch.setattr(GradientAccumulator, "_add", noted)
    counts = []
    for step, batch in zip(steps, batches(13), strict=True):
        before = sum(taken)
        last = train(model, accumulator, [batch], first=step)
        counts.append((step, sum(taken) - before))
        if step == 28:
            only = {name: 0.9 * gradient for name, gradient in last[0].items()}
            torch.testing.assert_close(accumulator.gradients(), only)
    assert [step for step, count in counts if count] == [18, 19, 20, 28, 29, 30]


def test_frozen_weights_have_no_gradient_and_a_missing_one_counts_as_zero() -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    accumulator = GradientAccumulator(model, every=1)
    train(model, accumulator, batches(2))
    assert list(accumulator.gradients()) == ["2.weight", "2.bias"]
    before = accumulator.gradients()["2.bias"].clone()
    model.zero_grad()
    accumulator.after_backward(3)
    torch.testing.assert_close(accumulator.gradients()["2.bias"], before * 0.1)


def test_tied_parameters_have_all_their_names() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    accumulator = GradientAccumulator({"nets": {"a/b": model}}, every=1)
    model(torch.tensor([1, 2])).sum().backward()
    accumulator.after_backward(1)
    found = accumulator.gradients()
    assert list(found) == ["nets/a%2Fb/0.weight", "nets/a%2Fb/1.weight"]
    assert model[0].weight.grad is not None
    for mean in found.values():
        torch.testing.assert_close(mean, 0.9 * model[0].weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_become_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2, bias=False).to(dtype)
    accumulator = GradientAccumulator(model, every=1)
    model(torch.randn(2, 3, dtype=dtype)).sum().backward()
    accumulator.after_backward(1)
    assert model.weight.grad is not None
    torch.testing.assert_close(accumulator.gradients(), {"weight": 0.9 * model.weight.grad.float()})


def test_a_step_that_a_scaler_skips_counts_as_zero() -> None:
    """Its gradients are infinite."""
    model = nn.Linear(1, 2, bias=False)
    accumulator = GradientAccumulator(model, every=1)
    for step, gradient in enumerate(([1.0, 1.0], [float("inf"), float("nan")], [2.0, 3.0]), 1):
        model.weight.grad = torch.tensor(gradient)[:, None]
        accumulator.after_backward(step)
        assert torch.equal(model.weight.grad.flatten().isfinite(), torch.tensor(gradient).isfinite()), "as it was"
    assert accumulator.gradients()["weight"].flatten().tolist() == pytest.approx([1.809, 2.709])


@pytest.mark.parametrize(
    ("modules", "options", "hint"),
    [
        (nn.Linear(1, 1), {"every": 0}, "`every` must be 1 or more"),
        (nn.Linear(1, 1), {"every": 5, "window": 0}, "`window` must be 1 or more"),
        ({"model": [nn.Linear(1, 1)]}, {"every": 5}, "list is not a module"),
    ],
)
def test_invalid_modules_and_options_are_refused(modules: Any, options: dict[str, int], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        GradientAccumulator(modules, **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_gradients_on_a_gpu_equal_those_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = network().to(device)
        accumulator = GradientAccumulator(model, every=10, window=6)
        train(model, accumulator, [batch.to(device) for batch in batches(20)])
        found.append(accumulator.gradients())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def test_importing_ckstore_does_not_import_torch() -> None:
    code = "import sys, ckstore; ckstore.GradientAccumulator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A version's gain


class Skewed(nn.Module):
    """A layer whose last rows alone ever have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(300, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight[100:].T + 1e-6 * (x @ self.weight[:100].T).sum()


def error_of(seen: str, path: Path) -> float:
    """Note the process, and return the share of weights that are not 0."""
    with open(seen, "a") as file:
        file.write(f"{os.getpid()}\n")
    return float(np.mean(torch.load(path, weights_only=True)["model"]["weight"].numpy() != 0))


def trained() -> tuple[dict[str, Any], GradientAccumulator]:
    model = Skewed()
    accumulator = GradientAccumulator({"model": model}, every=4, window=3)
    train(model, accumulator, list(torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(1))))
    return {"model": model.state_dict(), "step": 4}, accumulator


def test_a_training_loop_tells_which_weights_matter(tmp_path: Path) -> None:
    """With SGD nothing else does."""
    state, accumulator = trained()
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(
            state, run="sgd", gradients=accumulator.gradients(), policy=Policy("coarse", scheme="dynaquant", quality=3)
        )
        pruned = np.asarray(store["sgd@4"]["model/weight"][:]) == 0
    assert pruned[:100].mean() > pruned[100:].mean() + 0.4


def test_the_search_has_no_metric_without_sensitivity(tmp_path: Path) -> None:
    """Else it would try every setting twice, and record magnitude as `sensitivity`."""
    state, accumulator = trained()
    later = {"model": {"weight": state["model"]["weight"] * 1.01}, "step": 8}
    evaluations = {}
    for name, gradients in (("with", accumulator.gradients()), ("without", None)):
        with ckstore.init(tmp_path / name) as store:
            for checkpoint in (state, later):
                store.ingest(
                    checkpoint,
                    run="sgd",
                    gradients=gradients,
                    policy=Policy("coarse", scheme="dynaquant"),
                    search=Search(lambda path: 1.0),
                )
            coarse = store["sgd@8"]._stored.document.coarse
            assert coarse is not None
            evaluations[name] = coarse.parameters["evaluations"]
            assert name == "with" or coarse.parameters["metric"] == "magnitude"
    # The last choice is tried by each metric that there is.
    assert evaluations == {"with": 2, "without": 1}


@pytest.mark.long
def test_a_saver_stores_with_gradients_and_an_evaluation(tmp_path: Path) -> None:
    """Both processes store alike, by the gradients as they were at the call."""
    state, accumulator = trained()
    given = {path: gradient.clone() for path, gradient in accumulator.gradients().items()}
    search = Search(partial(error_of, str(tmp_path / "seen")), 0.5, maximise=True)
    with ckstore.init(tmp_path / "here") as here, ckstore.init(tmp_path / "there") as there:
        for store in (here, there):
            store.set_policy(Policy("coarse", scheme="dynaquant"))
        here.ingest(state, gradients=given, search=search)
        with there.saver() as saver:
            saving = saver.save(state, gradients=given, search=search)
            for gradient in given.values():
                gradient.zero_()
        assert not saving.result().version.hot
        found = [store["main@4"]._stored.document.coarse for store in (here, there)]
        assert found[0] is not None
        assert found[1] is not None
        assert found[0].parameters == found[1].parameters
        assert found[0].parameters["evaluations"] > 1
        assert np.array_equal(here["main@4"]["model/weight"][...], there["main@4"]["model/weight"][...])
    assert len(set((tmp_path / "seen").read_text().split())) == 2, "each in its process"


def test_a_saver_refuses_an_evaluation_that_its_process_cannot_import(tmp_path: Path) -> None:
    state, _ = trained()
    with ckstore.init(tmp_path / "store") as store, store.saver() as saver:
        with pytest.raises(UsageError, match="cannot import the evaluation"):
            saver.save(state, search=Search(lambda path: 1.0))
        code = "def loss(path): return 1.0"
        main: dict[str, Any] = {"__name__": "__main__"}
        exec(code, main)
        with pytest.raises(UsageError, match="loss is part of the main module"):
            saver.save(state, search=Search(main["loss"]))
        assert store._catalog.versions() == []


def test_a_saver_reports_gradients_of_other_shapes(tmp_path: Path) -> None:
    state, _ = trained()
    with ckstore.init(tmp_path / "store") as store:
        saver = store.saver()
        saving = saver.save(state, gradients={"model/weight": torch.ones(3)})
        assert "has the shape (3,)" in str(saving.exception())
        with pytest.raises(UsageError, match="has the shape"):
            saver.close()


@pytest.mark.long
@pytest.mark.parametrize("given", ["sums.pt", {"model/weight": object()}, {"model/weight": None}])
def test_a_saver_refuses_other_gradients_at_once(tmp_path: Path, given: Any) -> None:
    state, _ = trained()
    with ckstore.init(tmp_path / "store") as store, store.saver() as saver:
        with pytest.raises(UsageError, match=r"their file to `Store\.ingest`|gradient of model/weight is not an array"):
            saver.save(state, gradients=given)
        assert store._catalog.versions() == []


def test_a_saver_names_an_evaluation_that_its_process_does_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, _ = trained()
    module = ModuleType("only_here")
    exec("def loss(path): return 1.0", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with ckstore.init(tmp_path / "store") as store:
        saver = store.saver()
        saving = saver.save(state, search=Search(module.loss))
        assert "cannot import the evaluation (No module named 'only_here')" in str(saving.exception())
        with pytest.raises(UsageError, match="cannot import the evaluation"):
            saver.close()
        assert store._catalog.versions() == []


def test_gradients_by_other_paths_than_the_states_are_refused(tmp_path: Path) -> None:
    state, accumulator = trained()
    wrong = {path.removeprefix("model/"): gradient for path, gradient in accumulator.gradients().items()}
    with ckstore.init(tmp_path / "store") as store, pytest.raises(UsageError, match="such as model/weight"):
        store.ingest(state, run="sgd", gradients=wrong, policy=Policy("coarse", scheme="dynaquant"))
