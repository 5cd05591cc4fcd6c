"""Retain: does what a run's policy says of its older versions: which lose tensors, become coarse, are forgotten.

due(rows, retention, ...)      # which: a pure function of the catalog's rows
drop(...)                      # those that lose tensors, each in a commit of its own
thin(...)                      # those that become coarse, each in a commit of its own
forget(...)                    # those that go, in the transaction that looked them up
gc(...)                        # where enough is garbage, and nobody else is at work

Forgetting comes last: which version is the first of so many steps is another one once versions are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckstore.errors import ConflictError, DiskFullError, LockedError, NotFoundError
from ckstore.operations.compact import compact
from ckstore.operations.drop import drop, going, with_globs
from ckstore.operations.forget import forget
from ckstore.operations.gc.collect import gc
from ckstore.operations.naming import policy_of
from ckstore.operations.selection import by_run, first_of_every
from ckstore.operations.thin import may_have_any, thin
from ckstore.policy import Policy, Retention
from ckstore.reading.stored_version import StoredVersion
from ckstore.storage import reserve

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.rows import VersionRow

#: Garbage is collected where at least this part of the packs' bytes is claimed by no version.
_GARBAGE = 0.1

#: Seconds for which garbage may wait for a moment in which nobody writes; what stays goes the next time.
_PATIENCE = 2.0


#: Ids of versions that had no exact layer to give up, or, with globs, no such tensors, by the repository that found
#: out: it takes reading them.
_had_nothing: WeakKeyDictionary[Repository, set[str | tuple[str, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Due:
    """The versions of a run that its policy does not keep as they are, in order.

    Attributes
    ----------
    forgotten, thinned, dropped
        Those that go, those that become coarse, and those that lose tensors.
    """

    forgotten: list[VersionRow]
    thinned: list[VersionRow]
    dropped: list[VersionRow]


@dataclass(slots=True)
class RetainReport:
    """What was done with older versions, or would be.

    Attributes
    ----------
    forgotten, thinned, dropped
        The rows of the versions that are forgotten and that became coarse, as they were, and of those that lost
        tensors, with the globs of these.
    freed
        Bytes that the store takes less; 0 where the garbage waits for more, or for others to end.
    """

    forgotten: list[VersionRow] = field(default_factory=list)
    thinned: list[VersionRow] = field(default_factory=list)
    dropped: list[VersionRow] = field(default_factory=list)
    freed: int = 0


def due(
    rows: Sequence[VersionRow], retention: Retention, *, kept: Collection[int] = (), hot: Collection[int] = ()
) -> Due:
    """What a policy says of the versions of one run.

    Parameters
    ----------
    rows
        All versions of the run.
    retention
        What is asked for.
    kept
        Numbers of versions that stay as they are: tagged ones, and those that another run's version follows.
    hot
        Numbers of versions that stay hot: they become coarse, or lose tensors, once they are encoded.
    """
    ordered = next(by_run(rows), [])
    stays = {*kept, *_best(ordered, retention.exact_best)}
    forgotten = []
    if retention.keep_last is not None:
        stays_there = stays | first_of_every(ordered, retention.keep_every)
        stays_there |= _latest(ordered, retention.keep_last)
        forgotten = [row for row in ordered if row.number not in stays_there]
    stays |= {row.number for row in forgotten} | set(hot) | first_of_every(ordered, retention.exact_every)
    thinned, dropped = [], []
    if retention.exact_last is not None:
        exact = stays | _latest(ordered, retention.exact_last)
        thinned = [row for row in ordered if row.fidelity == "exact" and row.number not in exact]
    if retention.kept_whole is not None:
        whole = stays | _latest(ordered, retention.kept_whole)
        dropped = [row for row in ordered if not {*row.dropped}.issuperset(retention.drop) and row.number not in whole]
    return Due(forgotten, thinned, dropped)


def retain(
    repository: Repository,
    run: str | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> RetainReport:
    """Do what the policies of all runs, or of one, say of older versions; what garbage there is then may be freed.

    Killed at any moment it leaves versions as they were, or as the policy says; what is left is done the next time.

    Parameters
    ----------
    run
        Of this run; by default of all.
    progress
        Called with numbers of bytes that were encoded.

    Raises
    ------
    DiskFullError
        There is no room to describe a version again; the others were forgotten.
    IntegrityError
        A version that is to become coarse or to lose tensors is damaged, or what is stored against it.
    """
    report = RetainReport()
    full = None
    runs = [(name, policy) for name, policy in _policies(repository, run) if policy.retention]
    for name, policy in runs:
        found = _due(repository, name, policy)
        try:
            dropped, thinned = _describe_again(repository, name, policy, found, progress)
            report.dropped += dropped
            report.thinned += thinned
        except DiskFullError as error:
            full = error  # What goes now makes room for the next time.
        if found.forgotten:
            with reserve.spent(repository.path):
                # Looked up once more: what was tagged or forked meanwhile stays.
                report.forgotten += repository.catalog.commit(partial(_forget_due, repository, name, policy))
    if runs and _is_worth_it(repository):
        with suppress(LockedError):  # Whoever is at work comes first; the garbage can wait.
            report.freed = gc(repository, patience=_PATIENCE).bytes
    if full is not None:
        raise full
    return report


def expected(repository: Repository, run: str | None = None, retention: Retention | None = None) -> RetainReport:
    """What `retain` would do; with `retention`, what it would do if that were set. Nothing is decoded."""
    report = RetainReport()
    own = set() if run is not None or retention is None else set(repository.catalog.policies())
    for name, policy in _policies(repository, run):
        if name not in own:
            policy = policy if retention is None else replace(policy, retention=retention)
            found, globs = _due(repository, name, policy), policy.retention.drop
            report.forgotten += found.forgotten
            gone = {row.number: going(StoredVersion(repository, row), globs) for row in found.dropped}
            report.thinned += [
                row for row in found.thinned if may_have_any(StoredVersion(repository, row), gone.get(row.number, ()))
            ]
            report.dropped += [
                replace(row, dropped=with_globs(row.dropped, globs)) for row in found.dropped if gone[row.number]
            ]
    return report


def outlived(repository: Repository, run: str, step: int) -> bool:
    """Whether a version of a run would be forgotten, once others are stored, if it were stored at a step."""
    retention = policy_of(repository.catalog, run).retention
    with suppress(NotFoundError):
        rows = repository.catalog.versions(run)
        if retention.keep_last is not None and all(row.step is not None for row in rows):
            later = [row.step or 0 for row in rows if (row.step or 0) > step]
            every = retention.keep_every
            before = {(row.step or 0) // every for row in rows if (row.step or 0) < step} if every else set()
            return len(later) >= retention.keep_last and (every is None or step // every in before)
    return False


def _forget_due(repository: Repository, run: str, policy: Policy) -> list[VersionRow]:
    return forget(repository, _due(repository, run, policy).forgotten).versions


def _policies(repository: Repository, run: str | None) -> list[tuple[str, Policy]]:
    names = [known.name for known in repository.catalog.runs()] if run is None else [run]
    return [(name, policy_of(repository.catalog, name)) for name in names]


def _due(repository: Repository, run: str, policy: Policy) -> Due:
    catalog = repository.catalog
    everything = catalog.versions()
    rows = [row for row in everything if row.run == run]
    own = {row.number for row in rows}
    followed = {row.parent for row in everything if row.run != run and row.parent is not None}
    kept = {*catalog.tags().values(), *followed}
    latest = sorted(own)[-policy.kept_hot :] if policy.kept_hot else []
    hot = {row.number for row in rows if row.hot} & set(latest)
    return due(rows, policy.retention, kept=kept, hot=hot)


def _describe_again(
    repository: Repository, run: str, policy: Policy, due_before: Due, progress: Callable[[int], None] | None
) -> tuple[list[VersionRow], list[VersionRow]]:
    """Let versions lose tensors and become coarse; returns those that did, also where others did the same meanwhile."""
    globs, found = policy.retention.drop, due_before
    for left in reversed(range(1 + len(found.dropped) + len(found.thinned))):
        try:
            dropped = _drop(repository, found.dropped, globs, progress)
            thinned = _thin(repository, found.thinned, policy, progress)
            break
        except ConflictError:  # Another process, or a thread of this one, was first with a version.
            if not left:
                raise
            found = _due(repository, run, policy)
    if found is not due_before:
        found = _due(repository, run, policy)
        dropped = [
            replace(row, dropped=with_globs(row.dropped, globs)) for row in _done(due_before.dropped, found.dropped)
        ]
        thinned = _done(due_before.thinned, found.thinned)
    return dropped, thinned


def _done(before: Iterable[VersionRow], after: Iterable[VersionRow]) -> list[VersionRow]:
    """Versions that were due, and are no more."""
    still = {row.number for row in after}
    return [row for row in before if row.number not in still]


def _drop(
    repository: Repository, rows: Sequence[VersionRow], globs: tuple[str, ...], progress: Callable[[int], None] | None
) -> list[VersionRow]:
    given_up = _had_nothing.setdefault(repository, set())
    rows = [row for row in rows if (row.uid, *globs) not in given_up]
    if not rows:
        return []
    found: list[VersionRow] = []
    with suppress(NotFoundError):  # Another process has forgotten one of them; the others have their turn next time.
        compact(repository, [row for row in rows if row.hot], progress=progress)
        found = drop(repository, rows, globs, progress=progress)
        given_up |= {(row.uid, *globs) for row in rows} - {(row.uid, *globs) for row in found}
    return found


def _thin(
    repository: Repository, rows: Sequence[VersionRow], policy: Policy, progress: Callable[[int], None] | None
) -> list[VersionRow]:
    given_up = _had_nothing.setdefault(repository, set())
    rows = [row for row in rows if row.uid not in given_up]
    if not rows:
        return []
    coarse = policy if policy.is_coarse else Policy("coarse")
    with suppress(NotFoundError):  # Another process has forgotten one of them; the others have their turn next time.
        compact(repository, [row for row in rows if row.hot], progress=progress)
        skipped = thin(repository, rows, coarse, progress=progress).skipped
        present = {row.number: row.fidelity for row in repository.catalog.versions()}
        given_up |= {row.uid for row in rows if row.number in skipped and present.get(row.number) == "exact"}
        return [row for row in rows if present.get(row.number) == "coarse"]
    return []


def _is_worth_it(repository: Repository) -> bool:
    """Whether much of what the packs hold is claimed by no version; some of that others are stored against."""
    packs = sum(pack.bytes for pack in repository.catalog.packs())
    claimed = sum(row.stored_bytes for row in repository.catalog.versions())
    return packs - claimed > _GARBAGE * packs


def _latest(ordered: Sequence[VersionRow], count: int) -> set[int]:
    """Numbers of the last versions, and of those ingested last: who resumes from an older one saves what is newest."""
    return {row.number for row in ordered[-count:]} | set(sorted(row.number for row in ordered)[-count:])


def _best(ordered: Sequence[VersionRow], wanted: Iterable[str]) -> set[int]:
    """Numbers of the versions with the least or the largest value of each metric, of several the first one."""
    found = set()
    for best in wanted:
        metric, _, sense = best.rpartition(":")
        values = {row.number: _number(row.metrics.get(metric)) for row in ordered}
        known = {number: value for number, value in values.items() if math.isfinite(value)}
        if known:
            found.add((min if sense == "min" else max)(known, key=known.__getitem__))
    return found


def _number(value: object) -> float:
    """A metric as a number; NaN where it is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
