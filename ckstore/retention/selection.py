"""Selects the versions that a verb acts on: by name, range or run, without those to keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckstore.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from ckstore.storage.catalog import Catalog
    from ckstore.storage.rows import VersionRow

#: Separator of the two ends of a range.
_BETWEEN = ".."


def select_versions(
    catalog: Catalog,
    specs: Sequence[str | int] | str | int,
    run: str | None = None,
    keep_every: int | None = None,
    keep_last: int | None = None,
    keep_tagged: bool = False,
) -> list[VersionRow]:
    """Return the versions to act on: the named ones without the kept ones.

    Kept versions are counted in each run separately, in the order of steps. If one of the run's named versions has no
    step, they are counted in the order of numbers.

    Parameters
    ----------
    catalog : Catalog
    specs : sequence of str or int
        Names of versions, or a single name, as in `names.resolve`, and ranges `A..B`: A, B and all versions of their
        run between them. If A and B are numbers, versions are compared by number, otherwise by step.

    run : str, optional
        Select all versions of this run, instead of `specs`.
    keep_every : int, optional
        Keep the first of the named versions in every this many steps: in 0 to 99, in 100 to 199 and so on for 100.
        Versions without a step count by their number instead.
    keep_last : int, optional
        Keep this many of the last named versions.
    keep_tagged : bool
        Keep the named versions that have a tag.

    Returns
    -------
    list of VersionRow
        By number, each once.

    Raises
    ------
    NotFoundError
        A version or run does not exist.
    UsageError
        Both or neither of `specs` and `run` are given, the ends of a range are not in one run, or it runs backwards.
    """
    if isinstance(specs, str | int):
        specs = [specs]
    if specs and run is not None:
        raise UsageError("Give versions or --run, not both.")
    if not specs and run is None:
        raise UsageError("Name versions, ranges such as gpt@100..gpt@900, or a --run.")
    for option, value in (("--keep-every", keep_every), ("--keep-last", keep_last)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value} keeps nothing; give 1 or more, or leave it out.")
    rows = catalog.versions(run) if run is not None else [row for spec in specs for row in _named(catalog, spec)]
    kept = set(catalog.tags().values()) if keep_tagged else set()
    for ordered in by_run(rows):
        if keep_every is not None:
            kept |= first_of_every(ordered, keep_every)
        if keep_last is not None:
            kept |= {row.number for row in ordered[-keep_last:]}
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


def first_of_every(ordered: Iterable[VersionRow], steps: int | None) -> set[int]:
    """Return the number of the first version in every `steps` steps; without a step, a version's number counts."""
    if steps is None:
        return set()
    first: dict[tuple[bool, int], int] = {}
    for row in ordered:
        place = row.number if row.step is None else row.step
        first.setdefault((row.step is None, place // steps), row.number)
    return set(first.values())


def _named(catalog: Catalog, spec: str | int) -> list[VersionRow]:
    """Return the versions of one name or range."""
    text = str(spec).strip()
    if _BETWEEN not in text:
        return [catalog.resolve(spec)]
    try:
        # The name of a run or tag may contain two dots.
        return [catalog.resolve(text)]
    except NotFoundError:
        return _range(catalog, text)


def _range(catalog: Catalog, text: str) -> list[VersionRow]:
    failure: NotFoundError | None = None
    for left, right in _cuts(text):
        try:
            first, last = catalog.resolve(left), catalog.resolve(right)
        except NotFoundError as error:
            failure = failure or error
            continue
        return _between(catalog, text, first, last, by_number=left.isdecimal() and right.isdecimal())
    if failure is None:
        raise UsageError(f"The range {text} has no two ends; give both, such as gpt@100..gpt@900.")
    raise failure


def _cuts(text: str) -> Iterator[tuple[str, str]]:
    """Yield all ways to split a text into a range."""
    place = text.find(_BETWEEN)
    while place >= 0:
        left, right = text[:place].strip(), text[place + len(_BETWEEN) :].strip()
        if left and right:
            yield left, right
        place = text.find(_BETWEEN, place + 1)


def _between(catalog: Catalog, text: str, first: VersionRow, last: VersionRow, *, by_number: bool) -> list[VersionRow]:
    if first.run != last.run:
        raise UsageError(
            f"The range {text} begins in run {first.run} and ends in run {last.run}; give both ends in one run."
        )

    def place(row: VersionRow) -> int | None:
        return row.number if by_number else row.step

    low, high = place(first), place(last)
    if low is None or high is None:
        stepless = first if low is None else last
        raise UsageError(
            f"Version {stepless.number} has no step, but the range {text} is by steps;"
            f" name both ends by number: {first.number}..{last.number}."
        )
    if low > high:
        raise UsageError(f"The range {text} runs backwards; give its earlier end first.")
    places = [(row, place(row)) for row in catalog.versions(first.run)]
    return [row for row, at in places if at is not None and low <= at <= high]
