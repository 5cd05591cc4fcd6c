"""Bytes of versions whose tensors moved, grew or became parts of others: stored against their former selves."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

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


def test_added_columns_cost_a_tensor_in_full_once(tmp_path: Path) -> None:
    """Run with `-s` for the figures of docs/decisions.md: LoRA's B, whose new columns are zeros, at a higher rank."""
    state = {f"l{number}.lora_B": floats(4096, 8) for number in range(3)}
    after = trained(state)
    _, same, again = stored(tmp_path / "same", [state, after, last := trained(after)])
    larger = [{name: np.pad(value, [(0, 0), (0, 8)]) for name, value in one.items()} for one in (after, last)]
    _, moved, next_ = stored(tmp_path / "moved", [state, *larger])
    [full] = stored(tmp_path / "alone", larger[:1])
    print(f"\ncolumns: {moved:,} in full {full:,}, without the move {same:,}")
    assert moved < full + 500
    assert next_ < 1.1 * again


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


def attention(width: int, parts: str = "kqv") -> State:
    """Return q, k and v of two layers, with moments under the names of the weights."""
    names = [f"h.{number}.attn.{part}_proj.weight" for number in range(2) for part in parts]
    return {
        "model": {name: floats(width, width) for name in names},
        "optimizer": {"state": {name: moments(width, width) for name in names}},
    }


def moments(*shape: int) -> State:
    return {"exp_avg": floats(*shape), "exp_avg_sq": floats(*shape) ** 2}


def joined(state: Any, join: Callable[[list[Any]], Any] = np.concatenate) -> Any:
    """Return a state of q, k and v, or of numbered tensors, with those of each layer in one."""
    if not isinstance(state, dict):
        return state
    groups: dict[Any, dict[str, Any]] = {}
    for name, value in state.items():
        whole = re.sub("[qkv]_proj", "qkv_proj", re.sub(r"experts\.\d+", "experts", str(name)))
        groups.setdefault(whole, {})[name] = value
    return {whole: _joint(parts, join) for whole, parts in groups.items()}


def _joint(parts: dict[str, Any], join: Callable[[list[Any]], Any]) -> Any:
    values = [parts[name] for name in sorted(parts, key=lambda name: ("qkv".find(name.split("_proj")[0][-1]), name))]
    if len(values) == 1:
        return joined(values[0], join)
    if isinstance(values[0], dict):
        return {key: join([value[key] for value in values]) for key in values[0]}
    return join(values)


def experts(width: int) -> State:
    names = [f"layer.experts.{number}.up.weight" for number in range(4)]
    return {
        "model": {name: floats(width, width) for name in names},
        "optimizer": {"state": {name: moments(width, width) for name in names}},
    }


APART = [(attention, np.concatenate), (experts, np.stack)]


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize(("parts", "join"), APART, ids=["fused", "stacked"])
def test_parts_of_a_tensor_that_comes_apart_are_stored_against_it(
    tmp_path: Path, parts: Callable[[int], State], join: Any, width: int
) -> None:
    """Equal ones take no bytes, others as many as the tensor if it stays whole; so do their moments."""
    before = parts(width)
    after = trained(before)
    last = trained(after)
    equal = stored(tmp_path / "equal", [joined(before, join), before, before, joined(before, join)])
    assert max(equal[1:]) < 2500
    same = stored(tmp_path / "same", [joined(state, join) for state in (before, after, last)])
    moved = stored(tmp_path / "moved", [joined(before, join), after, last])
    assert all(more < less + 1500 for more, less in zip(moved, same, strict=True))
    again = stored(tmp_path / "again", [joined(before, join), after, joined(after, join)])
    assert again[2] < 2500


