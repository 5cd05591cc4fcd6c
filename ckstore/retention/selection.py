"""Selects the versions that a verb acts on: by name, range or run, without those to keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ckstore.errors import NotFoundError, UsageError
from ckstore.steps import periods_of, seconds_of, step_of_text
from ckstore.storage.names import AT, BETWEEN

if TYPE_CHECKING:
    from ckstore.storage.catalog import Catalog
    from ckstore.storage.rows import VersionRow


def select_versions(
    catalog: Catalog,
    specs: Sequence[str | int] | None,
    run: str | None = None,
    keep_every: int | str | None = None,
    keep_last: int | str | None = None,
    keep_tagged: bool = False,
) -> list[VersionRow]:
    """Return the versions to act on: the named ones, those of a run, or all, without the kept ones.

    Kept versions are counted in each run separately, in the order of steps, without superseded ones. If one of the
    run's named versions has no step, they are counted in the order of numbers; the last ones by step are kept, too. The
    result is ordered by number.

    `specs` are names of versions, as in `version_names.resolve`, and ranges `A..B`: A, B and all versions of their run
    between them, by number if A and B are numbers, otherwise by step, without superseded ones; A and B may have been
    forgotten. `keep_every` keeps the first of the named versions in every this many steps: in 0 to 99, in 100 to 199
    and so on for 100; see `periods_of` for texts. A `keep_last` such as `30d` keeps the versions of the 30 days before
    the run's last ingest. Raises `NotFoundError` if a version or run does not exist, `UsageError` if both `specs` and
    `run` are given, or a range runs backwards or over several runs.
    """
    if specs is not None and run is not None:
        raise UsageError("Give versions or `run`, not both.")
    for option, value in (("keep_every", keep_every), ("keep_last", keep_last)):
        if isinstance(value, int) and value < 1:
            raise UsageError(f"`{option}` {value} keeps nothing; give 1 or more, or leave it out.")
    rows = catalog.versions(run) if specs is None else [row for spec in specs for row in _named(catalog, spec)]
    kept = set(catalog.tags().values()) if keep_tagged else set()
    for ordered in by_run([row for row in rows if not row.superseded]):
        if keep_every is not None:
            kept |= first_of_every(ordered, keep_every)
        if keep_last is not None:
            kept |= last_of(ordered, keep_last)
    chosen = {row.number: row for row in rows if row.number not in kept}
    return [chosen[number] for number in sorted(chosen)]


def by_run(rows: Sequence[VersionRow]) -> Iterator[list[VersionRow]]:
    """Yield the versions of each run, each once, in the order of steps, or of numbers if a step is missing."""
    runs: dict[str, dict[int, VersionRow]] = {}
    for row in rows:
        runs.setdefault(row.run, {})[row.number] = row
    for found in runs.values():
        ordered = sorted(found.values(), key=lambda row: row.number)
        if all(row.step is not None for row in ordered):
            ordered.sort(key=lambda row: row.step or 0)
        yield ordered


def first_of_every(ordered: Sequence[VersionRow], every: int | str | None) -> set[int]:
    """Return the number of the first version in each period; without a step, a version's number counts.

    Hours and days begin as in UTC. For the periods see `periods_of`.
    """
    found: set[int] = set()
    for period in () if every is None else periods_of(every):
        first: dict[tuple[bool, int], int] = {}
        for row in sorted(ordered, key=lambda row: row.created) if period.is_time else ordered:
            no_step = row.step is None and not period.is_time
            place = _seconds(row) if period.is_time else row.number if row.step is None else row.step
            first.setdefault((no_step, int(place // period.size)), row.number)
        kept = list(first.values())
        found.update(kept if period.count is None else kept[-period.count :])
    return found


def last_of(ordered: Sequence[VersionRow], last: int | str) -> set[int]:
    """Return the numbers of the last versions: a number of them, or those of a time before the last ingest.

    That number of the highest steps belongs to them, even where versions without steps come later. The last ingest and
    the highest step always do: clocks of machines differ.
    """
    count = last if isinstance(last, int) else 1
    by_step = sorted(
        (row for row in ordered if row.step is not None and not row.superseded), key=lambda row: row.step or 0
    )
    found = {row.number for row in (*ordered[-count:], *by_step[-count:])}
    if isinstance(last, str) and ordered:
        end = _seconds(max(ordered, key=lambda row: row.number)) - seconds_of(last)
        found.update(row.number for row in ordered if _seconds(row) >= end)
    return found


def _seconds(row: VersionRow) -> float:
    return datetime.fromisoformat(row.created).timestamp()


def _named(catalog: Catalog, spec: str | int) -> list[VersionRow]:
    """Return the versions of one name or range."""
    text = str(spec).strip()
    if BETWEEN not in text:
        return [catalog.resolve(spec)]
    try:
        # The name of a metric may contain two dots.
        return [catalog.resolve(text)]
    except NotFoundError:
        return _range(catalog, text)


@dataclass(frozen=True, slots=True)
class _End:
    """An end of a range; the version at that number or step may have been forgotten, and its run be unknown."""

    run: str | None
    number: int | None
    step: int | None


def _range(catalog: Catalog, text: str) -> list[VersionRow]:
    failure: NotFoundError | None = None
    for left, right in _cuts(text):
        try:
            first, last = _end(catalog, left), _end(catalog, right)
            by_number = left.isdecimal() and right.isdecimal()
            for end, name in ((first, left), (last, right)):
                if end.run is None and not by_number:
                    catalog.resolve(name)
        except NotFoundError as error:
            failure = failure or error
            continue
        return _between(catalog, text, first, last, by_number=by_number)
    if failure is None:
        raise UsageError(f"The range {text} has no two ends; give both, such as gpt@100..gpt@900.")
    raise failure


def _cuts(text: str) -> Iterator[tuple[str, str]]:
    """Yield all ways to split a text into a range."""
    place = text.find(BETWEEN)
    while place >= 0:
        left, right = text[:place].strip(), text[place + len(BETWEEN) :].strip()
        if left and right:
            yield left, right
        place = text.find(BETWEEN, place + 1)


def _end(catalog: Catalog, text: str) -> _End:
    try:
        row = catalog.resolve(text)
    except NotFoundError:
        run, _, step = text.rpartition(AT)
        if text.isascii() and text.isdecimal() and int(text) <= catalog.last_number():
            return _End(None, int(text), None)
        number = step_of_text(step)
        if number is not None and catalog.has_run(run):
            return _End(run, None, number)
        raise
    return _End(row.run, row.number, row.step)


def _between(catalog: Catalog, text: str, first: _End, last: _End, *, by_number: bool) -> list[VersionRow]:
    run = last.run if first.run is None else first.run
    if last.run not in (None, run):
        raise UsageError(f"The range {text} begins in run {run} and ends in run {last.run}; give both ends in one run.")
    low, high = (first.number, last.number) if by_number else (first.step, last.step)
    if low is None or high is None:
        stepless = first if low is None else last
        raise UsageError(
            f"Version {stepless.number} has no step, but the range {text} is by steps;"
            f" name both ends by number: {first.number}..{last.number}."
        )
    if low > high:
        raise UsageError(f"The range {text} runs backwards; give its earlier end first.")
    places = [(row, row.number if by_number else row.step) for row in catalog.versions(run)]
    ends = first.number, last.number
    found = [
        row
        for row, at in places
        if at is not None and low <= at <= high and (by_number or not row.superseded or row.number in ends)
    ]
    if len(runs := {row.run for row in found}) > 1:
        raise UsageError(f"The range {text} has versions of the runs {', '.join(sorted(runs))}; name ends in one run.")
    return found
