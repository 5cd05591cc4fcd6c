"""The cost of restoring files: decoding their objects along their chains, and assembling them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckstore.formats.layout import FileLayout
from ckstore.lineage.cost import Work, cost
from ckstore.objects.reader import ObjectReader

#: Cost of each delta of the longest chain, whatever its size.
LEVEL = cost(Work(levels=1))


def assembly_work(layouts: Sequence[FileLayout]) -> Work:
    """Return the work of assembling files of these layouts from full objects."""
    return Work(
        levels=1,
        restored=sum(layout.size for layout in layouts),
        extents=sum(len(layout.extents) for layout in layouts),
        files=sum(layout.kind != "opaque" for layout in layouts),
    )


def restore_work(reader: ObjectReader, objects: Iterable[str], layouts: Sequence[FileLayout]) -> tuple[Work, Work]:
    """Return the work of restoring files from objects, given by id, and of a full restore."""
    assembly = assembly_work(layouts)
    records = list(map(reader.resolver.record, objects))
    deepest = Work(levels=max(map(reader.chains.depth, records), default=0))
    work = Work.total([assembly, deepest, *map(reader.chains.work, records)])
    return work, Work.total([assembly, *(record.full_work for record in records)])


def relative_cost(reader: ObjectReader, objects: Iterable[str], layouts: Sequence[FileLayout]) -> tuple[float, int]:
    """Return the cost of restoring files, as a multiple of a full restore, and the deltas of the longest chain."""
    work, full = restore_work(reader, objects, layouts)
    return round(cost(work) / alone, 4) if (alone := cost(full)) else 1.0, work.levels - 1
