"""Values decide which tensors are moments: trainings resume from coarse versions whatever their tensors are called."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.codecs.rounded import RoundedLattice
from ckstore.encoding import value_roles
from ckstore.policy import Policy
from tests.checkpoints import draw, scratch
from tests.coarse_checks import kinds_of, loaded, tensors_of, wide

#: One layer is an object of its own, the others are bundled.
WIDTH = 272
STEPS = 150

Key = tuple[str | int, ...]
Tensors = dict[Key, torch.Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "Adam": lambda given: torch.optim.Adam(given, 1e-3),
    "AMSGrad": lambda given: torch.optim.AdamW(given, 1e-3, amsgrad=True),
    "Adamax": lambda given: torch.optim.Adamax(given, 1e-3),
    "RMSprop": lambda given: torch.optim.RMSprop(given, 1e-4, momentum=0.9),
    "centred RMSprop": lambda given: torch.optim.RMSprop(given, 1e-4, centered=True),
    "Adafactor": lambda given: torch.optim.Adafactor(given, 1e-2),
    "Adadelta": lambda given: torch.optim.Adadelta(given, 0.5),
    "Adagrad": lambda given: torch.optim.Adagrad(given, 1e-2),
    "Rprop": lambda given: torch.optim.Rprop(given, 1e-4),
    "SGD": lambda given: torch.optim.SGD(given, 1e-2, momentum=0.9),
}


@pytest.fixture
def place() -> Iterator[Path]:
    with scratch() as path:
        yield path


@pytest.fixture
def store() -> Iterator[ckstore.Store]:
    with scratch() as path, ckstore.init(path / "store") as opened:
        yield opened


def loss_of(model: torch.nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return (model(x) - torch.sin(x[:, :8].sum(1, keepdim=True) / 2)).square().mean()


def built(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*sizes) for sizes in pairwise((32, WIDTH, WIDTH, 1))]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    return model, OPTIMIZERS[kind](model.parameters())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Train from one step to another; return the losses after 0, 1, 10 steps, and in the end."""
    losses = []
    for step in range(first, last + 1):
        if step - first in (0, 1, 10, last - first):
            with torch.no_grad():
                losses.append(float(sum(loss_of(model, seed) for seed in range(10**6, 10**6 + 8))) / 8)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return losses


@cache
def trained(kind: str) -> tuple[dict[str, Any], list[float]]:
    """The state after a training, and the losses of the same training later."""
    model, optimizer = built(kind)
    train(model, optimizer, 1, STEPS)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {"model": {k: v.clone() for k, v in saved["model"].items()}, "optimizer": clone(saved["optimizer"])}
    return saved, train(model, optimizer, STEPS + 1, STEPS + 60)


def clone(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    return [clone(value) for value in tree] if isinstance(tree, list) else tree


def flat(tree: Any, path: Key = ()) -> Tensors:
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    if isinstance(tree, dict):
        return {key: value for name, item in tree.items() for key, value in flat(item, (*path, name)).items()}
    return {}


def nested(tensors: Tensors) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, tensor in tensors.items():
        node = tree
        for segment in path[:-1]:
            node = node.setdefault(segment, {})
        node[path[-1]] = tensor
    return tree


def renamed(tensors: Tensors, seed: int) -> dict[Key, Key]:
    """Return other paths of tensors in another order: renamed segments, below others, or as many words without any."""
    chance = random.Random(seed)
    words = ["weight", "bias", "exp_avg", "v", "layer", "running_var", "h.0", "q", "a", "k", "dense", "mu"]
    chance.shuffle(words)
    names: dict[str | int, str] = {}
    found: dict[Key, Key] = {}
    above = tuple(chance.choice("xyz") * 3 for _ in range(chance.randrange(3)))
    for number, path in enumerate(chance.sample(sorted(tensors, key=str), len(tensors))):
        for segment in path:
            if segment not in names:
                names[segment] = words.pop() if words and chance.random() < 0.3 else f"n{len(names)}"
        found[path] = (f"t{number}",) if seed % 3 == 2 else (*above, *(names[segment] for segment in path))
    return found


def resumed(kind: str, saved: dict[str, Any], tensors: Tensors) -> list[float]:
    """The losses of the training from other tensors."""
    state = clone(saved)
    for path, tensor in tensors.items():
        node = state
        for segment in path[:-1]:
            node = node[segment]
        node[path[-1]] = tensor
    model, optimizer = built(kind)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer, STEPS + 1, STEPS + 60)


