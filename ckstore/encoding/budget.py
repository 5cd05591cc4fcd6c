"""The restore budget of a version: what restoring costs as it is stored and in full, and how objects share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckstore.encoding.exact import Estimate
from ckstore.formats.layout import FileLayout
from ckstore.lineage.cost import Work, cost
from ckstore.lineage.planner import Choice, plan
from ckstore.objects.reader import ObjectReader

#: Restoring a version costs at most this many times what it would cost stored exactly and in full.
BUDGET = 2.0

#: Versions are planned for this part of the budget: measured factors were up to a sixth above those foretold.
PLANNED = 0.83


class Budget:
    """Shares a version's restore budget out among its objects, as they come.

    Parameters
    ----------
    fixed
        Cost of writing the files, whatever their objects cost.
    size
        Bytes of the files: an object has that part of the fixed cost that it has of them.
    factor
        The budget as a multiple of a full restore.
    """

    def __init__(self, fixed: float, size: int, factor: float) -> None:
        self._share = fixed / size if size else 0.0
        self._factor = PLANNED * factor
        self._left = 0.0

    def add(self, full: float, spent: float) -> None:
        """Take note of objects that are stored already: what they leave over, or take away from the others."""
        self._left += self._factor * full - spent

    def plan(self, estimates: Sequence[Estimate]) -> list[Choice]:
        """Choices for some objects within their share and what others left over."""
        fixed = self._share * sum(estimate.unit.nbytes for estimate in estimates)
        full = sum(estimate.full_cost for estimate in estimates)
        self._left += self._factor * (full + fixed) - fixed
        choices = plan([estimate.candidates for estimate in estimates], self._left)
        self._left -= sum(choice.option.cost for choice in choices)
        return choices


def writing_work(layouts: Sequence[FileLayout]) -> Work:
    """Work of writing files of these layouts, whatever their objects are stored like."""
    return Work(
        written=sum(layout.size for layout in layouts),
        extents=sum(len(layout.extents) for layout in layouts),
        files=len(layouts),
    )


def restore_work(
    reader: ObjectReader, objects: Iterable[tuple[str, str | None]], layouts: Sequence[FileLayout]
) -> tuple[Work, Work]:
    """Work of restoring files made of objects, each (lattice id, content id or None), and if all were exact in full."""
    work = full = writing_work(layouts)
    for lattice, content in objects:
        work = work.plus(reader.work(lattice, content))
        full = full.plus(reader.resolver.lattice(lattice).full_work)
    return work, full


def relative_cost(work: Work, full: Work) -> float:
    """The cost of `work` as a multiple of that of `full`."""
    return round(cost(work) / cost(full), 4) if cost(full) else 1.0
