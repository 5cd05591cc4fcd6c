"""Trees of JAX come back bit for bit and on their devices; `test_jax.py` runs this."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckstore
from ckstore.errors import ConflictError, IntegrityError, NotFoundError, UsageError
from ckstore.integrations.jax import load, save
from tests.checkpoints import flip


class Name(Fraction):
    """A key that no other one equals."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


Moments = collections.namedtuple("Moments", ["count", "mu"])


@jax.tree_util.register_dataclass
@dataclass
class State:
    step: int
    params: Any


def tree(seed: int = 0) -> Any:
    key = jax.random.key(seed)
    return {
        "state": State(7 + seed, {"dense/0": {"kernel": jax.random.normal(key, (300, 200)), "bias": jnp.zeros(200)}}),
        "list": [jax.random.normal(key, (70_000,), jnp.bfloat16), (jnp.arange(3), 2.5, True, None)],
        "moments": Moments(jnp.int32(3), {1: np.arange(5.0), 2: np.float32(0.25)}),
        "rng": key, "keys": jax.random.split(key, 3), "empty": {}, "none": jnp.zeros((0, 3)),
        "float8": jnp.ones(3, jnp.float8_e4m3fn), "complex": jnp.ones(2, jnp.complex64),
    }  # fmt: skip


def bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        leaf = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        return "jax", str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), getattr(leaf, "dtype", None), np.asarray(leaf).tobytes()


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert list(map(bits, jax.tree.leaves(found))) == list(map(bits, jax.tree.leaves(expected)))


def test_a_tree_comes_back_as_it_was(store: ckstore.Store) -> None:
    save(store, tree(), run="flax", step=3, metrics={"loss": 0.5})
    assert store["flax@3"].metrics == {"loss": 0.5}
    assert_same(load(store, "flax@latest", like=tree(1)), tree())


def test_a_damaged_latest_tree_falls_back(store: ckstore.Store) -> None:
    for step in (1, 2):
        save(store, {"w": jax.random.normal(jax.random.key(step), (300, 200))}, run="flax", step=step)
    store.encode()
    first = load(store, "flax@1", like={"w": jnp.zeros((300, 200))})
    flip(store.place, store["flax@2"]._stored.row.pack, lambda size: size // 2)
    with ckstore.open(store.place, "r") as again:
        with pytest.warns(UserWarning, match="The training resumes from flax@1"):
            assert_same(load(again, "flax@latest", like={"w": jnp.zeros((300, 200))}), first)
        with pytest.raises(IntegrityError, match="before flax@2 is flax@1"):
            load(again, "flax@2", like={"w": jnp.zeros((300, 200))})


def test_shapes_alone_are_enough(store: ckstore.Store) -> None:
    params = tree()["state"].params
    save(store, {"params": params, "step": 3}, run="flax", step=3)
    assert_same(load(store, "flax@3", like={"params": jax.eval_shape(lambda: params)}), {"params": params})


def test_arrays_come_back_with_their_sharding(store: ckstore.Store) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(jnp.arange(8.0), sharding)
    save(store, {"a": array}, run="flax", step=1)
    assert load(store, "flax@1", like={"a": array})["a"].sharding == sharding


def test_a_step_may_have_become_an_array(store: ckstore.Store) -> None:
    """`TrainState.step` is a number before the first step, and an array of 32 bits after it."""
    save(store, {"step": jnp.int32(7), "rate": 0.1}, run="flax", step=7)
    assert_same(load(store, "flax@7", like={"step": 0, "rate": jnp.float32(0)}), {"step": 7, "rate": jnp.float32(0.1)})
    with pytest.raises(UsageError, match="step has dtype int32 and shape"):
        load(store, "flax@7", like={"step": 0.0})


@pytest.mark.parametrize(
    ("like", "hint"),
    [
        (np.zeros((2, 3)), r"w has dtype float32 and shape \[2, 3\] in the store, and float64 and \[2, 3\]"),
        (np.zeros((3, 2), np.float32), r"\[3, 2\] in `like`; give a tree like the saved one"),
        (0.0, r"and float64 and \[\] in `like`"),
    ],
    ids=["dtype", "shape", "number"],
)
def test_another_shape_or_dtype_is_refused(store: ckstore.Store, like: Any, hint: str) -> None:
    save(store, {"w": jnp.zeros((2, 3))}, run="flax", step=1)
    with pytest.raises(UsageError, match=hint):
        load(store, "flax@1", like={"w": like})


def test_missing_names_are_named(store: ckstore.Store) -> None:
    save(store, {"dense": {"kernel": jnp.zeros(3)}}, run="flax", step=1)
    with pytest.raises(NotFoundError, match="did you mean dense/kernel"):
        load(store, "flax@1", like={"dense": {"kernels": jnp.zeros(3)}})
    with pytest.raises(NotFoundError, match="flax@2"):
        load(store, "flax@2", like={})


@pytest.mark.parametrize(
    ("leaf", "hint"),
    [
        ({"a": object()}, "a is a object, not an array of numbers; leave it out"),
        ({"a": {"b": "text"}}, "a/b is a str, not an array of numbers"),
        ({"a": np.ones(2, jnp.int4)}, "The array at a has dtype int4"),
        (np.ones(3), "save it in a dictionary"),
        ({Fraction(1, 2): 1, Name("1/2"): 2}, "Two leaves have the path 1%2F2"),
    ],
    ids=["object", "text", "dtype", "lone", "twice"],
)
def test_unstorable_leaves_are_named(store: ckstore.Store, leaf: Any, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        save(store, leaf, run="flax", step=1)
    assert store._catalog.versions() == []


def test_existing_versions_are_replaced_on_demand_alone(store: ckstore.Store) -> None:
    save(store, tree(), run="flax", step=3)
    save(store, tree(), run="flax", step=3)
    with pytest.raises(ConflictError):
        save(store, tree(1), run="flax", step=3)
    save(store, tree(1), run="flax", step=3, replace=True)
    assert_same(load(store, "flax@3", like=tree()), tree(1))


def test_trees_of_one_step_keep_runs_of_their_own_and_a_refused_one_changes_nothing(store: ckstore.Store) -> None:
    trees = {run: tree(seed) for seed, run in enumerate(("flax", "flax/ema", "other"))}
    for run, found in trees.items():
        save(store, found, run=run, step=3)
    with pytest.raises(ConflictError):
        save(store, tree(5), run="flax", step=3)
    for run, found in trees.items():
        assert_same(load(store, f"{run}@3", like=tree(7)), found)


def test_a_training_that_loads_an_earlier_tree_goes_back_to_it(store: ckstore.Store) -> None:
    for step in (4, 8, 12):
        store.ingest({"w": np.full(3, step)}, run="flax", step=step)
    load(store, "flax@4", like={"w": np.zeros(3, int)})
    for step in (8, 10):
        save(store, {"w": np.full(3, -step)}, run="flax", step=step)
    rows = store._catalog.versions("flax")
    assert [(row.step, row.superseded) for row in rows] == [
        (4, False), (8, True), (12, True), (8, False), (10, False)
    ]  # fmt: skip
    assert [store[f"flax@{step}"].parent for step in (8, 10)] == [1, 4]


def test_reports_know_the_moments_of_optax(store: ckstore.Store) -> None:
    optax = pytest.importorskip("optax")
    params = {"dense": {"kernel": jnp.ones((4, 3)), "mu": jnp.ones(3)}}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.bfloat16))
    state = tx.update(params, tx.init(params), params)[1]
    save(store, {"params": params, "opt_state": state}, run="adam", step=1)
    table = store.run("adam").statistics(["m_over_sqrt_v"])
    assert sorted(table.where("role=weight").values("path")) == ["params/dense/kernel", "params/dense/mu"]
    found = table.where("role=second moment").values("m_over_sqrt_v")
    assert found == pytest.approx([0.1 / 0.001**0.5] * 2, rel=0.01)


