"""Salvage: recovers the intact parts of a version whose packs are damaged or lost.

lost  = survey(version)                        # read every object and skeleton once
intact files                                   # restored as in a checkout, BLAKE3 compared
intact tensors of damaged files                # NAME.salvaged.pt
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.errors import IntegrityError
from ckstore.reading.checkout import checkout, staged, write_entries
from ckstore.reading.export import write_whole
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.threads import in_order, worker_count

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Progress = Callable[[int], None]

#: Suffix of a file with the intact tensors of a damaged one.
SUFFIX = ".salvaged.pt"


@dataclass(slots=True)
class SalvageReport:
    """The recovered and the lost parts of a version.

    Attributes
    ----------
    files
        Paths of the files that were restored byte for byte.
    tensors
        Paths of the recovered tensors, by the path of their damaged file.
    lost_files, lost_tensors
        The reason of each loss, by the path of the file or tensor.

    Examples
    --------
    >>> store["best"].salvage("salvaged.pt")
    SalvageReport(files=['state_dict.pt'], tensors={}, lost_files={}, lost_tensors={})
    """

    files: list[str] = field(default_factory=list)
    tensors: dict[str, list[str]] = field(default_factory=dict)
    lost_files: dict[str, str] = field(default_factory=dict)
    lost_tensors: dict[str, str] = field(default_factory=dict)


@collection_seldom()
def salvage(
    version: StoredVersion, target: Path, *, force: bool = False, progress: Progress | None = None
) -> SalvageReport:
    """Write the intact parts of a version to `target`; without losses, the same files as `checkout`.

    A damaged file is not written. Its intact tensors are written as `pt`, in their nesting, to a file with the suffix
    `.salvaged.pt`, so that it is not mistaken for the original. It is next to the others, or next to `target`.

    Raise `ConflictError` if the target exists without `force`, and `IntegrityError` if no part is intact, or the
    version's document is lost.
    """
    report = SalvageReport()
    document = version.document
    _survey(version, report)
    report.files = [entry.path for entry in document.files if entry.path not in report.lost_files]
    for path, (number, tensor) in version.paths.items():
        numbers = [shard for shard, _ in tensor.shards] or [number]
        lost = [file for file in (document.files[one].path for one in numbers) if file in report.lost_files]
        if lost and path not in report.lost_tensors:
            report.tensors.setdefault(lost[0], []).append(path)
    if not report.lost_files:
        checkout(version, target, force=force, progress=progress)
        return report
    if not report.files and not report.tensors:
        raise IntegrityError(
            f"No part of version {version.row.number} is intact: {next(iter(report.lost_files.values()))}"
        )
    if not document.is_directory:
        if os.path.isdir(target):
            target = target / document.files[0].path
        [tensors] = report.tensors.values()
        with staged(target.with_name(target.name + SUFFIX), force=force) as made:
            write_whole(version, made, tensors, progress)
        return report
    kept = {*report.files, *(path for path, _ in document.directories), *(path for path, _ in document.links)}
    with staged(target, force=force, directory=True) as made:
        write_entries(version, kept, made, progress)
        for path, tensors in report.tensors.items():
            place = made / (path + SUFFIX)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(version, place, tensors, progress)
    return report


def _survey(version: StoredVersion, report: SalvageReport) -> None:
    """Read everything, and record losses in the report."""
    files = [entry.path for entry in version.document.files]
    for number, _ in version.contents.dropped:
        report.lost_files[files[number]] = f"The version has dropped {', '.join(version.document.dropped)}."
    for number, path in enumerate(files):
        try:
            version.skeleton(number)
        except IntegrityError as error:
            report.lost_files[path] = str(error)
    units = version.layout.units
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        problems = in_order(pool, lambda number: _problem(version, number), range(len(units)), worker_count())
        for number, problem in enumerate(problems):
            if problem:
                for file in {member.file for member in units[number].members}:
                    report.lost_files.setdefault(files[file], problem)
                for path in version.contents.tensors_of(number):
                    report.lost_tensors.setdefault(path, problem)


def _problem(version: StoredVersion, number: int) -> str:
    """Return the error of a unit; empty if all of it can be read."""
    unit = version.layout.units[number]
    try:
        for chunk in range(-(-unit.count // unit.chunk)):
            version.chunk(number, chunk, keep=False)
    except IntegrityError as error:
        return str(error.__cause__ or error)
    return ""
