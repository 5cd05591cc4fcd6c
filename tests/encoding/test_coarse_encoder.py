"""Which objects of a coarse version become coarse, on which lattices, and the error bounds that users may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckstore
from ckstore.policy import Policy
from tests.checkpoints import draw, scratch
from tests.coarse_checks import check_deviations, kinds_of, same_bits, stored, values_of, wide

SHAPE = (300, 256)


@pytest.fixture
def store() -> Iterator[ckstore.Store]:
    with scratch() as path, ckstore.init(path / "store") as opened:
        yield opened


def with_one(value: float) -> torch.Tensor:
    tensor = draw(*SHAPE)
    tensor[17, 3] = value
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        with_one(float("nan")),
        with_one(float("-inf")),
        torch.arange(70_000),
        torch.arange(70_000) % 3 == 0,
        torch.complex(draw(*SHAPE), draw(*SHAPE, seed=1)),
        draw(*SHAPE).to(torch.float8_e4m3fn),
        draw(*SHAPE).double() * 1e300,
        draw(70),
        draw(700, 1),
        torch.zeros(3, 0),
    ],
    ids=["nan", "inf", "integers", "bool", "complex", "float8", "huge", "bias", "norm", "empty"],
)
def test_unsuitable_tensors_stay_exact(store: ckstore.Store, tensor: torch.Tensor) -> None:
    weight = draw(*SHAPE, seed=9)
    version = stored(store, {"t": tensor, "weight": weight})
    assert version.fidelity == version.fidelity == "coarse"
    assert version.deviations().keys() == {"weight"}
    check_deviations(version, {"t": tensor, "weight": weight}, values_of(version))


def test_a_version_without_coarse_tensors_is_exact(store: ckstore.Store) -> None:
    version = stored(store, {"bias": draw(70), "count": torch.arange(70_000)})
    assert (version.fidelity, version.fidelity) == ("exact", "exact")
    assert version.deviations() == {}
    assert version._stored.document.coarse is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["weight", "exp_avg", "exp_avg_sq"])
def test_weights_and_moments_of_every_float_record_their_loss(
    store: ckstore.Store, dtype: torch.dtype, name: str
) -> None:
    for step in range(3):
        tensor = draw(*SHAPE, seed=step) * torch.exp2(draw(SHAPE[0], 1, seed=7) * 2) * 1e-2
        tensor = (tensor * tensor if name == "exp_avg_sq" else tensor).to(dtype)
        version = stored(store, {"state": {0: {name: tensor}}}, step=step)
        path = f"state/[0]/{name}"
        check_deviations(version, {path: tensor}, values_of(version))
        if path in version.deviations() and name == "exp_avg_sq":
            assert (wide(values_of(version)[path]) >= 0).all()
            assert kinds_of(version) == {path: "rounded"}
        elif path in version.deviations():
            assert kinds_of(version) == {path: "linear"}
    assert store.verify().problems == []


@pytest.mark.parametrize("name", ["weight", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_stay_zeros_and_cost_nothing(store: ckstore.Store, name: str, dtype: torch.dtype) -> None:
    tensor = torch.zeros(*SHAPE, dtype=dtype)
    for step in range(2):
        version = stored(store, {name: tensor}, step=step)
        assert same_bits(version[name].torch(), tensor)
        assert version.stored_bytes < 6000
    assert all(not any(said) for said in version.deviations().values())
    # From zeros on, training moves: the lattice of nothing must not hold it.
    moved = draw(*SHAPE).to(dtype).abs()
    version = stored(store, {name: moved}, step=2)
    said = version.deviations()
    assert name not in said or said[name].rms < 0.7 * said[name].size or name != "weight"


@pytest.mark.parametrize("name", ["weight", "exp_avg"])
def test_an_outlier_is_not_cut_off(store: ckstore.Store, name: str) -> None:
    """Relative to it all others are tiny; its integer must not be clamped."""
    tensor = draw(*SHAPE, scale=1e-12)
    tensor[5, 5] = 1e20
    version = stored(store, {name: tensor})
    assert abs(float(version[name].torch()[5, 5]) / float(tensor[5, 5]) - 1) < 0.01
    check_deviations(version, {name: tensor}, values_of(version))


def test_columns_that_matter_most_do_not_cut_outliers_off(store: ckstore.Store) -> None:
    weight = draw(*SHAPE, scale=1e-3)
    weight[5, 5] = 3e4
    second = torch.full(SHAPE, 1e-12)
    second[:, 5] = 1.0
    state = {"model": {"w": weight}, "optimizer": {"state": {0: {"exp_avg_sq": second}}}}
    version = stored(store, state)
    assert abs(float(version["model/w"].torch()[5, 5]) / 3e4 - 1) < 0.01


def trained(agreements: list[float]) -> dict[str, Any]:
    """Return a state of weights whose gradients are noise and a mean, which is `agreements` times as large."""
    tree: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for index, agreement in enumerate(agreements):
        mean = agreement * draw(*SHAPE, seed=1000 + index)
        first, second = torch.zeros(SHAPE), torch.zeros(SHAPE)
        for step in range(50):
            gradient = mean + draw(*SHAPE, seed=100 * index + step)
            first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient.square()
        tree["model"][f"w{index}"] = draw(*SHAPE, seed=2000 + index)
        tree["optimizer"]["state"][index] = {"exp_avg": first, "exp_avg_sq": second}
    return tree


def moments_of(store: ckstore.Store, tree: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The optimiser's state of a coarse version that has a parent."""
    for step in range(2):
        version = stored(store, tree, run="moments", step=step)
    return list(version.state_dict()["optimizer"]["state"].values())