@pytest.mark.parametrize(("kind", "is_known"), [("adam", True), ("adam", False), ("rmsprop", True)])
def test_trainings_resume_from_thinned_versions(store: ckstore.Store, kind: str, is_known: bool) -> None:
    optax = pytest.importorskip("optax")
    rate, options = (1e-4, {"centered": True}) if kind == "rmsprop" else (1e-3, {})
    tx = getattr(optax, kind)(rate, **options)
    sizes = (32, 272, 272, 1)
    pairs = itertools.pairwise(sizes)
    params = [jax.random.normal(jax.random.key(n), pair) / pair[0] ** 0.5 for n, pair in enumerate(pairs)]

    def loss_of(params: Any, step: int) -> Any:
        x = value = jax.random.normal(jax.random.key(step), (64, 32))
        for place, weight in enumerate(params):
            value = jnp.maximum(value @ weight, 0) if place < 2 else value @ weight
        return jnp.square(value[:, 0] - jnp.sin(x[:, :8].sum(1) / 2)).mean()

    @jax.jit
    def train(params: Any, state: Any, step: int) -> Any:
        gradients = jax.grad(loss_of)(params, step)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def trained(params: Any, state: Any, first: int, last: int) -> Any:
        for step in range(first, last):
            params, state = train(params, state, step)
        return params, state

    tree = trained(params, tx.init(params), 0, 150)
    keys = ("params", "opt_state") if is_known else ("x", "y")
    leaves, shape = jax.tree.flatten(tree[1])
    saved = dict(zip(keys, tree if is_known else (tree[0], leaves), strict=True))
    save(store, saved, run="r", step=1)
    store.encode("r")
    store.thin("r@1")
    assert store["r@1"].fidelity == "coarse"
    back = load(store, "r@1", like=saved)
    for steps in (0, 1, 10):
        state = back[keys[1]] if is_known else jax.tree.unflatten(shape, back[keys[1]])
        found, exact = (
            float(loss_of(trained(*start, 150, 150 + steps)[0], 999)) for start in ((back[keys[0]], state), tree)
        )
        assert found == pytest.approx(exact, rel=0.25, abs=0.02)
