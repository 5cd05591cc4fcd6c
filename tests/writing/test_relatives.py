"""Bytes of versions whose tensors moved, grew or became parts of others: stored against their former selves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore

pytestmark = pytest.mark.encoded

GENERATOR = np.random.default_rng(7)
State = dict[Any, Any]


def floats(*shape: int) -> Any:
    return (0.02 * GENERATOR.standard_normal(shape)).astype(np.float32)


def trained(state: Any) -> Any:
    """Return a state after some steps, with the names of before."""
    if isinstance(state, dict):
        return {key: trained(value) for key, value in state.items()}
    return state + (1e-5 * GENERATOR.standard_normal(state.shape)).astype(np.float32)


def grown(state: Any, rows: int) -> Any:
    if isinstance(state, dict):
        return {key: grown(value, rows) for key, value in state.items()}
    return np.concatenate([state, floats(rows, *state.shape[1:])])


def stored(place: Path, states: list[State], **options: Any) -> list[int]:
    """Return the bytes of each version of a run; every version is restored."""
    with ckstore.init(place) as store:
        for step, state in enumerate(states):
            store.ingest(state, run="r", step=step, **options)
        for step, state in enumerate(states):
            for path, value in leaves(state):
                assert np.array_equal(store[f"r@{step}"][path][...], value)
        return [version.stored_bytes for version in store.run("r")]


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(state, dict):
        yield path, state
        return
    for key, value in state.items():
        name = f"[{key}]" if isinstance(key, int) else key
        yield from leaves(value, f"{path}/{name}" if path else name)


LARGE = {f"l{number}.weight": floats(300, 300) for number in range(2)}
SMALL = {
    f"l{number}.{kind}": floats(*shape)
    for number in range(3)
    for kind, shape in (("weight", (90, 90)), ("bias", (90,)))
}
WRAPPERS = ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod."]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("state", [LARGE, SMALL], ids=["large", "small"])
def test_a_wrapped_model_is_stored_against_the_plain_one(tmp_path: Path, state: State, wrapper: str) -> None:
    after = trained(state)
    _, same = stored(tmp_path / "same", [{"model": state}, {"model": after}])
    wrapped = {"model": {wrapper + name: value for name, value in after.items()}}
    last = trained(wrapped)
    _, moved, again, back = stored(
        tmp_path / "moved",
        [{"model": state}, wrapped, last, {"model": dict(zip(state, last["model"].values(), strict=True))}],
    )
    assert moved < same + 500
    assert again < 1.1 * same
    assert back < 1000


def test_wrapping_equal_values_takes_no_bytes_of_theirs(tmp_path: Path) -> None:
    for name, state in ("large", LARGE), ("small", SMALL):
        _, moved = stored(tmp_path / name, [state, {f"module.{path}": value for path, value in state.items()}])
        assert moved < 1500


def test_another_prefix_is_found_by_suffix_and_shape(tmp_path: Path) -> None:
    before = {f"transformer.h.{number}.mlp.weight": floats(300, 300) for number in range(3)}
    after = {f"backbone.layers.{number}.mlp.weight": value for number, value in enumerate(trained(before).values())}
    _, same = stored(tmp_path / "same", [before, dict(zip(before, after.values(), strict=True))])
    _, moved = stored(tmp_path / "moved", [before, after])
    assert moved < same + 500


def vocabulary(rows: int, width: int) -> State:
    moments = {number: {"exp_avg": floats(rows, width), "exp_avg_sq": floats(rows, width) ** 2} for number in range(2)}
    model = {"emb.weight": floats(rows, width), "head.weight": floats(rows, width)}
    return {"model": model, "optimizer": {"state": moments}}


def _with_rows(state: Any, larger: Any) -> Any:
    """Return a state with the rows that another one has in addition."""
    if isinstance(state, dict):
        return {key: _with_rows(value, larger[key]) for key, value in state.items()}
    return np.concatenate([state, larger[len(state) :]])


@pytest.mark.parametrize(("rows", "width", "more"), [(1000, 16, 10), (3000, 32, 100)])
def test_a_growing_vocabulary_stores_its_old_rows_as_deltas(tmp_path: Path, rows: int, width: int, more: int) -> None:
    state = vocabulary(rows, width)
    after = trained(state)
    _, same, same_again = stored(tmp_path / "same", [state, after, last := trained(after)])
    larger = grown(after, more)
    again = _with_rows(last, larger)
    _, moved, next_, twice = stored(tmp_path / "moved", [state, larger, again, grown(again, more)])
    added = 6 * more * width * 4
    assert moved < same + added + 1500
    assert next_ < same_again + added + 1500
    assert twice < 2 * added + 2500


def table_of_adagrad(rows: int, versions: int) -> Iterator[tuple[State, int]]:
    """Yield states of a table with Adagrad's sums, and the bytes of touched and new rows: 2 and 0.5 % of it."""
    table, sums = floats(rows, 32), np.abs(floats(rows, 32))
    yield {"emb.weight": table.copy(), "state": {"sum": sums.copy()}}, 0
    for _ in range(versions):
        touched, new = GENERATOR.choice(len(table), len(table) // 50, replace=False), len(table) // 200
        gradient = floats(len(touched), 32)
        sums[touched] += gradient**2
        table[touched] -= 0.05 * gradient / np.sqrt(sums[touched])
        table, sums = np.concatenate([table, floats(new, 32)]), np.concatenate([sums, np.zeros((new, 32), np.float32)])
        yield {"emb.weight": table.copy(), "state": {"sum": sums.copy()}}, (len(touched) + new) * 64 * 4


def test_rows_of_a_growing_table_cost_what_changed(tmp_path: Path) -> None:
    """Run with CKSTORE_ROWS=1000000 and `-s` for the figures of docs/decisions.md."""
    rows = int(os.environ.get("CKSTORE_ROWS", "40_000"))
    taken = changed = 0
    seconds = nbytes = 0.0
    with ckstore.init(tmp_path / "store") as store:
        for step, (state, more) in enumerate(table_of_adagrad(rows, 5)):
            begin = time.process_time()
            row = store.ingest(state, run="r", step=step, hot=0).version
            if more:
                seconds += time.process_time() - begin
                nbytes += sum(value.nbytes for _, value in leaves(state))
                taken, changed = taken + row.stored_bytes, changed + more
            for path, value in leaves(state):
                assert np.array_equal(store[f"r@{step}"][path][...], value)
    print(f"\n{rows:,} rows: {taken / changed:.3f} of the touched and new rows, {1e9 * seconds / nbytes:.2f} CPU s/GB")
    assert taken < 1.1 * changed


def test_lora_of_a_higher_rank_keeps_its_first_rows(tmp_path: Path) -> None:
    state = {f"l{number}.lora_A": floats(8, 4096) for number in range(3)}
    after = trained(state)
    _, same = stored(tmp_path / "same", [state, after])
    _, moved = stored(tmp_path / "moved", [state, grown(after, 8)])
    full, *_ = stored(tmp_path / "new", [{name: floats(8, 4096) for name in state}])
    assert moved < 1.02 * (same + full)


@pytest.mark.parametrize("width", [64, 256])
def test_fused_and_stacked_tensors_take_no_bytes(tmp_path: Path, width: int) -> None:
    parts = {f"h.{number}.attn.{part}_proj.weight": floats(width, width) for number in range(2) for part in "kqv"}
    fused = {
        f"h.{number}.attn.qkv_proj.weight": np.concatenate(
            [parts[f"h.{number}.attn.{part}_proj.weight"] for part in "qkv"]
        )
        for number in range(2)
    }
    assert stored(tmp_path / "fused", [parts, fused])[1] < 1000
    experts = {f"experts.{number}.up": floats(width, width) for number in range(4)}
    assert stored(tmp_path / "stacked", [experts, {"experts.up": np.stack([*experts.values()])}])[1] < 1000


def test_parts_of_a_fused_tensor_are_stored_in_full_once(tmp_path: Path) -> None:
    """So are fewer rows of a table: a base has as many elements."""
    parts = {f"h.0.attn.{part}_proj.weight": floats(256, 256) for part in "qkv"}
    fused = {"h.0.attn.qkv_proj.weight": np.concatenate([*parts.values()])}
    sizes = stored(tmp_path / "parts", [fused, parts, trained(parts), fused])
    assert 0.98 * sizes[0] < sizes[1] < 1.01 * sizes[0] + 1000
    assert sizes[2] < 0.7 * sizes[0]
    assert sizes[3] < 1000
    table = {"emb.weight": floats(3000, 32)}
    less = stored(tmp_path / "rows", [table, {"emb.weight": table["emb.weight"][:2900]}])
    assert 0.9 * less[0] < less[1] < less[0] + 500


def test_an_index_that_moves_by_a_new_group_is_followed(tmp_path: Path) -> None:
    shapes = [(100, 100), (30, 40), (500,), (200, 100)]
    state = {
        number: {"exp_avg": floats(*shape), "exp_avg_sq": floats(*shape) ** 2} for number, shape in enumerate(shapes)
    }
    new = {"exp_avg": floats(50, 20), "exp_avg_sq": floats(50, 20) ** 2}
    moved = {0: new} | {number + 1: item for number, item in state.items()}
    sizes = stored(tmp_path / "store", [{"optimizer": {"state": state}}, {"optimizer": {"state": moved}}])
    assert sizes[1] < 50 * 20 * 8 + 1500


def test_the_best_weights_next_to_the_last_ones_take_no_bytes(tmp_path: Path) -> None:
    """They were the last ones of a former version, or are those of the same version."""
    last = [LARGE, trained(LARGE), trained(LARGE)]
    alone = stored(tmp_path / "alone", [{"last": item} for item in last])
    both = stored(
        tmp_path / "both", [{"last": item, "best": last[best]} for item, best in zip(last, (0, 1, 1), strict=True)]
    )
    assert all(more < less + 1500 for more, less in zip(both, alone, strict=True))


def test_an_average_is_stored_against_its_former_self(tmp_path: Path) -> None:
    states: list[State] = [{"model": LARGE, "ema": {name: value.copy() for name, value in LARGE.items()}}]
    for _ in range(3):
        model = trained(states[-1]["model"])
        ema = {name: value + np.float32(0.01) * (model[name] - value) for name, value in states[-1]["ema"].items()}
        states.append({"model": model, "ema": ema})
    sizes = stored(tmp_path / "store", [{"ema": state["ema"]} for state in states])
    assert max(sizes[1:]) < 0.6 * sizes[0]
    assert sum(stored(tmp_path / "both", states)) < 1.01 * sum(
        [*sizes[1:], *stored(tmp_path / "model", [{"model": state["model"]} for state in states])]
    )


def test_an_automatic_parent_may_have_other_names(tmp_path: Path) -> None:
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(LARGE, run="base", step=0)
        store.ingest({name: floats(300, 300) for name in LARGE}, run="other", step=0)
        tuned = {f"module.{name}": value for name, value in trained(LARGE).items()}
        row = store.ingest(tuned, run="tuned", step=0, parent="auto").version
        assert row.parent == 1
        assert store["tuned@0"].stored_bytes < 0.7 * store["base@0"].stored_bytes
        for path, value in tuned.items():
            assert np.array_equal(store["tuned@0"][path][...], value)


def test_a_hot_version_is_cut_like_its_parent(tmp_path: Path) -> None:
    state = vocabulary(1000, 16)
    after = grown(trained(state), 10)
    encoded = stored(tmp_path / "encoded", [state, after])
    with ckstore.init(tmp_path / "hot") as store:
        for step, item in enumerate([state, after]):
            store.ingest(item, run="r", step=step, hot=9)
        store.encode("r@1")
        assert store["r@1"].stored_bytes < encoded[1] + 1000


def test_unrelated_tensors_are_stored_as_without_a_parent(tmp_path: Path) -> None:
    one, other = ({f"{name}.weight": floats(*shape) for shape in [(300, 300), (90, 90)]} for name in ("a", "b"))
    alone, after = stored(tmp_path / "one", [other])[0], stored(tmp_path / "two", [one, other])[1]
    assert after < alone + 200


@pytest.mark.parametrize("rows", [1000, 2040])
def test_coarse_versions_are_cut_like_their_parents(tmp_path: Path, rows: int) -> None:
    states = [vocabulary(rows, 32)]
    for more in (20, 0, 20, 3000):
        wrapper = "module." if more else ""
        after = grown(trained(states[-1]), more) if more else trained(states[-1])
        after["model"] = {wrapper + name.removeprefix("module."): value for name, value in after["model"].items()}
        states.append(after)
    with ckstore.init(tmp_path / "store") as store:
        for step, state in enumerate(states):
            store.ingest(state, run="r", step=step, policy=ckstore.Policy("coarse"))
            store.ingest(state, run="exact", step=step)
        store.thin(["exact@1", "exact@3"])
        assert not store.verify().problems
        for step in (0, 2, 4):
            for path, value in leaves(states[step]):
                assert np.array_equal(store[f"exact@{step}"][path][...], value)
        sizes = [version.stored_bytes for version in store.run("r")]
    assert max(sizes[1:4]) < 0.75 * sizes[0]


@pytest.mark.parametrize("rows", [(1000, 3000), (2300, 2060, 2300, 2320, 2060)])
def test_parts_of_a_tensor_that_grows_and_shrinks_come_back(tmp_path: Path, rows: tuple[int, ...]) -> None:
    """Above 2^22 elements a tensor has several parts, and the parent may have some of them."""
    values = GENERATOR.integers(-99, 99, (3000, 4096)).astype(np.int8)
    stored(tmp_path / "store", [{"emb": np.ascontiguousarray(values[:count])} for count in rows])


@pytest.mark.parametrize("state", [{"weight": floats(10, 4)}, {"bias": floats(5)}])
def test_a_name_of_one_word_may_meet_one_of_two(tmp_path: Path, state: State) -> None:
    [name] = state
    larger = {"head": {name: grown(state[name], 2)}}
    stored(tmp_path / "store", [state, larger, state])
    stored(tmp_path / "other", [larger, state])