def numbered(state: State) -> State:
    """Return a state whose optimiser has the numbers of weights in place of their names, as torch's have."""
    return {**state, "optimizer": {"state": dict(enumerate(state["optimizer"]["state"].values()))}}


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("is_apart", [False, True])
def test_moments_by_number_follow_weights_that_fuse_or_come_apart(tmp_path: Path, width: int, is_apart: bool) -> None:
    """Numbers move, and some of them belong to other parameters of the same shape; modules precede one another."""
    before = attention(width, "kqvo")
    after = trained(before)
    last = trained(after)
    same = stored(tmp_path / "same", [numbered(state) for state in (before, after, last)])
    moved = [numbered(joined(state)) for state in (before, after, last)]
    moved[is_apart] = numbered((before, after)[is_apart])
    sizes = stored(tmp_path / "moved", moved)
    assert all(more < 1.01 * less + 1500 for more, less in zip(sizes, same, strict=True))
    assert sizes[1] < 0.8 * sizes[0]


def test_moments_by_number_follow_weights_that_another_one_precedes(tmp_path: Path) -> None:
    before = attention(256, "qkvo")
    after = trained(before)
    added = {"model": {"new.weight": floats(256, 256)} | after["model"]}
    added["optimizer"] = {"state": {"new.weight": moments(256, 256)} | after["optimizer"]["state"]}
    _, same = stored(tmp_path / "same", [numbered(before), numbered(after)])
    _, moved = stored(tmp_path / "moved", [numbered(before), numbered(added)])
    assert moved < same + 3 * 256 * 256 * 4


@pytest.mark.parametrize(("parts", "join"), APART, ids=["fused", "stacked"])
def test_coarse_parts_of_a_tensor_that_comes_apart_are_stored_against_it(
    tmp_path: Path, parts: Callable[[int], State], join: Any
) -> None:
    before = parts(256)
    after = trained(before)
    coarse = ckstore.Policy("coarse")
    last = trained(after)
    sizes = []
    for name, states in (
        ("apart", [joined(before, join), after, last]),
        (
            "whole",
            [joined(state, join) for state in (before, after, last)],
        ),
    ):
        with ckstore.init(tmp_path / name) as store:
            for step, state in enumerate(states):
                store.ingest(state, run="r", step=step, policy=coarse)
                for path, value in leaves(state["model"]):
                    assert np.allclose(store[f"r@{step}"][f"model/{path}"][...], value, atol=2e-3)
            assert not store.verify().problems
            sizes.append([version.stored_bytes for version in store.run("r")])
    assert all(more < less + 3000 for more, less in zip(*sizes, strict=True))
    assert max(sizes[1][1:]) < sizes[1][0] / 2


def test_a_bound_holds_for_each_part_of_a_tensor_that_came_apart(tmp_path: Path) -> None:
    """The queries are small, and a bound is a fraction of a tensor's size."""
    sizes = {"q": 1e-3, "k": 1.0, "v": 1.0}
    before = {f"attn.{part}_proj.weight": np.float32(size) * floats(256, 256) for part, size in sizes.items()}
    policy = ckstore.Policy("coarse", max_rel_error=0.05)
    with ckstore.init(tmp_path / "store") as store:
        for step, state in enumerate([joined(before), before]):
            store.ingest(state, run="r", step=step, policy=policy)
        assert store["r@1"].fidelity == "coarse"
        for path, value in before.items():
            errors = np.abs(store["r@1"][path][...] - value)
            assert errors.max() <= 0.05 * np.sqrt(np.square(value).mean())


def test_gradients_of_parts_of_a_tensor_that_came_apart_fit_their_tensors(tmp_path: Path) -> None:
    """A tensor of another dtype has the name of the former whole."""
    before = {f"attn.{part}_proj.weight": floats(256, 256) for part in "qkv"}
    after = before | {"attn.qkv_proj.weight": floats(300, 256).astype(np.float16)}
    gradients = {path: np.ones(value.shape, np.float32) for path, value in after.items()}
    policy = ckstore.Policy("coarse", "dynaquant", 3)
    with ckstore.init(tmp_path / "store") as store:
        store.ingest(joined(before), run="r", step=0, policy=policy)
        store.ingest(after, run="r", step=1, policy=policy, gradients=gradients)
        assert not store.verify().problems
        assert store["r@1"].fidelity == "coarse"


