"""Versions that are cut like their parents: every element is in one unit, whatever moved, grew, shrank or went."""

from __future__ import annotations

import random
import sys
from math import prod

import pytest
from msgspec.structs import replace

from ckstore.formats.layout import Extent, FileLayout, Path, Tensor, row_major
from ckstore.formats.renames import Named, matches
from ckstore.objects import continuation
from ckstore.objects import units as units_module
from ckstore.objects.continuation import Cut, continued
from ckstore.objects.layouts import LayoutDocument, encode_layout
from ckstore.objects.units import Unit, plan_units

Forms = dict[Path, tuple[int, ...]]


def cut(forms: Forms, dtype: str = "float32") -> Cut:
    extents, start = [], 0
    for path, shape in forms.items():
        extents.append(Extent(start, dtype, shape, path))
        start = extents[-1].stop
    files = [("", FileLayout("opaque", start, extents))]
    return Cut(files, plan_units(files))


def changed(forms: Forms, chance: random.Random) -> Forms:
    """Return tensors of the next version: some renamed, grown, smaller, gone, new, fused or apart; in another order."""
    found: Forms = {}
    wrapper = chance.choice(["", "", "module.", "_orig_mod.", "x."])
    for path, shape in forms.items():
        action = chance.random()
        if action < 0.1:
            continue
        if action < 0.4:
            shape = (max(shape[0] + chance.choice([-3, 1, 50, 3000]), 1), *shape[1:])
        name = path[-1] if chance.random() < 0.5 else f"{wrapper}{path[-1]}"
        found[(*path[:-1], name)] = shape
    for number in range(chance.randrange(3)):
        found["model", f"new{chance.randrange(99)}.{number}.weight"] = chance.choice([(100,), (300, 300), (40, 4)])
    parts: Forms = {("model", f"h.{part}.weight"): (256, 256) for part in "qkv"}
    fused: Forms = {("model", "h.qkv.weight"): (3 * 256, 256)}
    if chance.random() < 0.4:
        found = {path: shape for path, shape in found.items() if path not in {**parts, **fused}}
        found = {**chance.choice([parts, fused]), **found}
    elif chance.random() < 0.3:
        found = {**fused, **found}
    layers: Forms = {("layers", f"{number}.up"): (300, 250) for number in range(3)}
    found = {path: shape for path, shape in found.items() if path[0] != "layers"}
    found |= chance.choice([layers, {("layers", "up"): (3, 300, 250)}])
    items = list(found.items())
    if chance.random() < 0.2:
        chance.shuffle(items)
    return dict(items)


