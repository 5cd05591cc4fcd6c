"""Versions that are cut like their parents: every element is in one unit, whatever moved, grew, shrank or went."""

from __future__ import annotations

import random
import sys
from math import prod

import pytest

from ckstore.formats.layout import Extent, FileLayout, Path
from ckstore.formats.renames import Named, matches
from ckstore.objects import continuation
from ckstore.objects import units as units_module
from ckstore.objects.continuation import Cut, continued
from ckstore.objects.layouts import LayoutDocument, _is_uncovered
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
    """Return tensors of the next version: some renamed, grown, smaller, gone, new, fused; in another order."""
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
    if chance.random() < 0.3:
        found = {("model", "h.qkv.weight"): (3 * 256, 256), **found}
    items = list(found.items())
    if chance.random() < 0.2:
        chance.shuffle(items)
    return dict(items)


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
    parent = cut(forms)
    for _ in range(6):
        forms = changed(forms, chance)
        if not forms:
            return
        dtype = chance.choice(["float32"] * 5 + ["complex64"])
        alone = cut(forms, dtype)
        units = continued(alone, parent)
        document = LayoutDocument([layout for _, layout in alone.files], units)
        assert not _is_uncovered(document, gaps=False)
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