def test_a_hot_version_whose_tensors_came_apart_is_encoded_against_the_whole(tmp_path: Path) -> None:
    before = attention(256)
    after = trained(before)
    encoded = stored(tmp_path / "encoded", [joined(before), after])
    with ckstore.init(tmp_path / "hot") as store:
        for step, item in enumerate([joined(before), after]):
            store.ingest(item, run="r", step=step, hot=9)
        for path, value in leaves(after):
            assert np.array_equal(store["r@1"][path][...], value)
        store.encode("r@1")
        assert store["r@1"].stored_bytes < encoded[1] + 1000
        for path, value in leaves(after):
            assert np.array_equal(store["r@1"][path][...], value)


def test_layers_of_a_stack_share_objects_at_its_cuts(tmp_path: Path) -> None:
    """A stack of 6.5 million elements has two objects; the first one ends in the fourth layer."""
    stack = GENERATOR.integers(-99, 99, (5, 1000, 1300)).astype(np.int8)
    layers = {f"layers.{number}.up": np.ascontiguousarray(stack[number]) for number in range(5)}
    sizes = stored(tmp_path / "store", [{"layers.up": stack}, layers, {"layers.up": stack}])
    assert max(sizes[1:]) < 2000


def test_parts_outlive_the_whole_and_dropped_tensors(tmp_path: Path) -> None:
    """An object of several tensors stays until all of them are dropped, as a bundle does."""
    before = attention(256)
    after = trained(before)
    with ckstore.init(tmp_path / "store") as store:
        for step, state in enumerate([joined(before), before, after]):
            store.ingest(state, run="r", step=step)
        store.forget("r@0")
        retention = ckstore.Retention(drop=("optimizer/*", "*.k_proj.weight"), whole_last=1)
        store.set_policy(ckstore.Policy(retention=retention), "r")
        assert [row.step for row in store.retain("r").dropped] == [1]
        store.gc(grace=0)
        assert not store.verify().problems
        assert not [name for name in store["r@1"] if name.startswith("optimizer")]
        for path, value in leaves(before["model"]):
            assert np.array_equal(store["r@1"][f"model/{path}"][...], value)
        for path, value in leaves(after):
            assert np.array_equal(store["r@2"][path][...], value)


def shrinking() -> Iterator[tuple[str, State, State]]:
    """Yield tensors before and after they lose rows: a vocabulary, the rank of LoRA, experts of a stack."""
    table, rank, stack = floats(3000, 32), floats(16, 4096), floats(6, 128, 128)
    yield "vocabulary", {"emb.weight": table}, {"emb.weight": table[:2900]}
    yield "rank", {"l0.lora_A": rank}, {"l0.lora_A": rank[:8]}
    yield "experts", {"experts.up": stack}, {"experts.up": stack[[0, 1, 3, 4]]}


@pytest.mark.parametrize(("name", "before", "after"), [*shrinking()], ids=["vocabulary", "rank", "experts"])
def test_a_tensor_that_shrinks_is_stored_against_its_first_rows(
    tmp_path: Path, name: str, before: State, after: State
) -> None:
    """Run with `-s` for the figures of docs/decisions.md. Experts in the middle leave, and the rows after them move."""
    after = {path: np.ascontiguousarray(value) for path, value in after.items()}
    states = [before, trained(after), last := trained(trained(after)), last]
    sizes = stored(tmp_path / "store", states)
    alone, offset = stored(tmp_path / "offset", [after, states[1]])
    print(f"\n{name}: {sizes[1]:,} in full {alone:,}, against the rows {offset:,}")
    assert sizes[1] < (0.9 * alone if name == "experts" else offset + 500)
    assert sizes[2] < 1.05 * alone
    assert sizes[3] < 1000