def zeroed(tensor: torch.Tensor, after: torch.Tensor) -> int:
    """The number of positive values that became 0 or negative, of a tensor without negative ones."""
    return int(((tensor > 0) & (after <= 0)).sum()) if tensor.numel() and (tensor >= 0).all() else 0


def stored_as(store: ckstore.Store, tree: Any, how: str, **options: Any) -> ckstore.Version:
    policy = Policy("exact" if how == "thin" else "coarse", scheme="lc" if how == "lc" else "lattice", hot=0, **options)
    report = store.ingest(tree, run="r", policy=policy)
    if how == "thin":
        store.thin(report.version.number)
    return store[report.version.number]


@pytest.mark.long
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_resumes_whatever_its_tensors_are_called(kind: str) -> None:
    """All ways with Adam, and two with each of the others."""
    saved, losses = trained(kind)
    tensors = flat(saved)
    ways = [*enumerate(("coarse", "thin", "coarse", "lc"))]
    for seed, how in ways if kind == "Adam" else ways[[*OPTIMIZERS].index(kind) % 2 :: 2]:
        names = renamed(tensors, seed) if seed else {path: path for path in tensors}
        with scratch() as path, ckstore.init(path / "store") as store:
            version = stored_as(store, nested({names[path]: tensors[path] for path in names}), how)
            assert version.fidelity == "coarse"
            back = flat(version.state_dict())
        after = {path: back[name] for path, name in names.items()}
        lost = {path: zeroed(tensors[path], after[path]) for path in tensors}
        assert not any(lost.values()), (seed, lost)
        again = resumed(kind, saved, after)
        assert again == pytest.approx(losses, rel=0.25, abs=0.02), (seed, how)


def test_moments_have_a_step_of_their_own_below_any_name(store: ckstore.Store) -> None:
    """By name, by place, by values: large second moments are as small as under torch's names."""
    saved, _ = trained("Adam")
    for first, second, above in (
        ("exp_avg", "exp_avg_sq", "optimizer"), ("mu", "nu", "opt_state"), ("a", "b", "optimizer"), ("a", "b", "x")
    ):  # fmt: skip
        names = {"exp_avg": first, "exp_avg_sq": second}
        states = {number: {names.get(name, name): value for name, value in state.items()}
                  for number, state in saved["optimizer"]["state"].items()}  # fmt: skip
        version = stored_as(store, {"model": saved["model"], above: {"state": states}}, "coarse")
        path = f"{above}/state/[2]/{second}"
        assert kinds_of(version)[path] == "rounded"
        place = [unit.key for unit in version._stored.layout.units].index(path)
        lattice = version._stored.repository.resolver.record(version._stored.document.objects[place]).lattice
        assert isinstance(lattice, RoundedLattice)
        assert lattice.shift > 23


