"""Scans a folder of checkpoints and groups them into runs and steps, with reasons for the rest."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as shown

from ckstore.errors import InputError
from ckstore.formats.detect import is_pointer
from ckstore.formats.directory import is_marked, is_named_as_tensors, is_one
from ckstore.formats.sources import FileSource
from ckstore.scanning.inputs import are_alike, open_path, tensor_names
from ckstore.scanning.marked import copy_of, is_in_series, mark_of, pointed_by, with_final, with_tags
from ckstore.scanning.steps import Planned, plan_steps
from ckstore.steps import natural, without_numbers, without_words
from ckstore.storage.names import objection, suggested
from ckstore.storage.root import is_store

_log = logging.getLogger("ckstore")

_ENDINGS = re.compile(r"(?:\.[A-Za-z][A-Za-z0-9]{0,11})+$")
#: A word for steps before a number.
_STEP_WORD = re.compile(r"(?<![a-z])(?:steps?|iter(?:ation)?s?|checkpoints?|ckpts?|epochs?)[-_=. ]*$", re.IGNORECASE)
_DIGITS = re.compile(r"([0-9]+)")


@dataclass(slots=True)
class _Input:
    path: Path
    names: frozenset[str]
    #: The reason for the lack of tensors.
    why: str


def propose(folders: Sequence[Path], *, force: bool = False) -> list[Planned]:
    """Return everything in some folders: the inputs to store, by run and step, then files without tensors, by name.

    Last come checkpoints that are refused.

    Inputs of one directory whose names differ only in numbers, and whose tensors have mostly the same names, are a run.
    It is named after the directory and, if that has several runs, after the common part of the inputs' names. Inputs of
    different folders never share a run. A directory that is one checkpoint is one input, even a damaged or incomplete
    one. Stores and links to directories are left out, and so are links to files of the folder; a link to a checkpoint
    elsewhere is refused. A link to a step, a copy or a text that names it, such as `best.pt` or `latest`, is a tag of
    the step's version, and so is the name of a final model. With `force`, damaged files count as opaque bytes. Raise
    `InputError` for a folder that is no directory.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a directory; name one, or leave `recursive` out.")
    groups: dict[tuple[Path, str], list[list[_Input]]] = {}
    left: list[Planned] = []
    above: dict[Path, Path] = {}
    marks: dict[Path, Path] = {}
    for folder, path in _found(folders, left):
        if path == folder:
            above |= {path: path, path.parent: path.parent}
        above.setdefault(path.parent, folder)
        if (named := pointed_by(path)) is not None:
            marks[path] = named
            left.append(Planned(path, note=f"names {named.name}"))
            continue
        try:
            found = _input(path, force=force)
        except (InputError, OSError) as error:
            left.append(Planned(path, note=str(error), refused=_may_hold_tensors(path)))
            continue
        if not found.names:
            left.append(_without_tensors(path, found.why))
            continue
        alike = groups.setdefault((path.parent, without_numbers(path.name)), [])
        for group in alike:
            if are_alike(group[-1].names, found.names):
                group.append(found)
                break
        else:
            alike.append([found])
    copies = _copies(groups)
    left += [Planned(path, note=f"is a copy of {original.name}") for path, original in copies.items()]
    marks |= copies | {item.path: Path(os.path.realpath(item.path)) for item in left if item.path.is_symlink()}
    planned = with_tags(_named(above, groups, force=force), marks) + left
    return sorted(planned, key=lambda item: (not item.run, item.refused))


def _copies(groups: dict[tuple[Path, str], list[list[_Input]]]) -> dict[Path, Path]:
    """Take the copies of files of a series out of the groups, such as `best.pt`; return each with its original."""
    series = [found.path for (_, name), alike in groups.items() for group in alike for found in group if "#" in name]
    found: dict[Path, Path] = {}
    for (parent, _), alike in groups.items():
        for group in alike:
            path = group[0].path
            if len(group) > 1 or not path.is_file() or (is_in_series(path.name) and not mark_of(path.name)):
                continue
            near = [other for other in series if other.is_relative_to(parent) or parent.is_relative_to(other.parent)]
            original = copy_of(path, near)
            if original is not None:
                found[path] = original
                group.clear()
    for key, alike in list(groups.items()):
        groups[key] = [group for group in alike if group]
    return found


