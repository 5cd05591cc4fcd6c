"""Tags and policies: what names mean, and how faithful the versions of a run are to be."""

from __future__ import annotations

from ckstore.errors import UsageError
from ckstore.policy import Policy
from ckstore.repository import Repository
from ckstore.storage import log
from ckstore.storage.catalog import Catalog, VersionRow

#: The run of versions that were given none.
DEFAULT_RUN = "main"


def policy_of(catalog: Catalog, run: str | None) -> Policy:
    """How faithful the next version of a run is to be: what was set for the run, else for the store, else exact."""
    known = catalog.policies()
    text = known.get(run or DEFAULT_RUN, known.get(""))
    return Policy() if text is None else Policy.from_text(text)


def check_run(run: str) -> None:
    """Raise `UsageError` for a name that cannot be told from that of a version."""
    if not run.isprintable() or run != run.strip() or "@" in run:
        raise UsageError(
            f"{run!r} cannot name a run: it has an @, blanks at its ends or what cannot be printed; choose another."
        )


def tag(repository: Repository, row: VersionRow, name: str) -> None:
    """Let a tag mean a version; see `Store.tag`."""
    with repository.catalog.transaction():
        repository.catalog.set_tag(name, row.number)
        log.append(repository.path, {"change": "tag", "tag": name, "version": row.number})


def untag(repository: Repository, name: str) -> None:
    """Remove a tag."""
    with repository.catalog.transaction():
        repository.catalog.delete_tag(name)
        log.append(repository.path, {"change": "untag", "tag": name})


def set_policy(repository: Repository, policy: Policy | None, run: str | None) -> None:
    """Let the versions to come of a run, or of the store, be this faithful; see `Store.set_policy`."""
    repository.require_writable()
    check_run(run or DEFAULT_RUN)
    text = None if policy is None else policy.to_text()
    with repository.catalog.transaction():
        repository.catalog.set_policy(run or "", text)
        log.append(repository.path, {"change": "policy", "run": run or "", "policy": text})
