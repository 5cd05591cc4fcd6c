"""Forget: removes versions from the store; `gc` frees their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.errors import IntegrityError
from ckstore.gc.collect import expected
from ckstore.storage import reserve

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.rows import VersionRow


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """Result of forgetting versions, or a prediction.

    Attributes
    ----------
    versions
        Rows of the forgotten versions.
    freed
        Bytes that `gc` will free then. Of a dry run alone, and None where damage prevents a `gc`.

    Examples
    --------
    >>> store.forget("gpt@100", dry_run=True).versions
    [<ckstore.VersionRow 1 gpt@100>]
    """

    versions: list[VersionRow]
    freed: int | None = None


def forget(repository: Repository, versions: Sequence[VersionRow], *, dry_run: bool = False) -> ForgetReport:
    """Remove versions from the store, all or none. Their children get their parents.

    Objects that other versions are stored against stay as long as they are needed. A dry run checks the same
    conditions. Raise `ConflictError` if a version is tagged, `NotFoundError` if one no longer exists.
    """
    numbers = [row.number for row in versions]
    freed = None
    if dry_run:
        repository.catalog.check_untagged(numbers)
        with suppress(IntegrityError):
            freed = expected(repository, without=numbers).bytes
    elif numbers:
        catalog = repository.catalog

        def change() -> None:
            catalog.forget_versions(numbers)
            if any(catalog.latest(run) is None for run in {row.run for row in versions}):
                catalog.remove_empty_runs()
            catalog.note({"change": "forget", "versions": numbers, "uids": [row.uid for row in versions]})

        with reserve.spent(repository.path):
            catalog.commit(change)
    return ForgetReport(list(versions), freed)
