"""The planner against exhaustive search, on random tables."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.lineage.planner import Candidates, Option, plan

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
    choices = plan([Candidates(tuple(options)) for options in table], allowed)
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
    choices = plan([Candidates(tuple(options)) for options in table], float("inf"))
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
        (choice,) = plan([Candidates(options, debt)], 2.0)
        assert choice.option.name in ("base", "far")
        if choice.option.is_base:
            assert choice.debt == 0.0
        else:
            assert choice.debt < 200.0 - small
        debt = choice.debt


def test_an_empty_version_has_an_empty_plan():
    assert plan([], 0.0) == []


@pytest.mark.parametrize("allowed", [0.0, 10.0])
def test_where_nothing_fits_the_cheapest_is_taken(allowed):
    options = (Option("a", 1.0, 100.0, is_base=False), Option("b", 50.0, 20.0, is_base=True))
    (choice,) = plan([Candidates(options)], allowed)
    assert choice.option.name == "b"
