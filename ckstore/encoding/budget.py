"""The restore budget of a version: its restore cost as stored and in full, and the budget's division among objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckstore.encoding.estimate import Estimate
from ckstore.errors import UsageError
from ckstore.lineage.planner import Choice, choose
from ckstore.runtime.arguments import shown

#: Restoring a version costs at most this many times as much as if it were stored exactly and in full.
BUDGET = 2.0

#: Versions are planned for this part of the budget: measured factors are up to an eighth above the predicted ones.
PLANNED = 0.9


def checked_budget(budget: Any) -> float:
    """Return a budget as a float; raise `UsageError` unless it is a finite number from 1 on."""
    try:
        value = float(budget)
    except (TypeError, ValueError, OverflowError):
        value = 0.0
    if not 1 <= value < float("inf"):
        raise UsageError(f"The maximal restore cost must be a finite number, 1 or more, not {shown(budget)}.")
    return value


class Budget:
    """Divides a version's restore budget, `factor` times a full restore, among its objects in their order.

    `fixed` and `full` are the costs of assembling the files, independent of the objects: of this version as it will be
    stored, and of one that is stored in full. An object's share of them is its share of all `nbytes` of objects.
    """

    def __init__(self, fixed: float, full: float, nbytes: int, factor: float) -> None:
        self._factor = PLANNED * factor
        self._share = (self._factor * full - fixed) / nbytes if nbytes else 0.0
        self._ahead = nbytes
        self._left = 0.0

    def add(self, nbytes: int, full: float, spent: float) -> None:
        """Account for stored objects: pass their surplus or deficit on to the others."""
        self._ahead -= nbytes
        self._left += self._share * nbytes + self._factor * full - spent

    def choose(self, estimates: Sequence[Estimate]) -> list[Choice]:
        """Return choices for objects within their share, and their part of the surplus of those before."""
        nbytes = sum(estimate.unit.nbytes for estimate in estimates)
        full = sum(estimate.full_cost for estimate in estimates)
        part = self._left * nbytes / max(self._ahead, nbytes, 1)
        choices = choose(
            [estimate.candidates for estimate in estimates], self._share * nbytes + self._factor * full + part
        )
        self.add(nbytes, full, sum(choice.option.cost for choice in choices))
        return choices