@pytest.mark.long
@pytest.mark.parametrize("large", [False, True])
def test_tensors_that_shrink_are_kept_through_every_change(tmp_path: Path, large: bool) -> None:
    """In one chunk or in several, above and below other versions."""
    rows = 40_000 if large else 3000
    whole = {"emb.weight": floats(rows, 32), "table": floats(rows, 32)}
    states = [whole, trained(whole)]
    for less in (100, 200):
        shorter = {path: np.ascontiguousarray(value[:-less]) for path, value in states[-1].items()}
        states += [{"emb.weight": trained(shorter["emb.weight"]), "table": shorter["table"].copy()}]
        states[-1]["table"][::50] += 1
    states.append({"emb.weight": trained(states[-1]["emb.weight"]), "table": states[-1]["table"]})

    def check(store: ckstore.Store, steps: Iterable[int], run: str = "r") -> None:
        assert not store.verify().problems
        for step in steps:
            for path, value in states[step].items():
                assert np.array_equal(store[f"{run}@{step}"][path][...], value)
                assert np.array_equal(store[f"{run}@{step}"][path][-70:-20, 3:5], value[-70:-20, 3:5])

    with ckstore.init(tmp_path / "store") as store:
        for step, state in enumerate(states):
            store.ingest(state, run="r", step=step, hot=9)
        for step in range(len(states)):
            store.encode(f"r@{step}")
        check(store, range(5))
        sizes = [version.stored_bytes for version in store.run("r")]
        assert max(sizes[2:4]) < 0.75 * sizes[0]
        for step in (0, 2, 3, 4, 1, 4):
            assert len([*store.follow(f"r@{step}", tmp_path / "followed", once=True)]) == 1
            store[f"r@{step}"].checkout(tmp_path / "out", force=True)
            files = [path.read_bytes() for path in (tmp_path / "followed").rglob("*") if path.is_file()]
            assert (tmp_path / "out").read_bytes() in files
        with ckstore.init(tmp_path / "other") as other:
            store.push(other)
            check(other, range(5))
            other.rebase(["r@3"])
            check(other, range(5))
    ckstore.recover(tmp_path / "store")
    with ckstore.open(tmp_path / "store") as store:
        check(store, range(5))
        store.thin(["r@1"])
        check(store, (0, 2, 3, 4))
        store.forget(["r@0", "r@1", "r@2"])
        store.gc(grace=0)
        check(store, (3, 4))


@pytest.mark.parametrize("wrong", ["a part of the part", "no part", "a base with as many rows"])
def test_a_part_that_does_not_hold_is_refused_unread(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = floats(3000, 32)
    states = [before, before + np.float32(1e-5), before[:2900] + np.float32(2e-5)]
    with ckstore.init(tmp_path / "store") as store:
        for step, state in enumerate(states):
            store.ingest({"emb.weight": state}, run="r", step=step)
    with ckstore.open(tmp_path / "store", "r") as store:
        repository = store._repository
        objects = [repository.resolver.document(store._catalog.resolve(f"r@{step}")).objects[0] for step in range(3)]
        whole, last = (repository.resolver.record(objects[step]) for step in (1, 2))
        assert last.part
        changed = {
            "a part of the part": replace(whole, part=True, base=last.id),
            "no part": replace(last, part=False),
            "a base with as many rows": replace(whole, part=True),
        }[wrong]
        find = repository.resolver.record
        monkeypatch.setattr(
            repository.resolver, "record", lambda identity: changed if identity == changed.id else find(identity)
        )
        monkeypatch.setattr(type(repository.reader.stored), "payload", None)
        for step in {1, 2} if wrong == "a part of the part" else {objects.index(changed.id)}:
            with pytest.raises(ckstore.IntegrityError):
                store[f"r@{step}"]["emb.weight"][...]


def test_rows_that_were_added_once_leave_without_bytes(tmp_path: Path) -> None:
    """The first rows are an object of their own since then."""
    for name, before, after in [*shrinking()][:2]:
        last = trained({path: np.ascontiguousarray(value) for path, value in after.items()})
        assert stored(tmp_path / name, [after, _with_rows(last, before), last])[2] < 1000


def test_all_objects_of_a_large_tensor_but_the_last_outlive_its_last_rows(tmp_path: Path) -> None:
    values = GENERATOR.integers(-99, 99, (3000, 4096)).astype(np.int8)
    sizes = stored(tmp_path / "store", [{"emb": values}, {"emb": values[:2800]}])
    assert sizes[1] < 0.3 * sizes[0]


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
