"""Files that mark a step of a run, such as `best.pt` and `latest`: links, copies, texts that name it, final models."""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckstore.scanning.inputs import are_alike
from ckstore.scanning.steps import Planned
from ckstore.steps import without_numbers

_MARK = re.compile(r"(?<![a-z])(best|last|latest|final)(?![a-z])", re.IGNORECASE)
#: `latest` itself names the version ingested last.
_TAGS = {"latest": "last"}
#: Files that hold the name or the number of the last step, as DeepSpeed and Megatron write them.
_POINTERS = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}
_LONGEST = 200

#: Runs of one directory: the common part of the names, and the inputs.
Runs = list[tuple[str, list[Planned]]]


def mark_of(name: str) -> str:
    """Return the tag that a name means, empty without one.

    Examples
    --------
    >>> mark_of("model_best.pth.tar"), mark_of("latest.pt"), mark_of("model_final.pt"), mark_of("lasting.pt")
    ('best', 'last', 'final', '')
    """
    found = _MARK.search(name)
    return "" if found is None else _TAGS.get(found[1].lower(), found[1].lower())


def pointed_by(path: Path) -> Path | None:
    """Return the checkpoint next to a text file that names it; None if it is another file."""
    form = _POINTERS.get(path.name)
    with suppress(OSError, ValueError):
        if form is not None and path.stat().st_size < _LONGEST:
            named = path.with_name(form.format(path.read_text("utf-8").strip()))
            return named if named.parent == path.parent and named.exists() else None
    return None


def copy_of(path: Path, others: Iterable[Path]) -> Path | None:
    """Return the last of the other files that has the bytes of one; None without one."""
    with suppress(OSError):
        size = path.stat().st_size
        for other in reversed(list(others)):
            if other != path and other.stat().st_size == size and filecmp.cmp(path, other, shallow=False):
                return other
    return None


def with_final(several: Runs, names: Mapping[Path, frozenset[str]]) -> Runs:
    """Return the runs of one directory; a marked input of its own becomes a version of the only run that is alike.

    Its step comes from its contents, as those of the run, and is none of these; or it has none.
    """
    alone = [run for run in several if len(run[1]) == 1 and mark_of(run[1][0].path.name)]
    series = [(template, list(planned)) for template, planned in several if (template, planned) not in alone]
    for template, [item] in alone:
        like = [
            planned
            for _, planned in series
            if len(planned) > 1
            and planned[0].path.suffix == item.path.suffix
            and are_alike(names[planned[0].path], names[item.path])
        ]
        if len(like) == 1 and _fits(item, like[0]):
            like[0].append(replace(item, tags=(mark_of(item.path.name),)))
        else:
            series.append((template, [item]))
    return series


def _fits(item: Planned, planned: Sequence[Planned]) -> bool:
    if item.step is None:
        return True
    sources, steps = {one.step_from for one in planned}, {one.step for one in planned}
    return item.step_from == "content" and sources == {"content"} and item.step not in steps


def with_tags(proposed: Sequence[Planned], marks: Mapping[Path, Path]) -> list[Planned]:
    """Return a plan with the tags of its versions; `marks` has the versions' paths by those of the marking files."""
    tags: dict[str, list[str]] = {}
    places = {os.path.realpath(item.path): item for item in proposed if item.run}
    for mark, path in marks.items():
        name, place = mark_of(mark.name), os.path.realpath(path)
        if name and place in places:
            tags.setdefault(place, []).append(name)
    return [
        replace(item, tags=tuple(dict.fromkeys([*item.tags, *tags.get(os.path.realpath(item.path), ())])))
        if item.run
        else item
        for item in proposed
    ]


def distinct_tags(planned: Sequence[Planned], taken: Mapping[str, str], runs: Iterable[str]) -> list[Planned]:
    """Return a plan in which each tag is of one run: the tags of several become `RUN/best`.

    `taken` has the runs of the store's tags, `runs` the names of its runs.
    """
    owners: dict[str, set[str]] = {}
    for item in planned:
        for name in item.tags:
            owners.setdefault(name, {taken[name]} if name in taken else set()).add(item.run)
    no_tags = {*runs, *(item.run for item in planned)}

    def chosen(item: Planned, name: str) -> str:
        return name if owners[name] == {item.run} and name not in no_tags else f"{item.run}/{name}"

    return [
        replace(item, tags=tuple(found for name in item.tags if (found := chosen(item, name)) not in no_tags))
        for item in planned
    ]


def is_in_series(name: str) -> bool:
    """Return whether the name of a file has a number that may tell it from others."""
    return without_numbers(name) != name