def test_moments_keep_the_size_of_updates(store: ckstore.Store) -> None:
    """Nearly all first moments become 0, and the others make up for them."""
    tree = trained([0.0])
    (found,), (exact,) = moments_of(store, tree), tree["optimizer"]["state"].values()
    steps = [exact["exp_avg"] / moment["exp_avg_sq"].sqrt() for moment in (found, exact)]
    assert 0.97 < float(steps[0].norm() / steps[1].norm()) < 1.03
    assert torch.count_nonzero(found["exp_avg"]) < 0.1 * found["exp_avg"].numel()
    assert 0.5 < float((found["exp_avg"] * exact["exp_avg"]).sum() / exact["exp_avg"].square().sum()) < 1.42


@pytest.mark.parametrize("filled", [1.0, 1e-3])
def test_first_moments_are_finer_where_gradients_agree(store: ckstore.Store, filled: float) -> None:
    """Second moments of a young run are too small by the same factor everywhere, which must not look like agreement."""
    tree = trained([1.0, 0.0, 0.0, 0.0])
    for moments in tree["optimizer"]["state"].values():
        moments["exp_avg_sq"] *= filled
    pairs = zip(moments_of(store, tree), tree["optimizer"]["state"].values(), strict=True)
    errors = [float((found["exp_avg"] - exact["exp_avg"]).norm() / exact["exp_avg"].norm()) for found, exact in pairs]
    assert errors[0] < 0.5
    assert min(errors[1:]) > 0.9


def test_first_moments_in_float16_of_any_spread_can_be_read(store: ckstore.Store) -> None:
    tensor = torch.full((256, 256), 2.0**-24)
    tensor[0], tensor[:, 0] = 2.0**15, 2.0**15
    version = stored(store, {"exp_avg": tensor.half()})
    check_deviations(version, {"exp_avg": tensor.half()}, values_of(version))


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_masks_of_the_largest_number_stay_finite(store: ckstore.Store, fill: float) -> None:
    mask = torch.triu(torch.full((300, 300), fill), 1)
    version = stored(store, {"mask": mask})
    assert torch.isfinite(version["mask"].torch()).all()
    check_deviations(version, {"mask": mask}, values_of(version))


def test_subnormal_weights_decode_to_numbers(store: ckstore.Store) -> None:
    weight = draw(*SHAPE, scale=1e-39)
    version = stored(store, {"w": weight})
    assert float((version["w"].torch() - weight).abs().max()) <= 2.0**-126


def small_net(step: int) -> dict[str, Any]:
    """All weights are small: if small ones were kept exactly, all of the version would be."""
    layers = {f"conv{index}.weight": draw(32, 32, 3, 3, seed=index) for index in range(4)}
    layers |= {f"conv{index}.bias": draw(32, seed=10 + index) for index in range(4)}
    for index, tensor in enumerate(layers.values()):
        tensor += draw(*tensor.shape, seed=100 * step + index, scale=1e-2 * step)
    return {"model": layers}


def test_norms_and_biases_are_finer_than_weights(store: ckstore.Store) -> None:
    """Statistics and counters stay exact: training does not repair their errors."""
    model: dict[str, Any] = {"up.weight": draw(*SHAPE), "norm.weight": 1 + draw(3000, scale=0.1), "up.bias": draw(3000)}
    model |= {"tiny.bias": draw(640, scale=1e-4), "norm.running_var": draw(5000).square(), "count": torch.ones(1)}
    for step in range(3):
        tree = {"model": {name: tensor + draw(*tensor.shape, scale=0.01 * step) for name, tensor in model.items()}}
        tree["model"]["tiny.bias"] = model["tiny.bias"] * (1 + step)
        version = stored(store, tree, step=step)
        before = {f"model/{name}": tensor for name, tensor in tree["model"].items()}
        check_deviations(version, before, values_of(version))
        said = version.deviations()
        assert set(said) == {f"model/{name}" for name in ("up.weight", "norm.weight", "up.bias", "tiny.bias")}
        assert (
            max(said["model/norm.weight"].max_abs, said["model/up.bias"].max_abs) < said["model/up.weight"].max_abs / 4
        )
        assert said["model/tiny.bias"].relative < 0.03


def test_values_too_large_for_the_others_keep_norms_and_biases_exact(store: ckstore.Store) -> None:
    bias = draw(5000)
    bias[4000] = 1e9
    version = stored(store, {"up.weight": draw(*SHAPE), "up.bias": bias})
    assert set(version.deviations()) == {"up.weight"}


