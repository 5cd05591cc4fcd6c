"""The planner against exhaustive search, on random tables."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.lineage.planner import Candidates, Option, choose

option = st.builds(
    Option,
    st.just("delta"),
    st.integers(0, 1000).map(float),
    st.integers(0, 1000).map(float),
    is_base=st.just(False),
)
tables = st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=5)


def best(table: list[list[Option]], allowed: float) -> float | None:
    """Fewest bytes of any choice within the allowed cost; None where there is none."""
    fitting = [
        sum(chosen.stored for chosen in choice)
        for choice in product(*table)
        if sum(chosen.cost for chosen in choice) <= allowed
    ]
    return min(fitting, default=None)


@given(tables, st.integers(0, 4000))
def test_choices_fit_whenever_anything_does_and_are_near_the_optimum(table, allowed):
    choices = choose([Candidates(tuple(options)) for options in table], allowed)
    stored = sum(choice.option.stored for choice in choices)
    cost = sum(choice.option.cost for choice in choices)
    optimum = best(table, allowed)
    cheapest = sum(min(option.cost for option in options) for options in table)
    assert (cost <= allowed) == (optimum is not None) or cost == cheapest
    if optimum is not None:
        assert cost <= allowed
        # The greedy Lagrangian is at most one exchange above the optimum.
        largest = max(max(o.stored for o in options) - min(o.stored for o in options) for options in table)
        assert optimum <= stored <= optimum + largest


@given(tables)
def test_without_a_bound_every_object_takes_its_smallest_option(table):
    choices = choose([Candidates(tuple(options)) for options in table], float("inf"))
    for options, choice in zip(table, choices, strict=True):
        assert choice.option.stored == min(option.stored for option in options)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 150)), min_size=5, max_size=40))
def test_debt_never_exceeds_the_extra_bytes_of_a_base(sizes):
    """Versions in a row: the smallest delta does not fit the budget, so that debt grows until a base pays it."""
    debt = 0.0
    for small, extra in sizes:
        options = (
            Option("base", 200.0, 1.0, is_base=True),
            Option("near", float(small), 9.0, is_base=False),
            Option("far", float(small + extra), 2.0, is_base=False),
        )
        (choice,) = choose([Candidates(options, debt)], 2.0)
        assert choice.option.name in ("base", "far")
        if choice.option.is_base:
            assert choice.debt == 0.0
        else:
            assert choice.debt < 200.0 - small
        debt = choice.debt


def test_an_empty_version_has_an_empty_plan():
    assert choose([], 0.0) == []


@pytest.mark.parametrize("allowed", [0.0, 10.0])
def test_where_nothing_fits_the_cheapest_is_taken(allowed):
    options = (Option("a", 1.0, 100.0, is_base=False), Option("b", 50.0, 20.0, is_base=True))
    (choice,) = choose([Candidates(options)], allowed)
    assert choice.option.name == "b"


def exact(name: str, stored: float, cost: float) -> Option:
    return Option(name, stored, cost, is_base=name == "base")


def test_the_exchange_that_costs_the_fewest_bytes_for_its_savings_comes_first():
    table = [
        Candidates((exact("small", 0.0, 100.0), exact("quick", 10.0, 90.0))),
        Candidates((exact("small", 0.0, 10.0), exact("quick", 8.0, 0.0))),
    ]
    assert [choice.option.name for choice in choose(table, 100.0)] == ["small", "quick"]


@pytest.mark.parametrize("allowed", [60.0, 40.0])
def test_an_option_above_the_line_between_two_others_is_left_out(allowed: float):
    options = exact("small", 0.0, 100.0), exact("middle", 30.0, 50.0), exact("quick", 40.0, 0.0)
    assert choose([Candidates(options)], allowed)[0].option.name == "quick"


@pytest.mark.parametrize(
    ("debt", "far", "name"),
    [(50.0, 140.0, "far"), (50.0, 150.0, "base"), (0.0, 101.0, "far"), (99.0, 101.0, "base")],
)
def test_an_object_becomes_a_base_when_its_debt_reaches_the_extra_bytes(debt: float, far: float, name: str):
    options = exact("base", 200.0, 1.0), exact("near", 100.0, 9.0), exact("far", far, 2.0)
    (choice,) = choose([Candidates(options, debt)], 2.0)
    assert choice.option.name == name
    assert choice.debt == (0.0 if name == "base" else debt + far - 100.0)


def test_without_a_debt_a_base_of_equal_bytes_is_not_taken():
    options = exact("base", 100.0, 5.0), exact("delta", 100.0, 2.0)
    assert [choose([Candidates(options, debt)], 9.0)[0].option.name for debt in (0.0, 1.0)] == ["delta", "base"]


def test_a_debt_of_one_byte_is_one():
    options = exact("base", 101.0, 5.0), exact("delta", 100.0, 2.0)
    assert [choose([Candidates(options, debt)], 9.0)[0].option.name for debt in (0.0, 1.0)] == ["delta", "base"]
