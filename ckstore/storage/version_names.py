"""Names of versions: a number, a tag, `latest`, `run@step`, a run, or a prefix of an id."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from ckstore.errors import NotFoundError
from ckstore.runtime.provenance import own_metrics
from ckstore.steps import step_of_text
from ckstore.storage.names import AT, BETWEEN, BY_METRIC, ID_PREFIX, LATEST
from ckstore.storage.rows import RunRow, VersionRow, metric_value

#: Names of metrics whose lower values are better.
_LOWER_IS_BETTER = re.compile(
    r"loss|err|cross.?entropy|xent|perplexity|ppl|nll|divergence|mse|mae|mape|brier|lpips|bits.?per"
    r"|(?<![a-z])(?:ce|kl|wer|cer|eer|ece|fid|bpb|bpc)(?![a-z])",
    re.I,
)
# SQLite's integers; a longer sequence of digits can still be a prefix of an id.
_LARGEST_NUMBER = 2**63 - 1
_SUGGESTIONS = 3


class Versions(Protocol):
    """The queries that resolve names; the catalog implements them."""

    def version(self, number: int) -> VersionRow:
        """Return the version with a number; raise `NotFoundError`."""

    def versions(self, run: str | None = None) -> list[VersionRow]:
        """Return all versions by number, or those of one run."""

    def runs(self) -> list[RunRow]:
        """Return all runs."""

    def tags(self) -> dict[str, int]:
        """Return version numbers by tag."""

    def tagged(self, tag: str) -> int | None:
        """Return the number of the version with a tag, or None."""

    def latest(self) -> VersionRow | None:
        """Return the latest version."""

    def highest(self, run: str) -> VersionRow | None:
        """Return the version of a run with the highest step; without steps, the latest."""

    def at_step(self, run: str, step: int, *, superseded: bool = False) -> VersionRow | None:
        """Return the version at a step of a run, or the latest superseded one."""

    def extreme(self, metric: str, run: str | None, *, lowest: bool) -> VersionRow | None:
        """Return the version with the lowest or highest value of a metric, without superseded ones."""

    def with_uid(self, prefix: str) -> list[VersionRow]:
        """Return the versions whose ids have this prefix."""


def resolve(catalog: Versions, spec: str | int) -> VersionRow:
    """Return the version with a name.

    `spec` is, in this order: the number of a version, a tag, `latest` (ingested last), `run@step`, `run@latest` or the
    name of a run (its version with the highest step; without steps, the one ingested last), `least:METRIC`,
    `most:METRIC`, `best:METRIC` (the lowest value of a loss or error, the highest of another metric), also of one run
    as in `gpt@best:val_loss`, or a unique prefix of an id, at least four hexadecimal characters. A superseded version
    has the name of a run, step or metric only if no other version has it.

    Raises
    ------
    NotFoundError
        No version has that name, or several ids have that prefix; the message names near matches.
    """
    text = str(spec).strip()
    number = int(text) if text.isascii() and text.isdecimal() else -1
    if 0 <= number <= _LARGEST_NUMBER:
        try:
            return catalog.version(number)
        except NotFoundError:
            if isinstance(spec, int):
                raise
    tagged = catalog.tagged(text)
    if tagged is not None:
        return catalog.version(tagged)
    found = catalog.latest() if text == LATEST else _of_run(catalog, text)
    if found is None:
        found = _by_metric(catalog, text)
    if found is None:
        found = _by_uid(catalog, text.lower())
    if found is None:
        raise NotFoundError(f"Unknown version {text}{_near(catalog, text)}; see `ckstore log`.")
    return found


def _of_run(catalog: Versions, text: str) -> VersionRow | None:
    run, separator, step = text.rpartition(AT)
    if separator:
        if step == LATEST:
            return catalog.highest(run)
        number = step_of_text(step)
        if number is not None:
            found = catalog.at_step(run, number) or catalog.at_step(run, number, superseded=True)
            if found is not None:
                return found
    return catalog.highest(text)


def _by_metric(catalog: Versions, text: str) -> VersionRow | None:
    """Return the version with the extreme value of a metric, the first of equal ones; None for another name."""
    named = BY_METRIC.fullmatch(text)
    if named is None:
        return None
    run, _, metric = named.groups()
    lowest = is_lowest(named)
    if (found := catalog.extreme(metric, run, lowest=lowest)) is not None:
        return found
    rows = catalog.versions(run)
    numbers = {row.number: value for row in rows if (value := metric_value(row.metrics.get(metric))) is not None}
    if not numbers:
        known = sorted({name for row in rows for name in own_metrics(row.metrics)})
        hint = f"there are {', '.join(known)}" if known else "`ckstore metric` adds one"
        raise NotFoundError(f"No version has a number as metric {metric}; {hint}.")
    return catalog.version((min if lowest else max)(numbers, key=numbers.__getitem__))


def is_lowest(named: re.Match[str]) -> bool:
    """Return whether a name by metric, as `BY_METRIC` matches it, means the lowest value."""
    return named[2] == "least" or (named[2] == "best" and is_better_low(named[3]))


def is_better_low(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name."""
    return _LOWER_IS_BETTER.search(metric) is not None


def _by_uid(catalog: Versions, prefix: str) -> VersionRow | None:
    if not ID_PREFIX.fullmatch(prefix):
        return None
    found = catalog.with_uid(prefix)
    if len(found) > 1:
        listed = ", ".join(version.uid[: len(prefix) + 4] for version in found[:_SUGGESTIONS])
        raise NotFoundError(
            f"{len(found)} versions have ids that begin with {prefix} ({listed}); give more characters."
        )
    return found[0] if found else None


def near_names(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that are most like a text; a name that ends with it after a slash comes first."""
    from difflib import get_close_matches

    known = list(names)
    ends = [name for name in known if name.endswith(f"/{text}")]
    return list(dict.fromkeys([*ends, *get_close_matches(text, known, n=_SUGGESTIONS)]))[:_SUGGESTIONS]


def _near(catalog: Versions, text: str) -> str:
    if BETWEEN in text:
        return ": a range, in place of one version"
    run, separator, step = text.rpartition(AT)
    names = [*catalog.tags(), *(row.name for row in catalog.runs())]
    if separator and catalog.tagged(step) is not None:
        return f" (near: {step})"
    if separator and run in names:
        steps = [version.step for version in catalog.versions(run) if version.step is not None]
        # A longer sequence of digits is no step, but has near ones.
        asked = int(step) if step.isdecimal() else step_of_text(step)
        if asked is not None and asked >= 0:
            near = sorted(steps, key=lambda other: abs(other - asked))[:_SUGGESTIONS]
            names = [f"{run}@{other}" for other in near]
            return f" (near: {', '.join(names)})" if names else ""
        names = [f"{run}@{other}" for other in steps]
    elif separator:  # If the run exists without that step, suggest the run.
        runs = near_names(run, names)
        matches = [name if _of_run(catalog, f"{name}@{step}") is None else f"{name}@{step}" for name in runs]
        return f" (near: {', '.join(matches)})" if matches else ""
    matches = near_names(text, names)
    return f" (near: {', '.join(matches)})" if matches else ""
