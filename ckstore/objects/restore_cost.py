"""What restoring files takes: decoding their objects along their chains, and putting them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckstore.formats.layout import FileLayout
from ckstore.lineage.cost import Work, cost
from ckstore.objects.reader import ObjectReader


def assembly_work(layouts: Sequence[FileLayout], depth: int = 0) -> Work:
    """Work of putting files of these layouts together, of objects whose longest chain has `depth` deltas."""
    return Work(
        levels=depth + 1,
        restored=sum(layout.size for layout in layouts),
        extents=sum(len(layout.extents) for layout in layouts),
        files=sum(layout.kind != "opaque" for layout in layouts),
    )


def restore_work(
    reader: ObjectReader, objects: Iterable[tuple[str, str | None]], layouts: Sequence[FileLayout]
) -> tuple[Work, Work]:
    """Work of restoring files made of objects, each (lattice id, content id or None), and if all were exact in full."""
    objects = list(objects)
    work = assembly_work(layouts, max((reader.depth(*item) for item in objects), default=0))
    full = assembly_work(layouts)
    for lattice, content in objects:
        work = work.plus(reader.work(lattice, content))
        full = full.plus(reader.resolver.lattice(lattice).full_work)
    return work, full


def relative_cost(work: Work, full: Work) -> float:
    """The cost of `work` as a multiple of that of `full`."""
    return round(cost(work) / cost(full), 4) if cost(full) else 1.0