def _may_hold_tensors(path: Path) -> bool:
    """Return whether an input that cannot be read as a checkpoint may be one.

    Empty files and Git LFS pointers may be, if their names are those of files with tensors.
    """
    if path.is_dir() or is_named_as_tensors(path.name):
        return True
    try:
        with FileSource(path) as source:
            return source.size > 0 and not is_pointer(source)
    except InputError:
        return False


def _without_tensors(path: Path, why: str) -> Planned:
    """Return an input without readable tensors; one that is named after a format of tensors is refused."""
    note = f"holds no tensors: {why}" if why else "holds no tensors"
    return Planned(path, note=note, refused=bool(why) and is_named_as_tensors(path.name))


def _found(folders: Sequence[Path], left: list[Planned]) -> Iterator[tuple[Path, Path]]:
    """Yield each candidate once, after its folder."""
    seen: set[Path] = set()
    for folder in folders:
        for path in [folder] if _is_one(folder) else _candidates(folder, folder.resolve(), left):
            if path.absolute() not in seen:
                seen.add(path.absolute())
                yield folder, path


def _is_one(folder: Path) -> bool:
    """Return whether a folder that was named is one checkpoint because of its files, not only of its name."""
    with suppress(OSError):
        return is_marked(os.listdir(folder)) and is_one(folder)
    return False


