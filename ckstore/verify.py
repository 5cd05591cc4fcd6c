"""Checks a store: packs against their names, chunks against their checksums, objects against their ids, the catalog."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ckstore.catalog_check import catalog_problems
from ckstore.encoder import lattice_id
from ckstore.errors import CkstoreError
from ckstore.formats.layout import ITEM_SIZES, FileLayout
from ckstore.objects import ObjectReader
from ckstore.records import content_id, digest
from ckstore.storage.pack import parse_pack_name
from ckstore.threads import in_order, worker_count
from ckstore.units import Unit

if TYPE_CHECKING:
    from ckstore.store import Store
    from ckstore.version import Version


@dataclass(slots=True)
class VerifyReport:
    """What was checked, and a sentence for each problem."""

    packs: int = 0
    versions: int = 0
    objects: int = 0
    chunks: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)


def verify(
    store: Store,
    versions: Sequence[Version],
    *,
    sample: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Read packs and decode the objects of `versions`; nothing is changed.

    Parameters
    ----------
    sample
        Check this part of packs and objects, drawn at random; all by default.
    progress
        Called with numbers of decoded bytes.
    """
    report = VerifyReport()
    draw = random.Random()

    def chosen() -> bool:
        return sample is None or draw.random() < sample

    report.problems += store.catalog.check()
    if report.problems:
        return report  # What a damaged catalog says of packs and versions would only add confusion.
    report.problems += catalog_problems(store, versions)
    _check_packs(store, report, chosen)
    objects: dict[tuple[str, str], tuple[Version, Unit]] = {}
    for version in versions:
        try:
            report.versions += 1
            for number in range(len(version.document.files)):
                version.skeleton(number)
            for unit, (lattice, content) in zip(version.layout.units, version.document.objects, strict=True):
                objects.setdefault((lattice, content or ""), (version, unit))
        except CkstoreError as error:
            report.problems.append(f"Version {version.row.number}: {error}")
    wanted = [item for item in objects.items() if chosen()]
    # Objects of one key follow each other, so that the parent's chunks are still decoded when a delta needs them.
    wanted.sort(key=lambda item: (item[1][1].key, item[1][0].row.number))
    groups: list[list[tuple[tuple[str, str], tuple[Version, Unit]]]] = []
    for item in wanted:
        if groups and groups[-1][0][1][1].key == item[1][1].key:
            groups[-1].append(item)
        else:
            groups.append([item])
    # The store's own reader may still hold what an ingest was given.
    reader = ObjectReader(store.resolver, store.packs)
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        for found in in_order(pool, lambda group: [_check_object(reader, *item) for item in group], groups, 4):
            for chunks, nbytes, problem in found:
                report.objects += 1
                report.chunks += chunks
                report.bytes += nbytes
                if problem:
                    report.problems.append(problem)
                if progress is not None:
                    progress(nbytes)
    return report


def _check_packs(store: Store, report: VerifyReport, chosen: Callable[[], bool]) -> None:
    for pack in store.catalog.packs():
        if not chosen():
            continue
        report.packs += 1
        try:
            parsed = parse_pack_name(pack.name)
            if parsed is None or store.packs.digest(pack.name) != parsed[0]:
                report.problems.append(f"Pack {pack.name} is not what its name says; restore it from a copy.")
        except CkstoreError as error:
            report.problems.append(str(error))


def _check_object(reader: ObjectReader, ids: tuple[str, str], place: tuple[Version, Unit]) -> tuple[int, int, str]:
    """Chunks and bytes that were decoded, and a problem or nothing."""
    version, unit = place
    identity, content = ids
    chunks = -(-unit.count // unit.chunk)
    try:
        record = reader.resolver.lattice(identity)
        if (record.count, record.chunk, record.dtype) != (unit.count, unit.chunk, unit.dtype):
            return 0, 0, f"Object {identity} of version {version.row.number} is cut otherwise than its layout says."
        if record.kind == "linear":
            digests = [bytes.fromhex(digest(reader.integers(record, chunk).view(np.uint8))) for chunk in range(chunks)]
            if lattice_id(record.lattice, record.count, record.chunk, digests) != identity:
                return chunks, 0, f"The integers of {unit.key} in version {version.row.number} are not the stored ones."
        if content:
            hasher = _ContentHasher(unit, version.layout.files)
            for chunk in range(chunks):
                hasher.update(reader.bits(content, chunk).data.cast("B"))
            if hasher.identity() != content:
                return chunks, 0, f"The values of {unit.key} in version {version.row.number} are not what was stored."
    except CkstoreError as error:
        return 0, 0, f"{unit.key} in version {version.row.number}: {error}"
    return chunks, unit.nbytes, ""


class _ContentHasher:
    """The content id of a unit whose bytes come in order: as `scan` takes it from the files."""

    def __init__(self, unit: Unit, files: Sequence[FileLayout]) -> None:
        self._unit = unit
        self._digests: list[bytes] = []
        self._left: list[int] = []
        for member in unit.members:
            extent = files[member.file].extents[member.extent]
            self._left.append(member.count * ITEM_SIZES[extent.dtype])
        self._left.reverse()
        self._inner = blake3()

    def update(self, data: memoryview) -> None:
        while data:
            take = min(self._left[-1], len(data))
            self._inner.update(data[:take])
            data = data[take:]
            self._left[-1] -= take
            if not self._left[-1]:
                self._digests.append(self._inner.digest())
                self._inner = blake3()
                self._left.pop()

    def identity(self) -> str:
        return content_id(self._unit.dtype, self._unit.chunk, self._digests)