@pytest.mark.long
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_every_element_is_in_one_unit(seed: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With units of the usual size, and with small ones, so that most tensors have several."""
    if is_cut:
        monkeypatch.setattr(units_module, "PART", 1 << 12)
        monkeypatch.setattr(units_module, "BUNDLE", 1 << 11)
        monkeypatch.setattr(units_module, "SMALL", 1 << 6)
        monkeypatch.setattr(continuation, "SMALL", 1 << 6)
    chance = random.Random(seed)
    shapes = [(100,), (7, 9), (300, 250), (2040, 32), (1000, 16), (5000, 10 if is_cut else 1000), (1,)]
    forms: Forms = {("model", f"l{number}.weight"): chance.choice(shapes) for number in range(chance.randrange(1, 12))}
    forms |= {("optimizer", "state", number, "exp_avg"): chance.choice(shapes) for number in range(3)}
    forms |= {("model", f"h.{part}.weight"): (256, 256) for part in "qkv"}
    forms |= {("bias",): (70, 3)}
    has_states = chance.random() < 0.5
    parent = cut(with_states(forms) if has_states else forms)
    for _ in range(6):
        forms = changed(forms, chance)
        if not forms:
            return
        dtype = chance.choice(["float32"] * 5 + ["complex64"])
        alone = cut(with_states(forms) if has_states else forms, dtype)
        units = continued(alone, parent)
        document = LayoutDocument.decode(encode_layout([layout for _, layout in alone.files], units))
        assert not document.is_uncovered(gaps=False)
        assert len({unit.key for unit in units}) == len(units)
        assert len({unit.signature for unit in units}) == len(units)
        assert all(prod(unit.shape) for unit in units)
        parent = Cut(alone.files, units)
        if is_cut:  # A tensor may appear whose name a wrapped one had before: the next version sorts that out.
            parent = Cut(alone.files, continued(alone, parent))
        assert {unit.signature for unit in continued(alone, parent)} == {unit.signature for unit in parent.units}


def test_strangers_are_matched_in_linear_time() -> None:
    """Names and numbers of rows that both differ, so that none is found."""

    def calls(count: int) -> int:
        before, after = (
            cut({(f"tables.{letter}{number}.weight",): (70_000 + rows * count + number, 1) for number in range(count)})
            for rows, letter in enumerate("ab")
        )
        found = 0

        def note(*_: object) -> None:
            nonlocal found
            found += 1

        sys.setprofile(note)
        try:
            continued(after, before)
        finally:
            sys.setprofile(None)
        return found

    assert calls(200) < 2.5 * calls(100)


@pytest.mark.parametrize("is_apart", [False, True])
def test_tensors_come_together_and_apart_in_linear_time(is_apart: bool) -> None:
    def calls(count: int) -> int:
        parts = cut({(f"up.{number}.weight",): (70_000, 3) for number in range(count)})
        whole = cut({("up.weight",): (count, 70_000, 3)})
        found = 0

        def note(*_: object) -> None:
            nonlocal found
            found += 1

        sys.setprofile(note)
        try:
            units = continued(*((parts, whole) if is_apart else (whole, parts)))
        finally:
            sys.setprofile(None)
        assert {unit.signature for unit in units} == {unit.signature for unit in (whole if is_apart else parts).units}
        return found

    assert calls(200) < 2.5 * calls(100)


def members(version: Cut, units: list[Unit]) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """Return the keys of units, and name, first element and number of elements of each stretch."""
    extents = version.files[0][1].extents
    return [
        (unit.key, [(str(extents[one.extent].path[-1]), one.first, one.count) for one in unit.members])
        for unit in units
    ]


@pytest.mark.parametrize("ending", ["weight", "weight.exp_avg"])
def test_parts_of_a_fused_tensor_share_its_object_in_the_order_of_their_names(ending: str) -> None:
    """Query heads may outnumber those of keys; a sibling of the same form keeps its own object."""
    whole = cut({(f"h.attn.qkv_proj.{ending}",): (768, 256), (f"h.attn.o_proj.{ending}",): (512, 256)})
    rows = {"o": 512, "v": 128, "q": 512, "k": 128}
    apart = cut({(f"h.attn.{part}_proj.{ending}",): (count, 256) for part, count in rows.items()})
    units = continued(apart, whole)
    assert members(apart, units) == [
        (f"h.attn.o_proj.{ending}", [(f"h.attn.o_proj.{ending}", 0, 512 * 256)]),
        (f"apart:h.attn.qkv_proj.{ending}", [(f"h.attn.{part}_proj.{ending}", 0, rows[part] * 256) for part in "qkv"]),
    ]
    assert units[1].shape == (768, 256)
    back = continued(whole, Cut(apart.files, units))
    assert {unit.signature for unit in back} == {unit.signature for unit in units}


def test_rows_of_a_stack_are_in_the_order_of_their_numbers() -> None:
    """In the order of a file of safetensors, 10 precedes 2. Objects end where those of the stack do."""
    stack = cut({("experts.up",): (12, 1000, 500)})
    assert [unit.count for unit in stack.units] == [4_194_000, 1_806_000]
    apart = cut({(f"experts.{number}.up",): (1000, 500) for number in sorted(range(12), key=str)})
    found = members(apart, continued(apart, stack))
    assert [name for _, stretches in found for name, *_ in stretches] == [
        *(f"experts.{number}.up" for number in range(9)),
        *(f"experts.{number}.up" for number in range(8, 12)),
    ]
    assert found[1][1][0] == ("experts.8.up", 194_000, 306_000)


@pytest.mark.parametrize(
    "after",
    [
        {("experts.0.up",): (300, 250), ("experts.2.up",): (300, 250)},
        {(f"experts.{number}.up",): (300, 251) for number in range(3)},
        {(f"experts.{number}.down",): (300, 250) for number in range(3)},
        {(f"experts.{'9' * 5000}{number}.up",): (300, 250) for number in range(3)},
    ],
    ids=["fewer", "wider", "others", "long"],
)
def test_parts_without_all_elements_of_a_tensor_are_objects_of_their_own(after: Forms) -> None:
    version = cut(after)
    assert continued(version, cut({("experts.up",): (3, 300, 250)})) == version.units


def with_states(weights: Forms) -> Forms:
    """Return weights with the states of an optimiser, by number."""
    states = [(("optimizer", "state", number, "exp_avg"), shape) for number, shape in enumerate(weights.values())]
    return {**weights, **dict(states)}


def objects(version: Cut, units: list[Unit]) -> dict[str, str]:
    """Return the signature of each unit by the name of the weight that it or its moment belongs to."""
    extents = version.files[0][1].extents
    names = [extent.path[-1] for extent in extents if extent.path[0] == "model"]
    paths = {unit.signature: extents[unit.members[0].extent].path for unit in units}
    return {
        str(path[-1] if path[0] == "model" else f"{names[int(path[2])]}.{path[3]}"): signature
        for signature, path in paths.items()
    }


def test_a_state_by_number_follows_its_weight() -> None:
    """All have one shape, so that each number is a state's before and after; the next version knows nothing of that."""
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    first, more = cut(with_states(weights)), cut(with_states({("model", "new.weight"): (300, 300), **weights}))
    known = objects(first, first.units)
    units = continued(more, first)
    assert known.items() <= objects(more, units).items()
    again = continued(more, Cut(more.files, units))
    assert objects(more, again) == objects(more, units)
    assert objects(first, continued(first, Cut(more.files, again))) == known


def test_weights_precede_one_another_as_in_the_tree_not_in_the_file() -> None:
    """Files of torch before 2.7 have the values of storage 10 before those of storage 2."""

    def written(count: int) -> Cut:
        forms = with_states({("model", f"h.{number}.weight"): (300, 300) for number in range(count)})
        paths = [path for _, path in sorted((str(number), path) for number, path in enumerate(forms))]
        files = cut({path: forms[path] for path in paths}).files
        layout = files[0][1]
        layout.tensors = [
            Tensor(path, "float32", shape, row_major(shape), paths.index(path), 0) for path, shape in forms.items()
        ]
        return Cut(files, plan_units(files))

    first, more = written(12), written(13)
    known = {unit.key: unit.signature for unit in first.units}
    assert known.items() <= {unit.key: unit.signature for unit in continued(more, first)}.items()


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (4, 2), (4, 1, 1)])
def test_states_keep_their_numbers_if_groups_are_added(sizes: tuple[int, ...]) -> None:
    """Added groups have the last numbers, wherever their weights are in the model; others are of another optimiser."""
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    first, more = (
        cut(with_states(weights)),
        cut(with_states({("model", f"{x}.weight"): (300, 300) for x in "ab"} | weights)),
    )
    numbers = iter(range(6))
    groups = [{"params": [next(numbers) for _ in range(size)]} for size in sizes]
    more.files[0][1].tree = {"optimizer": {"state": {}, "param_groups": groups}}
    moved = 0 if sizes[0] == 4 else 2
    after = {unit.signature: unit.key for unit in continued(more, first)}
    assert [after[unit.signature] for unit in first.units[4:]] == [
        f"optimizer/state/[{number + moved}]/exp_avg" for number in range(4)
    ]


