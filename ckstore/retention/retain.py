"""Retain: applies a run's retention policy to its older versions.

due(rows, retention, ...)      # selects the versions; a pure function of the catalog's rows
drop(...)                      # prunes tensors of versions, each in its own commit
thin(...)                      # makes versions coarse, each in its own commit
forget(...)                    # forgets versions, in the transaction that selected them
gc(...)                        # if there is enough garbage and no other writer

Forgetting comes last: it changes which version is the first of N steps.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ckstore.commit.naming import policy_of
from ckstore.errors import ConflictError, DiskFullError, LockedError, NotFoundError
from ckstore.gc.collect import gc
from ckstore.gc.kept import excess, is_short
from ckstore.policy import Policy, Retention
from ckstore.reading.stored_version import StoredVersion
from ckstore.retention.forget import forget
from ckstore.retention.selection import by_run, first_of_every, last_of
from ckstore.storage import durable, reserve
from ckstore.storage.rows import metric_value
from ckstore.writing.drop import drop, going, with_globs
from ckstore.writing.encode import encode
from ckstore.writing.thin import may_have_any, thin

if TYPE_CHECKING:
    from ckstore.repository import Repository
    from ckstore.storage.rows import VersionRow

#: Garbage is collected if no version claims at least this fraction of the packs' bytes.
_GARBAGE = 0.1

#: Versions that are read at first to find the oldest ones.
_PAGE = 100

#: Seconds to wait for other writers before a collection is postponed.
_PATIENCE = 2.0

#: Seconds after which all rows of versions are proved again, and when that was last.
_PROOF = 60.0
_proved: WeakKeyDictionary[Repository, float] = WeakKeyDictionary()

#: Ids of versions without exact values to drop, or, followed by globs, without matching tensors, for each repository:
#: it takes reading them to find out.
_had_nothing: WeakKeyDictionary[Repository, set[tuple[str, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Due:
    """The versions of a run to forget, to make coarse and to prune, in order.

    The `tagged` ones stay unchanged only because of their tags.
    """

    forgotten: list[VersionRow]
    thinned: list[VersionRow]
    dropped: list[VersionRow]
    tagged: list[VersionRow] = field(default_factory=list)


@dataclass(slots=True)
class RetainReport:
    """Result of applying retention policies, or a prediction.

    Attributes
    ----------
    forgotten, thinned, dropped
        Rows of the versions that were forgotten, became coarse, and lost tensors: `dropped` rows as after the change,
        the others as before.
    tagged
        Rows of the versions that stay because of their tags.
    freed
        Freed bytes; 0 if the collection was postponed.

    Examples
    --------
    >>> store.retain(dry_run=True)
    RetainReport(forgotten=[], thinned=[], dropped=[], tagged=[], freed=0)
    """

    forgotten: list[VersionRow] = field(default_factory=list)
    thinned: list[VersionRow] = field(default_factory=list)
    dropped: list[VersionRow] = field(default_factory=list)
    tagged: list[VersionRow] = field(default_factory=list)
    freed: int = 0


#: Numbers of the versions that policies have forgotten, thinned and dropped tensors of.
Changed = dict[str, set[int]]


def note_changes(changed: Changed, report: RetainReport) -> None:
    """Add the versions of a report."""
    for name in ("forgotten", "thinned", "dropped"):
        changed.setdefault(name, set()).update(row.number for row in getattr(report, name))


def due(
    rows: Sequence[VersionRow], retention: Retention, *, kept: Collection[int] = (), hot: Collection[int] = ()
) -> Due:
    """Apply a retention policy to all versions of one run.

    `kept` are numbers of protected versions: tagged ones, and parents of another run's versions. Versions in `hot` stay
    hot; they become coarse, or lose tensors, after they are encoded. Superseded versions come first: they are among the
    latest N only if the run has fewer others.
    """
    ordered = next(by_run([row for row in rows if not row.superseded]), [])
    superseded = next(by_run([row for row in rows if row.superseded]), [])
    every = [*superseded, *ordered]

    def latest(count: int | str) -> set[int]:
        if isinstance(count, str):
            return last_of(every, count)
        room = max(count - len(ordered), 0)
        return _latest(ordered, count) | {number for number in _latest(superseded, room) if room}

    stays = {*kept, *_best(ordered, retention.exact_best)}
    forgotten = []
    if retention.keep_last is not None:
        remaining = stays | first_of_every(ordered, retention.keep_every)
        remaining |= latest(retention.keep_last)
        forgotten = [row for row in every if row.number not in remaining]
    stays |= {row.number for row in forgotten} | set(hot) | first_of_every(ordered, retention.exact_every)
    thinned, dropped = [], []
    if retention.exact_last is not None:
        exact = stays | latest(retention.exact_last)
        thinned = [row for row in every if row.fidelity == "exact" and row.number not in exact]
    if retention.kept_whole is not None:
        whole = stays | latest(retention.kept_whole)
        dropped = [row for row in every if not {*row.dropped}.issuperset(retention.drop) and row.number not in whole]
    return Due(forgotten, thinned, dropped)


def retain(
    repository: Repository,
    run: str | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> RetainReport:
    """Apply the retention policies of all runs, or of one; collect garbage if there is enough.

    If the process is killed, each version is unchanged or fully processed; the next call does the rest. `progress` is
    called with numbers of encoded bytes. Raises `DiskFullError` if a version's metadata cannot be rewritten (versions
    to forget were forgotten), `IntegrityError` if a version to thin or prune, or an object stored against it, is
    damaged.
    """
    report = RetainReport()
    full = None
    runs = [(name, policy) for name, policy in _policies(repository, run) if policy.retention]
    for name, policy in runs:
        found = _due(repository, name, policy)
        report.tagged += found.tagged
        try:
            dropped, thinned = _describe_again(repository, name, policy, found, progress)
            report.dropped += dropped
            report.thinned += thinned
        except DiskFullError as error:
            full = error  # Forgetting frees space for the next call.
        if found.forgotten:
            with reserve.spent(repository.path):
                # Select again: versions that were tagged or forked since stay.
                report.forgotten += repository.catalog.commit(partial(_forget_due, repository, name, policy))
    if runs and _is_worth_it(repository):
        with suppress(LockedError):  # Other writers come first; the garbage can wait.
            report.freed = gc(repository, patience=_PATIENCE).bytes
    report.forgotten += _within_quota(repository, report)
    if full is not None:
        raise full
    return report


def _within_quota(repository: Repository, report: RetainReport) -> list[VersionRow]:
    """Forget the oldest versions of all runs, and free their bytes, until the store has no more than its policy allows.

    Deltas may need the objects of a forgotten version, so that it frees less than it had added: then others follow.
    """
    found: list[VersionRow] = []
    with suppress(LockedError):  # Other writers come first; the next call does the rest.
        while excess(repository) > 0:
            report.freed += gc(repository, patience=_PATIENCE).bytes
            with reserve.spent(repository.path):
                oldest = repository.catalog.commit(
                    lambda: forget(repository, over_quota(repository), for_good=True).versions
                )
            found += oldest
            if not oldest:
                break
    return found


def over_quota(
    repository: Repository, without: Collection[int] = (), retention: Retention | None = None
) -> list[VersionRow]:
    """Return the versions to forget next, oldest first, if the store exceeds the limit of its policy or another one."""
    catalog = repository.catalog
    left = excess(repository, retention)
    found: list[VersionRow] = []
    if left > 0:
        runs = [known.name for known in catalog.runs()]
        stays = {*without, *catalog.tags().values()}.union(*map(catalog.followed, runs))
        stays |= {row.number for name in runs for row in (catalog.latest(name), catalog.highest(name)) if row}
        left -= sum(catalog.version(number).stored_bytes for number in without)
        known = -1
        rows: list[VersionRow] = []
        while left > 0 and known < len(rows):
            known, rows = len(rows), catalog.oldest(4 * len(rows) + _PAGE)
            for row in rows[known:]:
                if left > 0 and row.number not in stays:
                    left -= row.stored_bytes
                    found.append(row)
    return found


def expected(repository: Repository, run: str | None = None, retention: Retention | None = None) -> RetainReport:
    """Predict the result of `retain`, optionally under another `retention`. Nothing is decoded."""
    report = RetainReport()
    own = set() if run is not None or retention is None else set(repository.catalog.policies())
    for name, policy in _policies(repository, run):
        if name not in own:
            policy = policy if retention is None else replace(policy, retention=retention)
            found, globs = _due(repository, name, policy), policy.retention.drop
            report.forgotten += found.forgotten
            report.tagged += found.tagged
            gone = {row.number: going(StoredVersion(repository, row), globs) for row in found.dropped}
            report.thinned += [
                row for row in found.thinned if may_have_any(StoredVersion(repository, row), gone.get(row.number, ()))
            ]
            report.dropped += [
                replace(row, dropped=with_globs(row.dropped, globs)) for row in found.dropped if gone[row.number]
            ]
    report.forgotten += over_quota(repository, {row.number for row in report.forgotten}, retention)
    return report


def outlived(repository: Repository, run: str, step: int) -> bool:
    """Return whether the run's policy would forget a version that is stored at this step, after the next ingests."""
    catalog, retention = repository.catalog, policy_of(repository.catalog, run).retention
    last, every = retention.keep_last, retention.keep_every
    if not isinstance(last, int) or isinstance(every, str):
        return False
    above = sys.maxsize
    for _ in range(last):
        row = catalog.below(run, above)
        if row is None or row.step is None or row.step <= step:
            return False
        above = row.step
    row = catalog.below(run, step)
    is_kept = every is not None and (row is None or row.step is None or row.step // every < step // every)
    return not is_kept and all(row.step is not None for row in catalog.versions(run) if not row.superseded)


def _forget_due(repository: Repository, run: str, policy: Policy) -> list[VersionRow]:
    _check_parents(repository)
    return forget(repository, _due(repository, run, policy).forgotten, for_good=True).versions


def _check_parents(repository: Repository) -> None:
    """Raise `IntegrityError` if a row of any run is damaged: it may name a parent that has to stay.

    All rows are read, so seldom.
    """
    now = time.monotonic()
    if now - _proved.get(repository, -math.inf) >= _PROOF:
        repository.catalog.prove_versions()
        _proved[repository] = now


def _policies(repository: Repository, run: str | None) -> list[tuple[str, Policy]]:
    names = [known.name for known in repository.catalog.runs()] if run is None else [run]
    return [(name, policy_of(repository.catalog, name)) for name in names]


def _due(repository: Repository, run: str, policy: Policy) -> Due:
    catalog = repository.catalog
    rows = catalog.versions(run) if catalog.has_run(run) else []
    followed = catalog.followed(run)
    tagged = set(catalog.tags().values())
    present = sorted(row.number for row in rows if not row.superseded)
    latest = present[-policy.kept_hot :] if policy.kept_hot else []
    hot = {row.number for row in rows if row.hot} & set(latest)
    found = due(rows, policy.retention, kept=tagged | followed, hot=hot)
    untagged = due(rows, policy.retention, kept=followed, hot=hot)
    changed = {row.number for row in (*untagged.forgotten, *untagged.thinned, *untagged.dropped)}
    return replace(found, tagged=[row for row in rows if row.number in changed & tagged])


def _describe_again(
    repository: Repository, run: str, policy: Policy, due_before: Due, progress: Callable[[int], None] | None
) -> tuple[list[VersionRow], list[VersionRow]]:
    """Prune and thin the due versions; return the processed rows, including rows that other processes did first."""
    globs, found = policy.retention.drop, due_before
    for left in reversed(range(1 + len(found.dropped) + len(found.thinned))):
        try:
            dropped = _drop(repository, found.dropped, globs, progress)
            thinned = _thin(repository, found.thinned, policy, progress)
            break
        except ConflictError:  # Another process or thread processed a version first.
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
    """Return versions that were due before, and no longer are."""
    still = {row.number for row in after}
    return [row for row in before if row.number not in still]


def _drop(
    repository: Repository, rows: Sequence[VersionRow], globs: tuple[str, ...], progress: Callable[[int], None] | None
) -> list[VersionRow]:
    found: list[VersionRow] = []
    with suppress(NotFoundError):  # Another process forgot a version; the next call does the rest.
        if rows := _encoded(repository, rows, globs, progress):
            found = drop(repository, rows, globs, progress=progress)
            _had_nothing[repository] |= {(row.uid, *globs) for row in rows} - {(row.uid, *globs) for row in found}
    return found


def _thin(
    repository: Repository, rows: Sequence[VersionRow], policy: Policy, progress: Callable[[int], None] | None
) -> list[VersionRow]:
    coarse = policy if policy.is_coarse else Policy("coarse")
    with suppress(NotFoundError):  # Another process forgot a version; the next call does the rest.
        if rows := _encoded(repository, rows, (), progress):
            skipped = thin(repository, rows, coarse, progress=progress).skipped
            present = _fidelities(repository, rows)
            _had_nothing[repository] |= {
                (row.uid,) for row in rows if row.number in skipped and present.get(row.number) == "exact"
            }
            return [row for row in rows if present.get(row.number) == "coarse"]
    return []


def _fidelities(repository: Repository, rows: Iterable[VersionRow]) -> dict[int, str]:
    """Return the present fidelity of versions, by number, without forgotten ones."""
    found = {}
    for row in rows:
        with suppress(NotFoundError):
            found[row.number] = repository.catalog.version(row.number).fidelity
    return found


def _encoded(
    repository: Repository, rows: Sequence[VersionRow], globs: tuple[str, ...], progress: Callable[[int], None] | None
) -> list[VersionRow]:
    """Return the versions that may have something to drop; encode the hot ones first."""
    had_nothing = _had_nothing.setdefault(repository, set())
    rows = [row for row in rows if (row.uid, *globs) not in had_nothing]
    if rows:
        _check_parents(repository)
        encode(repository, [row for row in rows if row.hot], progress=progress)
    return rows


def _is_worth_it(repository: Repository) -> bool:
    """Return whether enough bytes of the packs are claimed by no version; some of these may be bases."""
    totals = repository.catalog.totals()
    kept, until = repository.catalog.kept()
    if until <= durable.timestamp() or is_short(repository):
        kept = 0
    return totals.bytes - totals.stored_bytes - kept > _GARBAGE * totals.bytes


def _latest(ordered: Sequence[VersionRow], count: int) -> set[int]:
    """Return numbers of the last versions by step and by ingest: a resumed run may save lower steps later."""
    return last_of(ordered, count) | set(sorted(row.number for row in ordered)[-count:])


def _best(ordered: Sequence[VersionRow], wanted: Iterable[str]) -> set[int]:
    """Return numbers of the best version by each metric; the first if several are equal."""
    found = set()
    for best in wanted:
        metric, _, sense = best.rpartition(":")
        values = ((row.number, metric_value(row.metrics.get(metric))) for row in ordered)
        known = {number: value for number, value in values if value is not None}
        if known:
            found.add((min if sense == "min" else max)(known, key=known.__getitem__))
    return found
