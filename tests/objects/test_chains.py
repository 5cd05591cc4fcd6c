"""The chains of objects, of records that nothing has written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from ckstore.errors import IntegrityError
from ckstore.lineage.cost import Work
from ckstore.objects.chains import Chains
from ckstore.objects.records import Cast, Delta, Full, Linear, Patches, Record

T = TypeVar("T")


def name(number: int) -> str:
    return f"{number:040x}"


class Records:
    """A resolver of given records, which counts its answers."""

    def __init__(self, records: list[Record]) -> None:
        self.by_id = {record.id: record for record in records}
        self.generation = 0
        self.asked = 0
        self.shortcuts: dict[str, Patches] = {}

    def settled(self, look: Callable[[], T]) -> T:
        return look()

    def record(self, identity: str) -> Record:
        self.asked += 1
        return self.by_id[identity]

    def find(self, identity: str) -> Record | None:
        return self.by_id.get(identity)

    def shortcut(self, record: Record) -> Patches | None:
        return self.shortcuts.get(record.id)


def fields(number: int) -> dict[str, Any]:
    return {"id": name(number), "dtype": "int32", "count": 1, "chunk": 1, "at": (0, 0), "alone": 0}


def deltas(first: int, count: int) -> list[Record]:
    return [Delta(**fields(number), base=name(number - 1)) for number in range(first, first + count)]


def test_an_object_that_equals_its_base_takes_a_look_up() -> None:
    [same] = deltas(1, 1)
    other = replace(same, at=(0, 9))
    chains = Chains(Records([base := Full(**fields(0)), same]))
    assert chains.work(same) == base.work.plus(Work(records=1))
    assert other.work.plain_elements == same.count


def test_a_chain_of_thousands_is_followed_once() -> None:
    base = Full(**fields(0))
    records = [base, *deltas(1, 20_000)]
    resolver = Records(records)
    chains = Chains(resolver)
    for record in reversed(records):
        assert chains.depth(record) == int(record.id, 16)
        assert chains.work(record).records == int(record.id, 16) + 1
    assert resolver.asked == 20_000, "each base once"
    assert chains.records(*map(name, range(20_001))) == records
    assert len(chains.levels(records[-1])) == len(records)


def test_chains_are_followed_again_after_a_change() -> None:
    resolver = Records([Full(**fields(0)), *deltas(1, 3)])
    chains = Chains(resolver)
    last = resolver.by_id[name(3)]
    assert chains.depth(last) == 3
    resolver.by_id[name(2)] = Full(**fields(2))
    assert chains.depth(last) == 3
    resolver.generation += 1
    assert chains.depth(last) == 1
    assert chains.work(last) != Work()


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"dtype": "int32"}, {"count": 2}, {"chunk": 2}])
def test_a_cast_needs_a_base_of_float32_and_its_cut(wrong: dict[str, Any]) -> None:
    base = {**fields(0), "dtype": "float32"}
    cast = Cast(**{**fields(1), "dtype": "bfloat16", "base": name(0), "sizes": (4,)})
    assert Chains(Records([Full(**base), cast])).depth(cast) == 1
    with pytest.raises(IntegrityError, match="cut into other chunks"):
        Chains(Records([Full(**base | wrong), cast])).depth(cast)


def test_a_coarse_cast_needs_a_linear_base_of_float32() -> None:
    said: dict[str, Any] = {"width": 1, "step": 0}
    cast = Linear(**{**fields(1), "dtype": "bfloat16", "base": name(0), "cast": True, **said})
    base = {**fields(0), "dtype": "float32", **said}
    assert Chains(Records([Linear(**base), cast])).depth(cast) == 1
    for wrong in ({"dtype": "bfloat16"}, {"width": 2}):
        with pytest.raises(IntegrityError):
            Chains(Records([Linear(**base | wrong), cast])).depth(cast)
    delta = replace(cast, cast=False)
    with pytest.raises(IntegrityError):
        Chains(Records([Linear(**base), delta])).depth(delta)


def test_casts_in_a_circle_are_refused() -> None:
    one, other = (
        Cast(**{**fields(number), "dtype": "bfloat16", "base": name(1 - number), "sizes": (4,)}) for number in range(2)
    )
    with pytest.raises(IntegrityError):
        Chains(Records([one, other])).depth(one)


def test_a_cycle_is_refused() -> None:
    records = deltas(1, 5)
    records[0] = Delta(**fields(1), base=name(5))
    with pytest.raises(IntegrityError, match="cycle"):
        Chains(Records(records)).depth(records[3])


def test_a_part_has_the_first_elements_of_a_base_with_more() -> None:
    base = {**fields(0), "count": 9, "chunk": 4}
    part = Delta(**{**fields(1), "count": 7, "chunk": 4, "base": name(0), "part": True})
    chains = Chains(Records([Full(**base), part]))
    assert chains.depth(part) == 1
    assert chains.work(part) == part.work.plus(Full(**base).work), "the whole base is decoded"
    one = replace(part, count=5, chunk=5)
    assert Chains(Records([Full(**base), one])).depth(one) == 1
    for wrong in (
        {"count": 7}, {"count": 6}, {"chunk": 3}, {"dtype": "int64"}, {"part": False},
    ):  # fmt: skip
        records = [Full(**{**base, **{key: value for key, value in wrong.items() if key != "part"}})]
        wrong_part = replace(part, part=wrong.get("part", True))
        with pytest.raises(IntegrityError):
            Chains(Records([*records, wrong_part])).depth(wrong_part)
    linear = Linear(**{**base, "dtype": "float32", "width": 1, "step": 0})
    with pytest.raises(IntegrityError, match="cannot be a delta"):
        Chains(Records([linear, replace(part, dtype="float32")])).depth(replace(part, dtype="float32"))


def test_parts_in_a_circle_or_of_many_parts_are_refused() -> None:
    def parts(first: int, number: int) -> list[Record]:
        return [
            Delta(**{**fields(one), "count": 50 - one, "chunk": 99, "base": name(one - 1), "part": True})
            for one in range(first, first + number)
        ]

    base = Full(**{**fields(0), "count": 50, "chunk": 99})
    few, many = parts(1, 16), parts(1, 17)
    assert Chains(Records([base, *few])).parts(few[-1]) == 16
    with pytest.raises(IntegrityError, match="too many parts"):
        Chains(Records([base, *many])).levels(many[-1])
    circle = [replace(one, base=name(3)) if one.id == name(1) else one for one in parts(1, 3)]
    with pytest.raises(IntegrityError):
        Chains(Records(circle)).depth(circle[2])


def test_no_way_between_objects_leads_over_a_part() -> None:
    base = Full(**{**fields(0), "count": 9, "chunk": 9, "at": (0, 100)})
    shorter = Patches(
        **{**fields(1), "count": 5, "chunk": 9, "base": name(0), "sizes": (1,), "at": (0, 1), "part": True}
    )
    last = Patches(**{**fields(2), "count": 5, "chunk": 9, "base": name(1), "sizes": (1,), "at": (0, 1)})
    chains = Chains(Records([base, shorter, last]))
    assert chains.between(name(1), name(2)) == ([], [last])
    assert chains.between(name(0), name(2)) == ([], [last, shorter, base])
    assert chains.between(name(2), name(0)) == ([], [base])


@pytest.mark.parametrize("wrong", [{}, {"dtype": "int64"}, {"count": 2}, {"chunk": 2}])
@pytest.mark.parametrize("held", [1, 2])
def test_a_shortcut_to_an_object_of_another_cut_is_not_taken(held: int, wrong: dict[str, Any]) -> None:
    below = {**fields(1), **wrong}
    middle = Patches(**{**fields(2), **wrong, "base": name(1), "sizes": (1,), "at": (0, 1)})
    wanted = Full(**{**fields(3), "at": (0, 100)})
    resolver = Records([Full(**below), middle, wanted])
    shortcut = Patches(**{**fields(3), "base": name(2), "sizes": (1,), "at": (0, 1)})
    resolver.shortcuts[wanted.id] = shortcut
    applied = [shortcut] if held == 2 else [shortcut, middle]
    assert Chains(resolver).between(name(held), wanted.id) == ([], [wanted] if wrong else applied)