@pytest.mark.long
@pytest.mark.parametrize("name", ["weight", "bias", "exp_avg", "exp_avg_sq", "momentum_buffer", "running_var", "v"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((300, 256), torch.float32),
        ((300, 256), torch.float16),
        ((60, 90), torch.bfloat16),
        ((5000,), torch.float32),
        ((300, 256), torch.float64),
    ],
    ids=str,
)
def test_no_positive_value_becomes_0_under_any_name(
    store: ckstore.Store, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    noise = draw(*shape, seed=1)
    second = torch.exp2(draw(*shape) * 6 - 20).to(dtype)
    second.view(-1)[7], second.view(-1)[9] = 0, torch.finfo(dtype).smallest_normal / 4
    ways: list[tuple[str, dict[str, Any]]] = [("coarse", {}), ("coarse", {"max_rel_error": 0.1}), ("lc", {})]
    ways.append(("thin", {}))
    for step, (how, options) in enumerate(ways[len(shape) % 2 * 2 :][:3]):
        version = stored_as(store, {"a": {name: second, "other": noise}, "b": noise, "step": step}, how, **options)
        assert zeroed(second, version[f"a/{name}"].torch()) == 0, how


def test_positive_gains_of_layers_are_weights(store: ckstore.Store) -> None:
    """They are far from 0, and next to their own moments, which do not make moments of them."""
    gain = 1 + draw(5000, scale=0.1)
    noise = draw(5000, seed=1, scale=1e-3)
    states = {"m": {"norm": {"weight": noise}}, "v": {"norm": {"weight": noise.square()}}}
    version = stored_as(store, {"params": {"norm": {"weight": gain}, "up": draw(300, 256)}, **states}, "coarse")
    assert version.deviations()["params/norm/weight"].relative < 0.03


def test_report_names_moments(store: ckstore.Store) -> None:
    from ckstore.reading.deviations import largest_deviations

    saved, _ = trained("Adam")
    tensors = flat(saved)
    names = renamed(tensors, 2)
    version = stored_as(store, nested({names[path]: tensors[path] for path in names}), "coarse")
    weights, moments = largest_deviations(version._stored)
    assert weights < 0.2 < moments


def test_an_optimiser_alone_keeps_its_moments(store: ckstore.Store, place: Path) -> None:
    """As `optimizer.pt` alone, and next to the weights in a directory."""
    saved, losses = trained("Adam")
    directory = place / "checkpoint"
    directory.mkdir()
    states = {number: {"a": state["exp_avg"], "b": state["exp_avg_sq"], "step": state["step"]}
              for number, state in saved["optimizer"]["state"].items()}  # fmt: skip
    torch.save({"s": states}, directory / "optimizer.pt")
    torch.save(saved["model"], directory / "model.pt")
    for source in (directory / "optimizer.pt", directory):
        version = stored_as(store, source, "coarse")
        assert version.fidelity == "coarse"
        out = place / f"out{version.number}"
        version.checkout(out)
        after = loaded(out / "optimizer.pt" if source.is_dir() else out)
        for path, tensor in tensors_of({"s": states}):
            assert zeroed(tensor, after[path]) == 0
    state = clone(saved)
    for number, moments in state["optimizer"]["state"].items():
        moments["exp_avg"], moments["exp_avg_sq"] = (after[f"s/[{number}]/{name}"] for name in "ab")
    again = resumed("Adam", state, flat({"model": loaded(out / "model.pt")}))
    assert again == pytest.approx(losses, rel=0.25, abs=0.02)


@pytest.mark.parametrize(
    ("mean", "squares"),
    [
        (("{}.weight",), ("{}.weight_sq",)),
        (("{}", "weight"), ("{}", "sq")),
        (("optimizer", "momentum", "{}", "mean"), ("optimizer", "momentum", "{}", "sq")),
        (("opt_state", "state", "{}", "m", "0"), ("opt_state", "state", "{}", "m", "1")),
        (("optimizer", "state", "{}", "v", "0"), ("optimizer", "state", "{}", "v", "1")),
    ],
)
def test_differences_of_a_mean_square_and_a_squared_mean_stay_positive(
    store: ckstore.Store, mean: tuple[str, ...], squares: tuple[str, ...]
) -> None:
    """Their roots are taken, whatever the two have in common in their names."""

    def named(names: tuple[str, ...], layer: int) -> Key:
        return tuple(name.format(layer) for name in names)

    tensors: Tensors = {}
    for layer in range(3):
        means = draw(300, 300, seed=layer, scale=0.02) * torch.exp2(2 * draw(300, 1, seed=layer))
        tensors[named(mean, layer)] = means
        tensors[named(squares, layer)] = means.square() * (1.001 + 0.1 * draw(300, 300, seed=layer + 9).abs())
    version = stored_as(store, nested(tensors), "coarse")
    back = flat(version.state_dict())
    for layer in range(3):
        first, second = back[named(mean, layer)].double(), back[named(squares, layer)].double()
        assert (second >= first.square()).all()


@pytest.mark.parametrize("name", ["momentum_buffer", "exp_avg", "mu"])
def test_steady_positive_momenta_do_not_cost_their_neighbours(store: ckstore.Store, name: str) -> None:
    """SGD with weight decay has them for the gains of norms; the others are as small as without them."""
    others = {number: {name: draw(64, 200, seed=number, scale=1e-4)} for number in range(4)}
    steady = {number: {name: 4e-3 + draw(100, seed=number, scale=1e-3).abs()} for number in range(4, 8)}
    version = stored_as(store, {"optimizer": {"state": others | steady}}, "coarse")
    assert version.stored_bytes < 4 * 64 * 200 * 4 / 8
    for number in steady:
        after = wide(version[f"optimizer/state/[{number}]/{name}"].torch())
        assert np.abs(after / wide(steady[number][name]) - 1).max() <= 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("octaves", [0.1, 4, 9, 11, 30])
@pytest.mark.parametrize("level", [-3, -17, -40, -125])
def test_no_small_positive_momentum_becomes_0(
    store: ckstore.Store, dtype: torch.dtype, octaves: float, level: float
) -> None:
    """Steady or not, next to larger ones in a bundle, and next to the smallest floats."""
    values = torch.exp2(level + (torch.arange(90) / 89 - 1) * octaves).to(dtype)
    large = draw(40, 90)
    state = {0: {"momentum_buffer": large.to(dtype)}, 1: {"momentum_buffer": values}, 2: {"momentum_buffer": -values}}
    version = stored_as(store, {"optimizer": {"state": state}}, "coarse")
    assert zeroed(values, version["optimizer/state/[1]/momentum_buffer"].torch()) == 0


def test_signs_and_sizes_of_unknown_states_stay(store: ckstore.Store) -> None:
    state = draw(300, 256, scale=1e-5)
    version = stored_as(store, {"optimizer": {"vars": {3: state}}}, "coarse")
    after = wide(version["optimizer/vars/[3]"].torch())
    assert np.abs(after / wide(state) - 1).max() < 0.05
    assert version.stored_bytes < state.nbytes / 2


@pytest.mark.parametrize("seed", range(3))
def test_renamed_real_checkpoints_lose_no_positive_value(store: ckstore.Store, shared_data: Path, seed: int) -> None:
    for source in ("willmore_pinn/checkpoint_epoch_70.pt", "opt_lora/checkpoint-3000/optimizer.pt"):
        tensors = flat(torch.load(shared_data / source, weights_only=True, map_location="cpu"))
        names = renamed(tensors, seed)
        version = stored_as(store, nested({names[path]: tensors[path] for path in names}), "coarse")
        assert version.fidelity == "coarse"
        back = flat(version.state_dict())
        assert sum(zeroed(tensor, back[names[path]]) for path, tensor in tensors.items() if "state" in path) == 0


def test_exact_versions_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles matter to coarse versions alone, and judging them reads values."""
    monkeypatch.setattr(value_roles, "_Judgement", None)
    with ckstore.init(tmp_path / "store") as store:
        for step in range(2):
            store.ingest({"state": {"sum": torch.full((300, 300), 1.0 + step)}}, run="r", step=step, hot=0)
        with pytest.raises(TypeError):
            store.ingest({"state": {"sum": torch.ones(300, 300)}}, run="r", step=2, policy="coarse", hot=0)
