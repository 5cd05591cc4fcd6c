"""Forget: takes versions out of the store; what only they needed is freed by `gc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.storage import reserve

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.rows import VersionRow


@dataclass(frozen=True, slots=True)
class ForgetReport:
    """What was forgotten or would be.

    Attributes
    ----------
    versions
        The rows of the versions, as they were.
    """

    versions: list[VersionRow]


def forget(repository: Repository, versions: Sequence[VersionRow], *, dry_run: bool = False) -> ForgetReport:
    """Take versions out of the store, all of them or none; their children get their parents.

    What other versions are stored against stays for as long as they need it.

    Parameters
    ----------
    dry_run
        Only say which, and raise what forgetting them would raise.

    Raises
    ------
    ConflictError
        One of them is tagged.
    NotFoundError
        One of them is gone meanwhile.
    """
    numbers = [row.number for row in versions]
    if dry_run:
        repository.catalog.check_untagged(numbers)
    elif numbers:
        catalog = repository.catalog

        def change() -> None:
            catalog.forget_versions(numbers)
            catalog.remove_empty_runs()
            catalog.note({"change": "forget", "versions": numbers})

        with reserve.spent(repository.path):
            catalog.commit(change)
    return ForgetReport(list(versions))
