"""States of optimisers by their place and name, as torch, optax, Keras, bitsandbytes and others write them."""

from __future__ import annotations

import time

import pytest

from ckstore.formats.layout import Path
from ckstore.objects.roles import role_of, state_of, tree_length, trees_of


@pytest.mark.parametrize(
    ("path", "role"),
    [
        (("optimizer", "state", 0, "exp_avg"), "first"),
        (("optimizer_states", 0, "state", 3, "exp_avg_sq"), "second"),
        (("state", 0, "max_exp_avg_sq"), "second"),
        (("exp_avg_sq",), "second"),
        (("state", "layer.v.weight", "sum"), "second"),  # Adagrad
        (("optimizer", "state", 0, "exp_inf"), "second"),  # Adamax
        (("optimizer", "state", 0, "acc_delta"), "second"),  # Adadelta
        (("optimizer", "state", 0, "row_var"), "other"),  # Adafactor
        (("optimizer", "state", 0, "variance"), "second"),
        (("optimizer", "state", 0, "step_size"), "second"),  # Rprop
        (("optimizer", "state", 0, "old_dirs", 3), "other"),  # L-BFGS
        (("optimizer", "state", 0, "ax"), "weight"),  # ASGD
        (("optimizer", "state", 0, "grad_avg"), "other"),  # RMSprop
        (("opt_state", 0, "mu", "dense", "kernel"), "first"),  # optax
        (("opt_state", 0, "nu", "attn", "v", "kernel"), "second"),
        (("opt_state", 1, "inner_state", "trace", "norm", "scale"), "first"),
        (("opt_state", 0, "nu", "mu"), "second"),
        (("opt_state", 0, "sum_of_squares", "w"), "second"),
        (("opt_state", 0, "v_row", "w"), "other"),
        (("opt_state.0.nu.dense.kernel",), "second"),
        (("optimizer", "vars", 3), "state"),  # Keras
        (("optimizer", "velocity", "dense", "kernel"), "second"),
        (("optimizer", "state", 0, "state1"), "first"),  # bitsandbytes
        (("optimizer", "state", 0, "state2"), "second"),
        (("optimizer", "state", 0, "absmax2"), "other"),
        (("optimizer", "state", 0, "qmap1"), "other"),
        (("optimizer", "state", 0, "hessian"), "second"),  # Sophia
        (("optimizer", "state", 0, "GG", 1), "other"),  # SOAP
        (("optimizer", "state", 0, "Q", 0), "other"),
        (("optimizer", "state", 0, "z"), "weight"),  # schedule-free
        (("optimizer", "state", 0, "vmean"), "second"),  # Adam-mini
        (("optimizer_D", "state", 0, "m"), "first"),
        (("optimizer", "state", 0, "unheard_of"), "state"),
        (("state", 0, "unheard_of"), "state"),
        (("params", "dense", "mu"), ""),
        (("model", "h.0.attn.v"), ""),
        (("model", "opt.decoder.weight"), ""),
        (("state", "layer.weight"), ""),
        (("state", 0, "layer.weight"), ""),
        (("model", "optimal.weight"), ""),
        (("sum",), ""),
        ((), ""),
        ((3,), ""),
    ],
    ids=str,
)
def test_states_have_roles(path: Path, role: str) -> None:
    assert role_of(path) == role


def test_states_of_one_parameter_share_it() -> None:
    paths: list[tuple[Path, Path]] = [
        (("optimizer", "state", 0, "exp_avg"), ("optimizer", "state", 0, "exp_avg_sq")),
        (("opt_state", 0, "mu", "dense", "mu"), ("opt_state", 0, "nu", "dense", "mu")),
        (("opt_state.0.mu.dense",), ("opt_state.0.nu.dense",)),
    ]
    for first, second in paths:
        one, other = state_of(first), state_of(second)
        assert one is not None
        assert other is not None
        assert (one.role, other.role, one.parameter) == ("first", "second", other.parameter)


def test_a_tree_with_a_counter_and_two_alike_holds_states() -> None:
    moments: list[tuple[Path, int]] = [(("x", 0, name, "dense"), 12) for name in ("a", "b")]
    assert trees_of([*moments, (("x", 0, "count"), 1)]) == {("x", 0)}
    assert tree_length(("x", 0, "a", "dense"), {("x", 0)}) == 2
    assert tree_length(("x", 1, "a", "dense"), {("x", 0)}) == -1
    assert role_of(("x", 0, "a", "dense")) == ""
    state = state_of(("x", 0, "a", "dense"), 2)
    assert state is not None
    assert state.role == "state"
    assert trees_of(moments) == trees_of([(("x", 0, "a"), 12), (("x", 0, "count"), 1)]) == set()
    model: list[tuple[Path, int]] = [(("m", f"{name}.weight"), 12) for name in "ab"]
    assert trees_of([*model, (("m", "count"), 1)]) == set()


def test_a_role_takes_a_tenth_of_what_a_tensor_may() -> None:
    paths: list[Path] = [("optimizer", "state", number, "unheard_of") for number in range(2000)]
    start = time.process_time()
    for path in paths:
        state_of.__wrapped__(path)
    assert (time.process_time() - start) / len(paths) < 50e-6
