"""A folder of checkpoints of all kinds, taken apart: what becomes a version of which run at which step, or why not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckstore.errors import InputError
from ckstore.formats.facts import named_step
from ckstore.scanning.source import open_directory, open_file
from ckstore.scanning.steps import natural, plan_steps
from ckstore.storage.root import is_store

#: Files that stand beside the tensors of one checkpoint.
_BESIDE = {
    "config.json",
    "adapter_config.json",
    "trainer_state.json",
    "model_index.json",
    ".metadata",
    "zero_to_fp32.py",
    "manifest.ocdbt",
}
_DIGITS = re.compile(r"[0-9]+")
#: Words that say that a number follows, and what stands between words.
_STEP_WORDS = re.compile(r"\b(?:global[-_ ]?)?(?:steps?|iter(?:ation)?s?|checkpoints?|ckpts?|epochs?)\b", re.IGNORECASE)
_ENDINGS = re.compile(r"(?:\.[A-Za-z][A-Za-z0-9]{0,11})+$")
#: Share of tensor names from which two files are of one model.
_SAME = 0.5


@dataclass(frozen=True, slots=True)
class Proposed:
    """A file or directory of a folder, and what is to become of it.

    Attributes
    ----------
    path
        Below the folder.
    run, step
        Where it will be stored; no run where it will not.
    note
        Why not.
    """

    path: Path
    run: str = ""
    step: int | None = None
    note: str = ""


@dataclass(slots=True)
class _Input:
    path: Path
    names: frozenset[str]
    #: Why it has none.
    why: str


def propose(folder: Path, *, force: bool = False) -> list[Proposed]:
    """Everything in a folder: what is stored by run and step, then what is not, by name.

    Inputs of one directory whose names differ in numbers alone, and that hold tensors of mostly the same names, are a
    run, which is named after the directory, and after what the names have in common where several are in there.

    Parameters
    ----------
    folder
        A directory, with others below it. Stores and links to directories are left out.
    force
        As for the ingest: damaged files count as opaque bytes.

    Raises
    ------
    InputError
        It is no directory.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no directory; leave --recursive out, or name one.")
    groups: dict[tuple[Path, str], list[list[_Input]]] = {}
    left: list[Proposed] = []
    for path in _candidates(folder, force=force):
        try:
            found = _input(path, force=force)
        except (InputError, OSError) as error:
            left.append(Proposed(path, note=str(error)))
            continue
        if not found.names:
            left.append(Proposed(path, note=f"holds no tensors: {found.why}" if found.why else "holds no tensors"))
            continue
        alike = groups.setdefault((path.parent, _DIGITS.sub("#", path.name)), [])
        for group in alike:
            if _alike(group[-1], found):
                group.append(found)
                break
        else:
            alike.append([found])
    return _named(folder, groups, force=force) + left


def _candidates(directory: Path, *, force: bool) -> Iterator[Path]:
    """Files and directories that may be a checkpoint each, by name."""
    for entry in sorted(os.scandir(directory), key=lambda entry: natural(entry.name)):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if is_store(path):
                continue
            if _is_one(path, force=force):
                yield path
            else:
                yield from _candidates(path, force=force)
        elif entry.is_file():
            yield path


def _is_one(directory: Path, *, force: bool) -> bool:
    """Whether a directory is one checkpoint: its name tells a step, or something stands beside its tensors."""
    inside = list(directory.iterdir())
    files = [path.name for path in inside if path.is_file()]
    marked = any(name in _BESIDE or name.endswith(".index.json") for name in files)
    if not marked and (named_step(directory.name) is None or len(inside) < 2):
        return False
    try:
        scanned = open_directory(directory, force=force)
    except InputError:
        return False
    scanned.close()
    return True


def _input(path: Path, *, force: bool) -> _Input:
    if path.is_dir():
        scanned = open_directory(path, force=force)
        files = scanned.files
        scanned.close()
    else:
        files = [open_file(path, force=force)]
        files[0].source.close()
    names = (str(tensor.path) for file in files if file.layout.kind != "opaque" for tensor in file.layout.tensors)
    why = next((why for file in files for why in file.layout.bytes_for.values()), "")
    return _Input(path, frozenset(names), why)


def _alike(one: _Input, other: _Input) -> bool:
    return len(one.names & other.names) >= _SAME * len(one.names | other.names)


def _named(folder: Path, groups: dict[tuple[Path, str], list[list[_Input]]], *, force: bool) -> list[Proposed]:
    """Groups with the names of their runs, and steps."""
    several: dict[Path, int] = {}
    for (parent, _), alike in groups.items():
        several[parent] = several.get(parent, 0) + len(alike)
    proposed: list[Proposed] = []
    taken: set[str] = set()
    for (parent, template), alike in groups.items():
        for group in alike:
            where = parent.relative_to(folder).as_posix()
            name = folder.resolve().name if where == "." else where
            if several[parent] > 1:
                name = f"{name}/{_common(template)}"
            name = _free(name.replace("@", "-").strip(), taken)
            planned = plan_steps([found.path for found in group], force=force)
            proposed += [Proposed(item.path, name, item.step) for item in planned]
    first: dict[tuple[str, int | None], Proposed] = {}
    for item in proposed:
        first.setdefault((item.run, item.step), item)
    return [_unique(item, first[item.run, item.step]) for item in proposed]


def _common(template: str) -> str:
    """What names have in common, without numbers, endings and words for steps."""
    words = _STEP_WORDS.sub(" ", re.sub(r"[#_=]+", " ", _ENDINGS.sub("", template)))
    return "-".join(part for part in re.split(r"[^A-Za-z0-9]+", words) if part) or "checkpoints"


def _free(name: str, taken: set[str]) -> str:
    chosen, number = name, 2
    while chosen in taken or chosen in ("", "latest"):
        chosen, number = f"{name}-{number}", number + 1
    taken.add(chosen)
    return chosen


def _unique(item: Proposed, first: Proposed) -> Proposed:
    """An input; one at the step of another of its run is not stored, but said."""
    if item.step is None or first is item:
        return item
    return replace(item, run="", note=f"is at the step of {first.path.name}")