@pytest.mark.parametrize(
    "tree", [[], {"optimizer": []}, {"optimizer": {"param_groups": [{"params": "x"}, {1}, None, 3]}}]
)
def test_groups_of_strangers_say_nothing(tree: object) -> None:
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    first, more = cut(with_states(weights)), cut(with_states({("model", "new.weight"): (300, 300), **weights}))
    known = objects(first, first.units)
    more.files[0][1].tree = tree
    assert known.items() <= objects(more, continued(more, first)).items()


def test_a_list_of_one_version_leaves_the_others() -> None:
    """An optimiser comes with its model, while another one's numbers move."""
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    more = with_states({("model", "new.weight"): (300, 300), **weights})
    others: Forms = {("critic", "weight"): (500, 200), ("second", "state", 0, "exp_avg"): (500, 200)}
    first = cut(with_states(weights))
    known = {unit.key.replace("[3]", "[4]"): unit.signature for unit in first.units if "[3]" in unit.key}
    assert known.items() <= {unit.key: unit.signature for unit in continued(cut({**more, **others}), first)}.items()


def test_statistics_of_layers_have_no_states() -> None:
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    weights |= {("model", f"norm.{name}"): (300,) for name in ("weight", "bias")}
    statistics: Forms = {("model", f"norm.{name}"): (300,) for name in ("running_mean", "running_var")}
    first = cut({**statistics, **with_states(weights)})
    more = cut({**statistics, **with_states({("model", "new.weight"): (300, 300), **weights})})
    known = {unit.key.replace("[3]", "[4]"): unit.signature for unit in first.units if "[3]" in unit.key}
    assert known.items() <= {unit.key: unit.signature for unit in continued(more, first)}.items()


