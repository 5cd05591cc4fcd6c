"""Names and notes: tags, metrics of versions, and policies of runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ckstore.errors import NotFoundError, UsageError
from ckstore.policy import Policy, Retention
from ckstore.repository import Repository
from ckstore.runtime.arguments import shown
from ckstore.runtime.provenance import own_metrics
from ckstore.storage import reserve
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.names import check_name
from ckstore.storage.version_names import near_names

_log = logging.getLogger("ckstore")

_EXACT = Policy()
#: The default run.
DEFAULT_RUN = "main"


def policy_of(catalog: Catalog, run: str | None) -> Policy:
    """Return the policy for the next version of a run: the run's, else the store's, else exact."""
    known = catalog.policies()
    text = known.get(DEFAULT_RUN if run is None else run, known.get(""))
    return _EXACT if text is None else Policy.from_text(text)


def check_run(run: str) -> None:
    """Raise `UsageError` for an invalid name of a run."""
    check_name(run, "run")


def check_run_is_no_tag(catalog: Catalog, run: str) -> None:
    """Raise `UsageError` if a tag has the name of a run: it would hide the run."""
    if catalog.tagged(run) is not None:
        raise UsageError(f"{run} is a tag; choose another run, or remove the tag: `ckstore tag --delete {run}`.")


def check_tag_is_no_run(catalog: Catalog, name: str, run: str | None = None) -> None:
    """Raise `UsageError` if a tag's name is invalid, or is the name of an existing or new run."""
    check_name(name, "tag")
    if name == run or catalog.has_run(name):
        raise UsageError(f"{name} is a run, which a tag of that name would hide; choose another tag.")


def rename_run(repository: Repository, run: str, name: str) -> None:
    """Give a run another name; see `Store.rename_run`. Its forgotten versions come back under that name."""
    catalog = repository.catalog

    def change() -> None:
        check_run_is_no_tag(catalog, name)
        uids = [row.uid for row in catalog.versions(run)]
        uids += [row.uid for record in catalog.undoable() for row in record["rows"] if row.run == run]
        catalog.rename_run(run, name)
        catalog.note({"change": "rename", "from": run, "run": name, "uids": list(dict.fromkeys(uids))})

    catalog.commit(change)


def tag(repository: Repository, row: VersionRow, name: str) -> None:
    """Point a tag at a version; see `Store.tag`."""
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
    """Add metrics to a version, replacing those of the same names; return its new row."""
    if {**row.metrics, **metrics} == row.metrics:
        return row
    set_metrics(repository, row, metrics, ())
    return repository.catalog.version(row.number)


def set_metrics(repository: Repository, row: VersionRow, metrics: Mapping[str, Any], remove: Sequence[str]) -> None:
    """Add metrics to a version and remove others; see `Store.set_metrics`."""
    catalog = repository.catalog

    def change() -> None:
        present = catalog.version(row.number).metrics
        for name in remove:
            if name not in (own := own_metrics(present)):
                known = f" it has {', '.join(own)}." if own else ""
                raise NotFoundError(f"Version {row.number} has no metric {name};{known or ' it has none.'}")
        merged = {name: value for name, value in {**present, **metrics}.items() if name not in remove}
        catalog.update_version(row.number, metrics=merged)
        catalog.note({"change": "metrics", "version": row.number, "metrics": merged})

    catalog.commit(change)


def checked_policy(policy: object) -> Policy | None:
    """Return a policy, or None; raise `UsageError` for anything else, also for a part of one."""
    if policy is None or isinstance(policy, Policy):
        return policy
    hint = ""
    if isinstance(policy, str):
        hint = f"; write ckstore.Policy({policy!r})"
    elif isinstance(policy, Retention):
        hint = "; write ckstore.Policy(retention=…)"
    raise UsageError(f"`policy` takes a ckstore.Policy, not {shown(policy)}{hint}.")


def set_policy(repository: Repository, policy: Policy | None, run: str | None) -> None:
    """Set the policy of a run, or of the store, for its next versions; see `Store.set_policy`."""
    repository.require_writable()
    if run is not None:
        check_run(run)
    policy = checked_policy(policy)
    if run is not None and policy is not None and policy.retention.max_bytes is not None:
        raise UsageError("`max_bytes` limits the store; set it in the policy of the store, without a run.")
    text = None if policy is None else policy.to_text()
    catalog = repository.catalog

    def change() -> None:
        catalog.set_policy(run or "", text)
        catalog.note({"change": "policy", "run": run or "", "policy": text})

    catalog.commit(change)
    if run is not None and text is not None and catalog.latest(run) is None:
        near = near_names(run, [known.name for known in catalog.runs()])
        hint = f" (near: {', '.join(near)})" if near else ""
        _log.warning("Run %s has no version yet%s; its policy counts from the first one.", run, hint)
