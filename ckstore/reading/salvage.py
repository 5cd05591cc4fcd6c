"""Salvage: what is whole of a version whose packs were damaged or lost in part.

lost  = survey(version)                        # every object and skeleton is read once
files that lost nothing                        # as they were, SHA-256 compared
of others, tensors that are whole              # NAME.salvaged.pt
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ckstore.errors import IntegrityError
from ckstore.reading.checkout import beside, checkout, write_entries
from ckstore.reading.export import write_whole
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.threads import in_order, worker_count

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Progress = Callable[[int], None]

#: What the name of a file ends with that holds the whole tensors of one that is not.
SUFFIX = ".salvaged.pt"


@dataclass(slots=True)
class SalvageReport:
    """What of a version was written, and what is lost.

    Attributes
    ----------
    files
        Paths of the files that came back as they were.
    tensors
        Of every other file that has whole tensors, their paths, by the path of the file.
    lost_files, lost_tensors
        What is wrong, by path of the files that are not whole, and of the tensors.
    """

    files: list[str] = field(default_factory=list)
    tensors: dict[str, list[str]] = field(default_factory=dict)
    lost_files: dict[str, str] = field(default_factory=dict)
    lost_tensors: dict[str, str] = field(default_factory=dict)


@collection_seldom()
def salvage(
    version: StoredVersion, target: Path, *, force: bool = False, progress: Progress | None = None
) -> SalvageReport:
    """Write what is whole of a version to `target`, as `checkout` would if nothing is lost.

    A file that is not whole is not written. Its whole tensors are, as `pt`, nested as they were, to a file whose name
    ends with `.salvaged.pt`, so that nobody takes it for the other; it is beside the others, or beside `target`.

    Parameters
    ----------
    version
        The version; of one that is read as coarse, exact layers that are lost do not count.
    target
        The file or directory to be.
    force
        Overwrite what is there.
    progress
        Called with numbers of bytes that were written.

    Raises
    ------
    ConflictError
        The target exists, and `force` is not set.
    IntegrityError
        Nothing at all is whole, or what the version consists of is lost itself.
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
            f"Nothing of version {version.row.number} is whole: {next(iter(report.lost_files.values()))}"
        )
    if not document.is_directory:
        if os.path.isdir(target):
            target = target / document.files[0].path
        [tensors] = report.tensors.values()
        with beside(target.with_name(target.name + SUFFIX), force=force) as made:
            write_whole(version, made, tensors, progress)
        return report
    kept = {*report.files, *(path for path, _ in document.directories), *(path for path, _ in document.links)}
    with beside(target, force=force, directory=True) as made:
        write_entries(version, kept, made, progress)
        for path, tensors in report.tensors.items():
            place = made / (path + SUFFIX)
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(version, place, tensors, progress)
    return report


def _survey(version: StoredVersion, report: SalvageReport) -> None:
    """Read everything, and say in the report what is lost."""
    files = [entry.path for entry in version.document.files]
    for number, _ in version.dropped:
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
                for path in version.tensors_of(number):
                    report.lost_tensors.setdefault(path, problem)


def _problem(version: StoredVersion, number: int) -> str:
    """What is wrong with a unit; nothing where all of it is read."""
    unit = version.layout.units[number]
    try:
        for chunk in range(-(-unit.count // unit.chunk)):
            version.chunk(number, chunk, keep=False)
    except IntegrityError as error:
        return str(error.__cause__ or error)
    return ""
