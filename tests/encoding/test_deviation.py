"""The recorded deviations of coarse versions: bounds, by member, and digests of the decoded values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.encoding.deviations import Comparison
from ckstore.objects.documents import CoarseUnit, Deviation
from ckstore.objects.identity import MemberHasher
from ckstore.objects.units import Member, Unit
from ckstore.storage.schema import decode, encode


def unit_of(counts: list[int], dtype: str) -> Unit:
    members = tuple(Member(0, index, 0, count) for index, count in enumerate(counts))
    return Unit("bundle:m|x|weight#0", "s", dtype, (sum(counts),), "weight", members)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from(["float32", "float64"]), st.data())
def test_recorded_deviations_bound_measured_ones_by_member(counts: list[int], dtype: str, data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    unit = unit_of(counts, dtype)
    values = (rng.normal(size=unit.count) * 10.0 ** rng.integers(-15, 15)).astype(dtype)
    others = (values + rng.normal(size=unit.count) * 10.0 ** rng.integers(-15, 15)).astype(dtype)
    comparison = Comparison(unit)
    bits = f"u{values.itemsize}"
    length = data.draw(st.integers(1, unit.count))
    for start in range(0, unit.count, length):
        stretch = slice(start, start + length)
        comparison.add(values[stretch].view(bits), others[stretch].view(bits))
    found = comparison.result()
    assert len(found.deviations) == len(counts)
    start = 0
    for count, said in zip(counts, found.deviations, strict=True):
        value = values[start : start + count].astype(np.float64)
        difference = np.abs(value - others[start : start + count].astype(np.float64))
        measured = (difference.max(), np.sqrt(np.mean(difference**2)), np.sqrt(np.mean(value**2)))
        for bound, exact in zip(said, measured, strict=True):
            assert exact * (1 - 1e-12) <= bound <= exact * 1.001
        assert said.max_abs >= measured[0]
        start += count
    hasher = MemberHasher(dtype, unit.chunk, unit.member_bytes)
    hasher.update(memoryview(others).cast("B"))
    assert found.decoded == hasher.identity()


@pytest.mark.parametrize("size", [1e-154, 1e-200, 5e-324])
def test_deviations_of_tiny_values_are_bounds(size: float) -> None:
    """Their squares underflow."""
    comparison = Comparison(unit_of([3], "float64"))
    comparison.add(np.full(3, size).view("u8"), np.zeros(3).view("u8"))
    [said] = comparison.result().deviations
    assert size <= said.rms <= said.max_abs <= 1.001 * size


def test_equal_values_have_no_deviation() -> None:
    comparison = Comparison(unit_of([5], "float32"))
    bits = np.arange(5, dtype=np.float32).view("u4")
    comparison.add(bits, bits)
    [said] = comparison.result().deviations
    assert (said.max_abs, said.rms, said.relative) == (0.0, 0.0, 0.0)
    assert Deviation(1.0, 0.5, 0.0).relative == 0.0
    assert Deviation(1.0, 0.5, 2.0).relative == 0.25


@pytest.mark.parametrize(
    "value", [9.9994, 9.9996, 1.00049, 0.1, 1e-30, 5e-324, 1.7976931348623157e308, 1 / 3, 1.0, 1e22]
)
def test_few_digits_are_rounded_up_and_by_no_more_than_one_of_them(value: float) -> None:
    comparison = Comparison(unit_of([1], "float64"))
    comparison.add(np.array([value]).view("u8"), np.zeros(1, "u8"))
    [said] = comparison.result().deviations
    if value < 1e308:
        assert value <= said.max_abs <= value * 1.001
        assert len(f"{said.max_abs:.4g}") <= 10
        assert float(f"{said.max_abs:.4g}") == said.max_abs


def test_facts_come_back_from_json() -> None:
    facts = CoarseUnit("a" * 40, (Deviation(0.5, 0.25, 1.5), Deviation(0.0, 0.0, 0.0)), 0.0833)
    assert decode(encode(facts), CoarseUnit) == facts
