"""Tags, metrics and policies: what names mean, what is noted of versions, how faithful those of a run are to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckstore.errors import UsageError
from ckstore.policy import Policy
from ckstore.repository import Repository
from ckstore.storage import reserve
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.names import LATEST, check_length, check_tag

#: The run of versions that were given none.
DEFAULT_RUN = "main"


def policy_of(catalog: Catalog, run: str | None) -> Policy:
    """How faithful the next version of a run is to be: what was set for the run, else for the store, else exact."""
    known = catalog.policies()
    text = known.get(DEFAULT_RUN if run is None else run, known.get(""))
    return Policy() if text is None else Policy.from_text(text)


def check_run(run: str) -> None:
    """Raise `UsageError` for a name that cannot be told from that of a version."""
    if not isinstance(run, str):
        raise UsageError(f"The name of a run is text, not {run!r}; write run={str(run)!r}.")
    check_length(run)
    if not run or not run.isprintable() or run != run.strip() or "@" in run or run == LATEST:
        raise UsageError(
            f"{run!r} cannot name a run: it is empty or {LATEST}, has an @, blanks at its ends or what cannot be"
            " printed; choose another."
        )


def check_run_is_no_tag(catalog: Catalog, run: str) -> None:
    """Raise `UsageError` where a tag has the name of a run: it would hide the run."""
    if run in catalog.tags():
        raise UsageError(f"{run} is a tag; choose another run, or remove the tag: `ckstore tag --delete {run}`.")


def check_tag_is_no_run(catalog: Catalog, name: str, run: str | None = None) -> None:
    """Raise `UsageError` where a run, present or about to be, has the name of a tag, or it cannot be one at all."""
    check_tag(name)
    if name == run or any(known.name == name for known in catalog.runs()):
        raise UsageError(f"{name} is a run, which a tag of that name would hide; choose another tag.")


def tag(repository: Repository, row: VersionRow, name: str) -> None:
    """Let a tag mean a version; see `Store.tag`."""
    catalog = repository.catalog

    def change() -> None:
        check_tag_is_no_run(catalog, name)
        catalog.set_tag(name, row.number)
        catalog.note({"change": "tag", "tag": name, "version": row.number})

    catalog.commit(change)


def untag(repository: Repository, name: str) -> None:
    """Remove a tag."""
    catalog = repository.catalog

    def change() -> None:
        catalog.delete_tag(name)
        catalog.note({"change": "untag", "tag": name})

    with reserve.spent(repository.path):
        catalog.commit(change)


def add_metrics(repository: Repository, row: VersionRow, metrics: Mapping[str, Any]) -> VersionRow:
    """Note metrics with a version that is there, in place of those of the same names; returns its row then."""
    if {**row.metrics, **metrics} == row.metrics:
        return row
    catalog = repository.catalog

    def change() -> None:
        merged = {**catalog.version(row.number).metrics, **metrics}
        catalog.update_version(row.number, metrics=merged)
        catalog.note({"change": "metrics", "version": row.number, "metrics": merged})

    catalog.commit(change)
    return catalog.version(row.number)


def set_policy(repository: Repository, policy: Policy | None, run: str | None) -> None:
    """Let the versions to come of a run, or of the store, be this faithful; see `Store.set_policy`."""
    repository.require_writable()
    if run is not None:
        check_run(run)
    text = None if policy is None else policy.to_text()
    catalog = repository.catalog

    def change() -> None:
        catalog.set_policy(run or "", text)
        catalog.note({"change": "policy", "run": run or "", "policy": text})

    catalog.commit(change)