def _candidates(directory: Path, folder: Path, left: list[Planned]) -> Iterator[Path]:
    """Yield files and directories that may be a checkpoint each, by name; others are added to `left`.

    A link to a file in the `folder`, such as `latest.pt`, is no checkpoint of its own.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: natural(entry.name))
    except OSError as error:
        left.append(_unread(directory, error))
        return
    for entry in entries:
        path = Path(entry.path)
        try:
            is_file = entry.is_file()
        except OSError as error:  # A link to itself, or an unreadable directory.
            left.append(_unread(path, error))
            continue
        if entry.is_dir(follow_symlinks=False):
            try:
                if is_store(path):
                    continue
                is_whole = is_one(path)
            except OSError as error:
                left.append(_unread(path, error))
                continue
            if is_whole:
                yield path
            else:
                yield from _candidates(path, folder, left)
        elif is_file and entry.is_symlink() and path.resolve().is_relative_to(folder):
            left.append(Planned(path, note=f"is a link to {os.readlink(path)}"))
        elif is_file:
            yield path
        else:
            left.append(_passed_over(path, folder))


def _passed_over(path: Path, folder: Path) -> Planned:
    """Return a link to a directory or to nothing, or a file such as a pipe; a possible checkpoint is refused."""
    if not path.is_symlink():
        return Planned(path, note="is no regular file")
    target = os.readlink(path)
    if not path.exists():
        return Planned(
            path, note=f"is a link to {target}, which does not exist", refused=is_named_as_tensors(path.name)
        )
    try:
        is_left_out = not path.resolve().is_relative_to(folder) and is_one(path)
    except OSError as error:
        return _unread(path, error)
    if is_left_out:
        return Planned(path, note=f"is a link to {target}; name that directory to store it", refused=True)
    return Planned(path, note=f"is a link to {target}")


def _unread(path: Path, error: OSError) -> Planned:
    """Return a path that cannot be read; only a link in a circle surely holds no checkpoint."""
    if error.errno == errno.ELOOP:
        return Planned(path, note=f"is a link that cannot be followed ({error.strerror})")
    return Planned(path, note=f"cannot be read ({error.strerror}); check its permissions", refused=True)


def _input(path: Path, *, force: bool) -> _Input:
    scanned = open_path(path, force=force, any_kind=True)
    scanned.close()
    names = frozenset().union(*map(tensor_names, scanned.files))
    why = next((why for layout in scanned.layouts for why in layout.bytes_for.values()), "")
    return _Input(path, names, why)


def _named(
    above: dict[Path, Path], groups: dict[tuple[Path, str], list[list[_Input]]], *, force: bool
) -> list[Planned]:
    """Return groups with the names of their runs, and steps; `above` maps each directory to its folder."""
    runs: dict[Path, list[tuple[str, list[Planned]]]] = {}
    for (parent, template), alike in groups.items():
        for group in alike:
            planned = plan_steps([found.path for found in group], force=force)
            is_alone = len(planned) == 1 and planned[0].step is None  # Then numbers are a part of its name.
            named = planned[0].path.name if is_alone else template
            runs.setdefault(parent, []).extend(_apart(planned) or [(named, planned)])
    names = {found.path: found.names for alike in groups.values() for group in alike for found in group}
    runs = {parent: with_final(several, names) for parent, several in runs.items()}
    proposed: list[Planned] = []
    taken: set[str] = set()
    for parent, several in runs.items():
        where = parent.relative_to(above[parent]).as_posix()
        directory = parent.resolve().name if where == "." else where
        for template, planned in several:
            if planned[0].path in above and planned[0].step is None:
                directory = planned[0].path.resolve().name
            name = f"{directory}/{_common(template)}" if len(several) > 1 else directory
            run = _free(suggested(name, "run" if where == "." else above[parent].resolve().name), taken)
            if reason := objection(name):
                _log.info("The run of %s is named %s: %s.", parent, run, _cannot(name, reason))
                planned = [replace(item, note=item.note or _cannot(name, reason)) for item in planned]
            proposed += [replace(item, run=run) for item in planned]
    first: dict[tuple[str, int | None], Planned] = {}
    for item in proposed:
        first.setdefault((item.run, item.step), item)
    return [_unique(item, first[item.run, item.step]) for item in proposed]


def _apart(planned: Sequence[Planned]) -> list[tuple[str, list[Planned]]]:
    """Return the runs of inputs that share steps, by a number in their names that tells runs apart.

    Such as `seed0_step100` and `seed1_step100`. Each run has the part of the names that its inputs share, with # for
    the step. No runs if no number of all names is the step, the other number is a step too, or two steps remain equal.
    """
    steps = [item.step for item in planned]
    if None in steps or len(set(steps)) == len(steps):
        return []
    parts = [_DIGITS.split(item.path.name) for item in planned]
    columns = [column for column in range(1, len(parts[0]), 2) if [int(part[column]) for part in parts] == steps]
    varying = [column for column in range(1, len(parts[0]), 2) if len({part[column] for part in parts}) > 1]
    if not columns or any(_STEP_WORD.search(parts[0][column - 1]) for column in varying if column not in columns):
        return []
    runs: dict[str, list[Planned]] = {}
    for part, item in zip(parts, planned, strict=True):
        shared = (text if index % 2 == 0 or (index in varying and index not in columns) else "#"
                  for index, text in enumerate(part))  # fmt: skip
        runs.setdefault("".join(shared), []).append(item)
    is_apart = all(len({item.step for item in run}) == len(run) for run in runs.values())
    return list(runs.items()) if is_apart else []


def _common(template: str) -> str:
    """Return the common part of names, without numbers and their names (`val_acc=#`), endings and words for steps."""
    words = without_words(re.sub(r"\w+=-?#|[#_=]+", " ", _ENDINGS.sub("", template)))
    return "-".join(part for part in re.split(r"[^A-Za-z0-9]+", words) if part) or "checkpoints"


def _cannot(name: str, reason: str) -> str:
    """Return the reason for another name of a run than the folder's."""
    return f"{shown(name)} {reason} and cannot name a run"


def _free(name: str, taken: set[str]) -> str:
    chosen, number = name, 2
    while chosen in taken or objection(chosen):
        chosen, number = f"{name}-{number}", number + 1
    taken.add(chosen)
    return chosen


def _unique(item: Planned, first: Planned) -> Planned:
    """Return an input; an input at the step of another of its run is not stored, and has a note."""
    if item.step is None or first is item:
        return item
    if copy_of(item.path, [first.path]) is not None:
        return replace(item, run="", note=f"is a copy of {first.path.name}")
    return replace(
        item,
        run="",
        note=f"is at the step of {first.path.name}; store it alone, with another `run` or `step`",
        refused=True,
    )