def test_a_parents_tensor_may_have_no_name() -> None:
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    first, more = cut(with_states({("x",): (300, 300), **weights})), cut(with_states(weights))
    extents = first.files[0][1].extents
    extents[0] = replace(extents[0], path=())
    assert sum(unit.count for unit in continued(more, first)) == 8 * 300 * 300


def test_a_counter_is_no_shape_of_a_parameter_of_one_element() -> None:
    def with_counters(weights: Forms) -> Cut:
        states = with_states(weights)
        return cut(states | {(*path[:-1], "step"): () for path in states if path[-1] == "exp_avg"})

    weights: Forms = {("model", "scale"): (1,)} | {("model", f"h.{number}.weight"): (300, 300) for number in range(4)}
    first, more = with_counters(weights), with_counters({("model", "new.weight"): (300, 300), **weights})
    known = {unit.key.replace("[4]", "[5]"): unit.signature for unit in first.units if "[4]" in unit.key}
    assert known.items() <= {unit.key: unit.signature for unit in continued(more, first)}.items()


def test_states_keep_their_numbers_if_their_weights_are_unknown() -> None:
    """Other names altogether, and a list that lacks an item."""
    weights: Forms = {("model", f"h.{number}.weight"): (300, 300) for number in range(3)}
    others: Forms = {("model", f"{name}.kernel"): (300, 300) for name in "xyz"}
    first, other = cut(with_states(weights)), cut(with_states(others))
    assert {unit.signature for unit in continued(other, first)} >= {unit.signature for unit in first.units[3:]}
    few = with_states(weights)
    del few["optimizer", "state", 1, "exp_avg"]
    assert [unit.key for unit in continued(cut(few), first)] == [unit.key for unit in cut(few).units]


def signatures(units: list[Unit]) -> list[str]:
    return [unit.signature for unit in units]


def test_units_of_the_same_names_and_shapes_stay() -> None:
    version = cut({("a",): (300, 300), ("b",): (9,)})
    assert continued(version, version) == version.units


def test_names_match_in_the_order_of_certainty() -> None:
    def found(before: list[str], after: list[str]) -> dict[str, str]:
        sides = [[Named("", (name,), "float32", (3, 4)) for name in side] for side in (before, after)]
        return {before[number]: after[other] for number, other in matches(sides[0], sides[1]).items()}

    assert found(["a.w", "b.w"], ["b.w", "a.w"]) == {"a.w": "a.w", "b.w": "b.w"}
    assert found(["a.w"], ["module.a.w", "ema.a.w"]) == {"a.w": "module.a.w"}
    assert found(["x.0.w", "x.1.w"], ["y.0.w", "y.1.w"]) == {"x.0.w": "y.0.w", "x.1.w": "y.1.w"}
    assert found(["a.w"], ["b.w"]) == {"a.w": "b.w"}
    assert found(["a.w"], ["b.w", "c.w"]) == {}
    assert found(["a.w"], ["b.v"]) == {}
    assert found(["a.3.w", "a.7.w"], ["a.4.w", "a.8.w"]) == {"a.3.w": "a.4.w", "a.7.w": "a.8.w"}
