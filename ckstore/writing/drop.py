"""Drop: removes tensors from versions for good.

left = units but those all of whose tensors match   # an object with other tensors stays whole
version of these                                    # its layout, objects and coarse facts
commit                                              # nothing is encoded: bases of other objects stay
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from ckstore.commit.change import Change
from ckstore.commit.costs import bytes_again, own_bytes, restore_cost, update_costs
from ckstore.encoding.object_writer import ObjectWriter
from ckstore.errors import ConflictError
from ckstore.formats.paths import match_texts
from ckstore.objects.layouts import encode_layout
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage.pack import PackWriter
from ckstore.writing.describe import Blobs

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.rows import VersionRow


def drop(
    repository: Repository,
    rows: Sequence[VersionRow],
    globs: Sequence[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> list[VersionRow]:
    """Remove tensors from versions, each in its own commit; `gc` frees the objects that no other version needs.

    Small tensors share objects, and so do parts of a tensor that came apart: a shared object is removed only if all its
    tensors match. Return the changed versions, with the globs of all their dropped tensors. `progress` is called with
    numbers of removed bytes; an exception that it raises stops between two commits.

    Raises
    ------
    ConflictError
        A version is hot: encode it first.
    IntegrityError
        A version's manifest or layout is damaged, or one of its remaining objects.
    NotFoundError
        A version was forgotten since.
    """
    done = []
    left_over: set[str] = set()
    with repository.catalog.lease("drop"):
        repository.resolver.notice_collection()
        for number in sorted({row.number for row in rows}):
            # Read the row under the lease: others may have changed or moved the version before.
            row = repository.catalog.version(number)
            if row.hot:
                raise ConflictError(f"Version {number} is not encoded yet; run `ckstore encode {number}` first.")
            version = StoredVersion(repository, row)
            left = _left(version, globs)
            if len(left) == len(version.layout.units):
                continue
            done.append(replace(row, dropped=_drop(version, left, globs)))
            left_over.update(version.document.objects[number] for number in left)
            if progress is not None:
                units = version.layout.units
                progress(sum(unit.nbytes for unit in units) - sum(units[number].nbytes for number in left))
        if done:
            update_costs(repository, left_over)
    return done


def going(version: StoredVersion, globs: Sequence[str]) -> set[int]:
    """Return the numbers of the units that would be removed."""
    return {*range(len(version.layout.units))} - {*_left(version, globs)}


def with_globs(dropped: Sequence[str], globs: Sequence[str]) -> tuple[str, ...]:
    """Return a version's globs after another drop, each once."""
    return tuple(dict.fromkeys((*dropped, *globs)))


def _left(version: StoredVersion, globs: Sequence[str]) -> list[int]:
    """Return the numbers of the units that remain."""
    paths = list(version.paths)
    matching = {paths[number] for number in match_texts(paths, globs)}
    return [
        number
        for number in range(len(version.layout.units))
        if not (named := version.contents.tensors_of(number)) or not matching.issuperset(named)
    ]


def _drop(version: StoredVersion, left: Sequence[int], globs: Sequence[str]) -> tuple[str, ...]:
    """Reduce a version to these units; return the globs of all its dropped tensors."""
    repository, row, before = version.repository, version.row, version.document
    facts = before.coarse_units
    facts = {place: facts[number] for place, number in enumerate(left) if number in facts}
    blobs = Blobs(repository, _nearest(repository, row))
    layout = encode_layout(version.layout.files, [version.layout.units[number] for number in left])
    document = structs.replace(
        before.elsewhere(row.pack),
        fidelity="coarse" if facts else "exact",
        layout=blobs.layout(layout),
        objects=tuple(before.objects[number] for number in left),
        coarse=structs.replace(before.coarse, units=facts) if before.coarse is not None and facts else None,
        dropped=with_globs(before.dropped, globs),
    )
    cost, depth = restore_cost(StoredVersion(repository, row), document.objects)
    own = row.stored_bytes - bytes_again(repository, before.objects)
    stored = max(own - own_bytes(version, set(before.objects) - set(document.objects)), 0)
    costs = {row.number: ((cost, depth, stored + bytes_again(repository, document.objects)), (cost, depth, stored))}
    summary = {**before.summary, "cost": cost, "depth": depth, "base": depth == 0, "stored_bytes": stored}
    document = structs.replace(document, summary=summary)
    with (
        PackWriter(repository.path, "encoded") as pack,
        Change(repository, ObjectWriter(pack)) as change,
    ):
        change.finish(document, blobs.packed, again=True)
        change.commit_again({"change": "drop", "version": row.number}, row, costs=costs)
    return document.dropped


def _nearest(repository: Repository, row: VersionRow) -> VersionRow:
    """Return the nearest version of the run with dropped tensors: its layout is most similar; or the version itself."""
    return repository.catalog.nearest_dropped(row.run, row.number) or row
