"""Rebase: stores the objects of old versions in full, so that restoring them needs no other version."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ckstore.codecs.integers import encode_changes
from ckstore.codecs.lattice import ordinal_difference
from ckstore.commit.change import Change
from ckstore.commit.costs import present_costs
from ckstore.encoding.estimate import Encoded
from ckstore.encoding.exact import exact_frame
from ckstore.encoding.writer import ObjectWriter
from ckstore.errors import IntegrityError
from ckstore.lineage.cost import cost, layer
from ckstore.objects.documents import Object
from ckstore.objects.records import LatticeRecord
from ckstore.objects.restore_cost import LEVEL, assembly_work
from ckstore.reading.stored_version import StoredVersion
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage.catalog import VersionRow
from ckstore.storage.pack import PackWriter

if TYPE_CHECKING:
    from ckstore.objects.reader import ObjectReader
    from ckstore.repository import Repository


#: Attempts while other processes change the versions.
_TRIES = 3
#: Tolerance for rounded costs.
_ROUNDING = 1.001


@dataclass(slots=True)
class RebaseReport:
    """Result of a rebase; after a dry run, its prediction.

    Attributes
    ----------
    versions
        Numbers of the versions that exceeded the budget.
    objects
        Number of objects that were stored in full.
    bytes
        Bytes that were added; `gc` frees the superseded layers.
    beyond
        Numbers of the versions that still exceed the budget. Objects of scheme `lc` are sums of deltas: they cannot be
        stored in full.
    """

    versions: list[int]
    objects: int = 0
    bytes: int = 0
    beyond: list[int] = field(default_factory=list)


def rebase(
    repository: Repository, versions: Sequence[StoredVersion], *, budget: float | None = None, dry_run: bool = False
) -> RebaseReport:
    """Store objects of `versions` in full until each version costs at most `budget` times a full restore.

    Parameters
    ----------
    budget
        Maximal restore cost, 1 or more; None stores every object in full.
    dry_run
        Change nothing; count the versions over budget and the objects to store.

    Raises
    ------
    NotFoundError
        A version was forgotten since.
    """
    for _ in range(_TRIES):
        try:
            return _rebase(repository, versions, budget, dry_run=dry_run)
        except IntegrityError:
            repository.catalog.refresh()
            rows = [repository.catalog.version(version.row.number) for version in versions]
            if all(row.described == version.row.described for row, version in zip(rows, versions, strict=True)):
                raise
            # Others have changed a version since it was looked up: its objects may have been removed.
            repository.resolver.forget()
            versions = [StoredVersion(repository, row) for row in rows]
    return _rebase(repository, versions, budget, dry_run=dry_run)


def _rebase(
    repository: Repository, versions: Sequence[StoredVersion], budget: float | None, *, dry_run: bool
) -> RebaseReport:
    chosen: set[Object] = set()
    numbers, beyond = [], []
    for version in versions:
        wanted, is_within = _beyond(repository.reader, version, budget, chosen)
        if wanted:
            numbers.append(version.row.number)
            chosen |= wanted
        if not is_within:
            beyond.append(version.row.number)
    report = RebaseReport(numbers, len(chosen), beyond=beyond)
    if dry_run or not chosen:
        return report
    with (
        repository.catalog.lease("rebase"),
        PackWriter(repository.path, "coarse") as coarse,
        PackWriter(repository.path, "exact") as exact,
    ):
        writer = ObjectWriter(coarse, exact)
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            todo = sorted(chosen, key=lambda item: (item[0], item[1] or ""))
            done = in_order(pool, lambda item: encoded_in_full(repository.reader, item), todo, worker_count() + 1)
            for (_, content), (record, layers) in zip(todo, done, strict=True):
                writer.put(content, record, None, layers)
        with Change(repository, writer) as change:
            change.finish()
            report.bytes = sum(pack.bytes for pack in change.packs)
            # The cost of a version without deltas does not change.
            costs = present_costs(repository, [row for row in repository.catalog.versions() if row.depth > 0])
            change.commit({"change": "rebase", "versions": numbers}, costs=costs)
    return report


def within_budget(repository: Repository, row: VersionRow, budget: float) -> VersionRow:
    """Rebase a version that was just encoded if it exceeds its budget; return its row.

    Objects that it shares with other versions were planned for their budgets, not for this one's.
    """
    if row.cost <= budget * _ROUNDING:
        return row
    rebase(repository, [StoredVersion(repository, row)], budget=budget)
    return repository.catalog.version(row.number)


def _beyond(
    reader: ObjectReader, version: StoredVersion, budget: float | None, chosen: set[Object]
) -> tuple[set[Object], bool]:
    """Return the objects of a version to store in full, and whether the version is within the budget then.

    The objects that save most come first. Sums of deltas cannot be stored in full.
    """
    objects = set(version.document.objects)
    fixed = cost(assembly_work(version.layout.files))
    exact = {item: cost(reader.resolver.lattice(item[0]).full_work) for item in objects}
    full = {item: _full_cost(reader, item) for item in objects}
    spent = {item: full[item] if item in chosen else cost(reader.work(*item)) for item in objects}
    allowed = (budget or 0.0) * (fixed + sum(exact.values()))
    total = fixed + sum(spent.values())
    wanted: set[Object] = set()
    sums = {item for item in objects if reader.depth(*item) > 0 and reader.resolver.lattice(item[0]).additive}
    left = sorted(objects - chosen, key=lambda item: (reader.depth(*item), item[0]))
    for item in sorted(objects, key=lambda item: (full[item] - spent[item], item[0])):
        while left and left[-1] in wanted:
            left.pop()
        if total + (LEVEL * reader.depth(*left[-1]) if left else 0.0) <= allowed:
            break
        if item not in chosen and item not in sums and reader.depth(*item) > 0:
            wanted.add(item)
            total += full[item] - spent[item]
    deepest = max((reader.depth(*item) for item in sums), default=0)
    return wanted, not sums or total + LEVEL * deepest <= allowed * _ROUNDING


def _full_cost(reader: ObjectReader, item: Object) -> float:
    record = reader.resolver.lattice(item[0])
    if item[1] is not None:
        return cost(record.full_work)
    return cost(layer(record.chunks, record.count, record.alone[0], grouped=False))


def encoded_in_full(reader: ObjectReader, item: Object) -> tuple[LatticeRecord, Encoded]:
    """Encode an object in full under the same ids; it must not be a sum of deltas."""
    lattice, content = item
    record = reader.resolver.lattice(lattice)
    layers = Encoded(lattice, [], [])
    for chunk in range(record.chunks):
        if record.is_exact:
            integers = ordinal_difference(reader.ordinals(record, chunk), None, record.dtype)
        elif record.kind == "codebook":
            integers = reader.indices(record, chunk).astype(np.int32) - np.int32(record.codebook.zero)
        else:
            integers = reader.integers(record, chunk)
        if content is not None and not record.is_exact:
            bits = reader.bits(content, chunk)
            layers.exact.append(exact_frame(record.linear, bits, integers, chunk * record.chunk))
        if record.protected:
            layers.aside.append(reader.aside(record, chunk))
        layers.coarse.append(encode_changes(integers))
    return replace(record, base=None, context=False, factor=1.0, debt=0, patches=()), layers
