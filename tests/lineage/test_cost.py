"""Costs and prices of encodings."""

from __future__ import annotations

import pytest

from ckstore.lineage.cost import LINK, Prices, Work, cost, layer

FULL = layer(4, 1 << 20, 3 << 20, grouped=False)


def test_over_a_link_more_bytes_than_in_full_are_dear() -> None:
    local, remote = (Prices(cost(FULL), FULL.stored, over_link=over_link) for over_link in (False, True))
    assert local.of(FULL) == remote.of(FULL) == cost(FULL)
    patched = FULL.plus(Work(patches=1, patch_bytes=round(LINK * FULL.stored)))
    assert local.of(patched) == cost(patched) < 1.5 * cost(FULL)
    assert remote.of(patched) == pytest.approx(2 * cost(FULL))


def test_what_takes_few_bytes_is_priced_by_its_work() -> None:
    remote = Prices(cost(FULL), FULL.stored, over_link=True)
    small = layer(4, 1 << 20, 1 << 10, grouped=True)
    assert remote.of(small) == cost(small)
    assert Prices(cost(small), 0, over_link=True).of(small) >= cost(small)
