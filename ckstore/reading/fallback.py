"""Finds the versions to fall back to where one is damaged."""

from __future__ import annotations

from collections.abc import Iterator

from ckstore.reading.checkout import restored_blocks
from ckstore.reading.stored_version import StoredVersion


def before(version: StoredVersion) -> Iterator[StoredVersion]:
    """Yield the ancestors of a version in its run, the nearest first."""
    rows = {row.number: row for row in version.repository.catalog.versions(version.row.run)}
    row = rows.pop(version.row.parent or 0, None)
    while row is not None:
        yield StoredVersion(version.repository, row)
        row = rows.pop(row.parent or 0, None)


def read_all(version: StoredVersion) -> None:
    """Read a version as a checkout does; raise the same errors."""
    files = range(len(version.document.files))
    version.contents.require_whole(files)
    for number in files:
        for _ in restored_blocks(version, number):
            pass
