"""Scans a folder of checkpoints and groups them into runs and steps, with reasons for the rest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckstore.errors import InputError
from ckstore.formats.directory import is_marked
from ckstore.scanning.inputs import are_alike, open_path, tensor_names
from ckstore.scanning.steps import Planned, plan_steps
from ckstore.steps import named_step, natural, without_numbers, without_words
from ckstore.storage.root import is_store
from ckstore.storage.version_names import LONGEST_NAME

_ENDINGS = re.compile(r"(?:\.[A-Za-z][A-Za-z0-9]{0,11})+$")


@dataclass(slots=True)
class _Input:
    path: Path
    names: frozenset[str]
    #: The reason for the lack of tensors.
    why: str


def propose(folders: Sequence[Path], *, force: bool = False) -> list[Planned]:
    """Return everything in some folders: first the inputs to store, by run and step, then the others, by name.

    Inputs of one directory whose names differ only in numbers, and whose tensors have mostly the same names, are a run.
    It is named after the directory and, if that has several runs, after the common part of the inputs' names. Inputs of
    different folders never share a run. Stores and links to directories are left out, and so are links to files of the
    folder. With `force`, damaged files count as opaque bytes. Raise `InputError` for a folder that is no directory.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is not a directory; name one, or leave `recursive` out.")
    groups: dict[tuple[Path, str], list[list[_Input]]] = {}
    left: list[Planned] = []
    above: dict[Path, Path] = {}
    for folder, path in _found(folders, left, force=force):
        above.setdefault(path.parent, folder)
        try:
            found = _input(path, force=force)
        except (InputError, OSError) as error:
            left.append(Planned(path, note=str(error)))
            continue
        if not found.names:
            left.append(Planned(path, note=f"holds no tensors: {found.why}" if found.why else "holds no tensors"))
            continue
        alike = groups.setdefault((path.parent, without_numbers(path.name)), [])
        for group in alike:
            if are_alike(group[-1].names, found.names):
                group.append(found)
                break
        else:
            alike.append([found])
    return _named(above, groups, force=force) + left


def _found(folders: Sequence[Path], left: list[Planned], *, force: bool) -> Iterator[tuple[Path, Path]]:
    """Yield each candidate once, after its folder."""
    seen: set[Path] = set()
    for folder in folders:
        for path in _candidates(folder, folder.resolve(), left, force=force):
            if path.absolute() not in seen:
                seen.add(path.absolute())
                yield folder, path


def _candidates(directory: Path, folder: Path, left: list[Planned], *, force: bool) -> Iterator[Path]:
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
            if is_store(path):
                continue
            if _is_one(path, force=force):
                yield path
            else:
                yield from _candidates(path, folder, left, force=force)
        elif is_file and entry.is_symlink() and path.resolve().is_relative_to(folder):
            left.append(Planned(path, note=f"is a link to {os.readlink(path)}"))
        elif is_file:
            yield path


def _unread(path: Path, error: OSError) -> Planned:
    return Planned(path, note=f"cannot be read ({error.strerror})")


def _is_one(directory: Path, *, force: bool) -> bool:
    """Return whether a directory is one checkpoint: its name has a step, or a file accompanies its tensors."""
    try:
        inside = list(directory.iterdir())
        files = [path.name for path in inside if path.is_file()]
        if not is_marked(files) and (named_step(directory.name) is None or len(inside) < 2):
            return False
        scanned = open_path(directory, force=force)
    except (InputError, OSError):
        return False
    scanned.close()
    return True


def _input(path: Path, *, force: bool) -> _Input:
    scanned = open_path(path, force=force)
    scanned.close()
    names = frozenset().union(*map(tensor_names, scanned.files))
    why = next((why for layout in scanned.layouts for why in layout.bytes_for.values()), "")
    return _Input(path, names, why)


def _named(
    above: dict[Path, Path], groups: dict[tuple[Path, str], list[list[_Input]]], *, force: bool
) -> list[Planned]:
    """Return groups with the names of their runs, and steps; `above` maps each directory to its folder."""
    several: dict[Path, int] = {}
    for (parent, _), alike in groups.items():
        several[parent] = several.get(parent, 0) + len(alike)
    proposed: list[Planned] = []
    taken: set[str] = set()
    for (parent, template), alike in groups.items():
        for group in alike:
            where = parent.relative_to(above[parent]).as_posix()
            name = parent.resolve().name if where == "." else where
            if several[parent] > 1:
                name = f"{name}/{_common(template)}"
            name = _free(_run_name(name), taken)
            planned = plan_steps([found.path for found in group], force=force)
            proposed += [replace(item, run=name) for item in planned]
    first: dict[tuple[str, int | None], Planned] = {}
    for item in proposed:
        first.setdefault((item.run, item.step), item)
    return [_unique(item, first[item.run, item.step]) for item in proposed]


def _common(template: str) -> str:
    """Return the common part of names, without numbers, endings and words for steps."""
    words = without_words(re.sub(r"[#_=]+", " ", _ENDINGS.sub("", template)))
    return "-".join(part for part in re.split(r"[^A-Za-z0-9]+", words) if part) or "checkpoints"


def _run_name(text: str) -> str:
    """Return the text as the name of a run: of a text that is too long, its end, with room for a number."""
    plain = "".join(one if one.isprintable() and one != "@" else "-" for one in text)
    return plain.encode()[8 - LONGEST_NAME :].decode(errors="ignore").strip()


def _free(name: str, taken: set[str]) -> str:
    chosen, number = name, 2
    while chosen in taken or chosen in ("", "latest"):
        chosen, number = f"{name}-{number}", number + 1
    taken.add(chosen)
    return chosen


def _unique(item: Planned, first: Planned) -> Planned:
    """Return an input; an input at the step of another of its run is not stored, and has a note."""
    if item.step is None or first is item:
        return item
    return replace(item, run="", note=f"is at the step of {first.path.name}")
