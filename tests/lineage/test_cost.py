"""Costs and prices of encodings."""

from __future__ import annotations

import pytest

from ckstore.lineage.cost import Work, cost, layer, price
from ckstore.storage.remote.bucket import READ_PRICE

FULL = layer(4, 1 << 20, 3 << 20, grouped=False)


def local(work: Work, stored: float) -> float:
    return price(work, stored, FULL, 0.0)


def remote(work: Work, stored: float) -> float:
    return price(work, stored, FULL, READ_PRICE)


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
    assert price(small, 0.0, layer(4, 1 << 20, 0, grouped=True), READ_PRICE) >= cost(small)
