"""Costs and prices of encodings."""

from __future__ import annotations

import pytest

from ckstore.lineage.cost import Work, cost, factors, layer, patches, price
from ckstore.storage.remote.bucket import READ_PRICE

FULL = layer(4, 1 << 20, 3 << 20, grouped=False)


def local(work: Work, stored: float) -> float:
    return price(work, Work(), stored, FULL, 0.0)


def remote(work: Work, stored: float) -> float:
    return price(work, Work(), stored, FULL, READ_PRICE)


def patched(nbytes: float) -> Work:
    """A version in full, and a patch."""
    return FULL.plus(Work(patches=1, patch_bytes=round(nbytes)))


def test_a_version_in_full_is_within_every_budget() -> None:
    assert local(FULL, FULL.stored) == remote(FULL, FULL.stored) == cost(FULL)


@pytest.mark.parametrize("saved", [0.05, 0.5])
def test_over_a_link_bytes_read_are_repaid_by_bytes_saved(saved: float) -> None:
    stored = (1 - saved) * FULL.stored
    work = patched(saved / READ_PRICE * FULL.stored)
    assert local(work, stored) == cost(work)
    assert remote(work, stored) == pytest.approx(max(2 * cost(FULL), cost(work)))
    assert remote(patched(0.5 * saved / READ_PRICE * FULL.stored), stored) < remote(work, stored)


def test_options_without_savings_are_beyond_every_budget() -> None:
    work = patched(0.1 * FULL.stored)
    assert remote(work, FULL.stored) > 1000 * cost(FULL)


def test_small_objects_are_priced_by_their_work() -> None:
    small = layer(4, 1 << 20, 1 << 10, grouped=True)
    assert remote(small, small.stored) == cost(small)
    assert price(small, Work(), 0.0, layer(4, 1 << 20, 0, grouped=True), READ_PRICE) >= cost(small)


def test_no_work_costs_nothing() -> None:
    assert Work() == Work(*[0] * len(Work._fields))
    assert cost(Work()) == 0


def test_works_add_up() -> None:
    works = [layer(1, 10, 20, grouped=False), layer(2, 10, 5, grouped=True), Work(levels=3)]
    assert Work.total(works) == works[0].plus(works[1]).plus(works[2])
    assert Work.total(works).levels == 3


def test_each_layer_is_a_record() -> None:
    works = layer(2, 9, 5, grouped=False), layer(2, 9, 5, grouped=True), patches(2, 5), factors(4, 9, 2, 5)
    assert [work.records for work in works] == [1, 1, 1, 1]


def test_factors_have_classes() -> None:
    work = factors(40, 300, 2, 50)
    assert (work.grouped_chunks, work.grouped_elements, work.grouped_bytes) == (1, 40, 50)
    assert (work.plain_elements, work.products) == (300, 600)


def test_low_bytes_of_numbers_in_full_are_raw() -> None:
    found = [layer(1, 1000, stored, grouped=False) for stored in (900, 1500, 2500, 4500)]
    assert [(one.plain_coded, one.plain_raw) for one in found] == [(900, 0), (500, 1000), (500, 2000), (1000, 3500)]
    assert layer(1, 1, 1, grouped=False) == Work(plain_chunks=1, plain_elements=1, plain_raw=1, records=1)
    difference = layer(1, 1000, 1500, grouped=False, delta=True)
    assert (difference.plain_coded, difference.plain_raw) == (1000, 500)
