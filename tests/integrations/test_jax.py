"""The integration of JAX, in a process of its own: other tests fork theirs, which JAX's threads are not made for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.forked import run_forked

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None or importlib.util.find_spec("flax") is None,
    reason="jax and flax are not installed: `pip install --group frameworks`",
)

FLAX = """
    import jax, jax.numpy as jnp, optax
    import flax.linen as nn
    from flax import nnx
    from flax.training.train_state import TrainState
    import ckstore
    from ckstore.integrations.jax import load, save

    def same(one, other):
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return jax.tree.structure(one) == jax.tree.structure(other) and all(jnp.all(a == b) for a, b in leaves)

    def made(seed):
        params = model.init(jax.random.key(seed), jnp.ones((1, 4)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    model = nn.Dense(3)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = made(0)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
    network = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with ckstore.init("store") as store:
        save(store, state, run="linen", step=int(state.step))
        assert same(load(store, "linen@1", like=made(1)), state)
        save(store, nnx.state(network), run="nnx", step=1)
        other = nnx.Linear(4, 3, rngs=nnx.Rngs(1))
        nnx.update(other, load(store, "nnx@1", like=nnx.state(other)))
        assert (other.kernel[...] == network.kernel[...]).all()
    """

WITHOUT_TORCH = """
    import sys
    sys.modules["torch"] = None
    import jax.numpy as jnp
    import ckstore
    from ckstore.integrations.jax import load, save
    with ckstore.init("store") as store:
        save(store, {"w": jnp.ones(3, jnp.bfloat16)}, run="flax", step=1)
        assert (load(store, "flax@1", like={"w": jnp.zeros(3, jnp.bfloat16)})["w"] == 1).all()
    """

#: Compiling takes longer than computing.
FAST = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.long
def test_states_of_flax_come_back(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(FLAX))
    [(code, printed)] = run_forked("jax", Path("program.py"), FAST, cwd=tmp_path)
    assert code == 0, printed


def alone(arguments: list[str], place: Path) -> str:
    """Run Python with nothing imported; return its output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=place, env={**os.environ, "PYTHONPATH": str(REPOSITORY), **FAST},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.long
def test_torch_is_not_needed(tmp_path: Path) -> None:
    alone(["-c", textwrap.dedent(WITHOUT_TORCH)], tmp_path)


@pytest.mark.long
def test_trees_come_back() -> None:
    checks = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integrations/jax_checks.py"]
    assert " passed" in alone(checks, REPOSITORY)
