"""Forget: removes versions from the store; `gc` frees their bytes after a time, and `undo` brings them back before.

forget(...)                    # writes the rows of the versions into the log, unless they leave for good
undo(...)                      # adds the rows of the last such record again, if `gc` has kept all that they need
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckstore.commit.costs import present_costs, write_costs
from ckstore.commit.naming import check_run_is_no_tag
from ckstore.errors import CkstoreError, IntegrityError, NotFoundError
from ckstore.gc.collect import expected
from ckstore.gc.kept import present_form
from ckstore.storage import reserve
from ckstore.storage.rows import key, plain_row
from ckstore.writing.encode import encode
from ckstore.writing.thin import make_exact

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.rows import VersionRow

#: Most versions that one change can bring back: their rows are in one record of the log.
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """Result of forgetting versions or of bringing them back, or a prediction.

    Attributes
    ----------
    versions
        Rows of the versions.
    freed
        Bytes that `gc` will free in the end, or has freed. Of a dry run or with `prune` alone, and None where damage
        prevents a `gc`.

    Examples
    --------
    >>> store.forget("gpt@100", dry_run=True).versions
    [<ckstore.VersionRow 1 gpt@100>]
    """

    versions: list[VersionRow]
    freed: int | None = None


def forget(
    repository: Repository, versions: Sequence[VersionRow], *, dry_run: bool = False, for_good: bool = False
) -> ForgetReport:
    """Remove versions from the store, all or none. Their children get their parents.

    Objects that other versions are stored against stay as long as they are needed; unless the versions leave
    `for_good`, `gc` also keeps all that `undo` needs, for a time. Hot ones are encoded first, since raw objects go with
    the last hot version that has them. A dry run checks the same conditions. Raise
    `ConflictError` if a version is tagged, `NotFoundError` if one no longer exists.
    """
    numbers = [row.number for row in versions]
    freed = None
    if dry_run:
        repository.catalog.check_untagged(numbers)
        with suppress(IntegrityError):
            freed = expected(repository, without=numbers).bytes
    elif numbers:
        catalog = repository.catalog
        may_return = not for_good and len(numbers) <= _MOST
        if may_return:
            with suppress(CkstoreError, OSError):  # The others leave for good, perhaps since the disk is full.
                encode(repository, [row for row in versions if row.hot])

        def change() -> None:
            # As they are now: other processes may have encoded one since.
            kept = _kept(repository, numbers) if may_return else {}
            catalog.forget_versions(numbers)
            if any(catalog.latest(run) is None for run in {row.run for row in versions}):
                catalog.remove_empty_runs()
            catalog.note({"change": "forget", "versions": numbers, "uids": [row.uid for row in versions], **kept})

        with reserve.spent(repository.path):
            catalog.commit(change)
    return ForgetReport(list(versions), freed)


def _kept(repository: Repository, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a log record from which `undo` brings versions back."""
    catalog = repository.catalog
    rows = [row for row in map(catalog.version, numbers) if not row.hot]
    if not rows:
        return {}
    return {
        "rows": [plain_row(row) for row in rows],
        "children": [[child.number for child in catalog.children(row.number)] for row in rows],
    }


def undoable(repository: Repository) -> list[VersionRow]:
    """Return the forgotten and thinned versions that `undo` can bring back, as they were, by number."""
    records = _undoable(repository)
    return sorted((row for record in records for row in record["rows"]), key=lambda row: row.number)


def _undoable(repository: Repository) -> list[Mapping[str, Any]]:
    """Return the records of the changes that `undo` takes back, without thinnings that were interrupted."""
    catalog = repository.catalog

    def is_exact(record: Mapping[str, Any]) -> bool:
        with suppress(NotFoundError):  # It was forgotten later.
            return catalog.resolve(record["rows"][0].uid).fidelity == "exact"
        return False

    return [record for record in catalog.undoable() if record["change"] != "thin" or not is_exact(record)]


def undo(repository: Repository) -> ForgetReport:
    """Bring back the versions that were forgotten last, all or none, or the exact values that were thinned last.

    A call again brings back those before.

    Raise `NotFoundError` if there are none, or `gc` has freed them; `ConflictError` if a run has another version at the
    step of one.
    """
    catalog = repository.catalog

    def change() -> list[VersionRow] | None:
        repository.resolver.forget()  # A collection may have moved objects since.
        undoable = _undoable(repository)
        if undoable and undoable[-1]["change"] == "thin":
            return None
        if not undoable:
            raise NotFoundError("Nothing to undo: no version was forgotten or thinned, or `gc` has freed them since.")
        record = undoable[-1]
        rows: list[VersionRow] = record["rows"]
        children = dict(zip((row.number for row in rows), record["children"], strict=True))
        found = [_restore(repository, row, children) for row in sorted(rows, key=lambda row: row.number)]
        write_costs(catalog, present_costs(repository, found))
        for row in found:
            if row.superseded:
                catalog.note({"change": "supersede", "by": row.uid, "superseded": [row.uid], "present": []})
        uids, numbers = [row.uid for row in found], [row.number for row in found]
        catalog.note({"change": "undo", "versions": numbers, "uids": uids, "undone": record["sequence"]})
        catalog.note_kept(0, record["created"])
        return [catalog.version(number) for number in numbers]

    found: list[VersionRow] | None = None
    with reserve.kept(repository.path):
        while not found:  # Another process may have undone a thinning, or freed it, since `change` saw it.
            found = catalog.commit(change)
            if found is None:
                found = _make_exact(repository)
    repository.resolver.forget()
    return ForgetReport(found)


def _make_exact(repository: Repository) -> list[VersionRow]:
    """Make the versions of the last thinning, if there is one, exact again, each in its own commit."""
    catalog = repository.catalog
    with catalog.lease("undo"):
        records = [record for record in _undoable(repository) if record["change"] == "thin"]
        last = [record for record in records if record["began"] == records[-1]["began"]]
        # The first ones last: if this is interrupted, they are still the last that were thinned.
        found = [make_exact(repository, record["rows"][0], record["sequence"]) for record in reversed(last)]
        if last:
            catalog.note_kept(0, last[0]["created"])
    return sorted(found, key=lambda row: row.number)


def _restore(repository: Repository, row: VersionRow, children: Mapping[int, Sequence[int]]) -> VersionRow:
    """Add a row again; its packs may have other names now."""
    catalog = repository.catalog
    row = present_form(repository, row)
    left = list(_present(repository, children[row.number]))
    if row.parent is not None and not any(_present(repository, [row.parent])):
        row = replace(row, parent=left[0].parent if left else None)
    document = repository.resolver.document(row)
    references = document.blob_packs()
    moved = catalog.moved_packs(references)
    keys = [key(identity) for identity in document.objects]
    if catalog.latest(row.run) is None:
        check_run_is_no_tag(catalog, row.run)
    catalog.restore_version(
        row,
        {moved.get(name, name) for name in references},
        catalog.places_of(keys),
        keys,
        [child.number for child in left],
    )
    return row


def _present(repository: Repository, numbers: Sequence[int]) -> Iterator[VersionRow]:
    for number in numbers:
        with suppress(NotFoundError):
            yield repository.catalog.version(number)