def test_small_weights_are_coarse_and_few_biases_exact(store: ckstore.Store) -> None:
    for step in range(3):
        tree = small_net(step)
        version = stored(store, tree, step=step)
        before = {f"model/{name}": tensor for name, tensor in tree["model"].items()}
        check_deviations(version, before, values_of(version))
        assert set(version.deviations()) == {path for path in before if path.endswith("weight")}
    assert version.stored_bytes < version.original_bytes / 4


def test_tensors_in_parts_are_coarse_part_by_part(store: ckstore.Store) -> None:
    """Most elements are one row over and over, so that this costs next to nothing."""
    row = draw(1, 4096)
    tensor = row.expand(1030, 4096) * torch.linspace(1, 2, 1030)[:, None]
    tensor[1029, 7] = float("nan")  # in the second part
    small = draw(*SHAPE)
    version = stored(store, {"large": tensor, "small": small})
    decoded = version["large"].torch()
    difference = (decoded.double() - tensor.double()).abs()[:1024]
    said = version.deviations()["large"]
    assert float(difference.max()) <= said.max_abs <= 1.001 * float(difference.max())
    assert same_bits(decoded[1024:], tensor[1024:])
    assert list(version._stored.document.coarse_units) == [0, 2]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.integers(-12, 4), st.integers(-7, 1), st.booleans(), st.booleans())
def test_no_element_is_off_by_more_than_the_bound(
    dtype: torch.dtype, seed: int, magnitude: int, tightness: int, relative: bool, spiky: bool
) -> None:
    scale = 10.0 ** (magnitude if dtype != torch.float16 else min(max(magnitude, -3), 1))
    with scratch() as path, ckstore.init(path / "store") as store:
        tensors = {name: draw(*SHAPE, seed=seed, scale=scale) for name in ("weight", "exp_avg")}
        tensors["bias"] = draw(50, seed=seed, scale=scale)
        for step in range(2):
            if spiky:
                tensors["weight"][step] *= 300
            tensors = {
                name: tensor + draw(*tensor.shape, seed=step, scale=scale / 9) for name, tensor in tensors.items()
            }
            given_ones = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            sizes = {name: float(np.sqrt(np.mean(wide(tensor) ** 2))) for name, tensor in given_ones.items()}
            bound = {"max_rel_error": 10.0**tightness} if relative else {"max_abs_error": scale * 10.0**tightness}
            version = stored(store, given_ones, step=step, policy=Policy("coarse", **bound))
            check_deviations(version, given_ones, values_of(version))
            for name, tensor in given_ones.items():
                allowed = 10.0**tightness * sizes[name] if relative else scale * 10.0**tightness
                off = np.abs(wide(version[name].torch()) - wide(tensor)).max()
                assert off <= allowed * (1 + 1e-12), name
            assert version._stored.document.coarse is None or version._stored.document.coarse.parameters == bound


def test_a_bound_is_used_up(store: ckstore.Store) -> None:
    """The error uses the tolerance up to a factor of two, as steps are powers of two."""
    weight = draw(*SHAPE)
    for bound in (1e-2, 3e-3):
        policy = Policy("coarse", max_abs_error=bound)
        said = stored(store, {"w": weight}, run=f"bound {bound}", policy=policy).deviations()["w"]
        assert bound / 2.01 <= said.max_abs <= bound


def test_the_tighter_of_two_bounds_counts(store: ckstore.Store) -> None:
    weight = draw(*SHAPE, scale=10.0)
    version = stored(store, {"w": weight}, policy=Policy("coarse", max_abs_error=1.0, max_rel_error=1e-3))
    assert version.deviations()["w"].max_abs <= 1e-2
    version = stored(store, {"w": weight}, run="b", policy=Policy("coarse", max_abs_error=1e-3, max_rel_error=1e-2))
    assert version.deviations()["w"].max_abs <= 1e-3


def test_a_relative_bound_is_of_the_whole_tensor_and_not_of_its_parts(store: ckstore.Store) -> None:
    """The second part's own values are a thousandth of the tensor's: it may be rounded to nothing."""
    tensor = draw(1, 4096).expand(1040, 4096).clone()
    tensor[1024:] *= 1e-3
    version = stored(store, {"w": tensor}, policy=Policy("coarse", max_rel_error=0.01))
    assert torch.count_nonzero(version["w"].torch()[1024:]) == 0
    # And where it is the first that is small, the bound is not looser for the second.
    tensor = tensor.flip(0).contiguous()
    size = float(wide(tensor[:]).std())
    version = stored(store, {"w": tensor}, run="b", policy=Policy("coarse", max_rel_error=0.01))
    assert version.deviations()["w"].max_abs <= 0.01 * size * 1.01


@pytest.mark.parametrize("bound", [5e-324, 1e-300, 1e300, 1.7e308])
def test_bounds_beyond_reason_are_kept_too(store: ckstore.Store, bound: float) -> None:
    weight = draw(*SHAPE)
    version = stored(store, {"w": weight}, policy=Policy("coarse", max_abs_error=bound))
    assert np.abs(wide(version["w"].torch()) - wide(weight)).max() <= bound
    assert version.fidelity == ("exact" if bound < 1 else "coarse")
