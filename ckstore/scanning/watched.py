"""Directories in which checkpoints appear: finds the complete files and directories in them.

An input is complete when its files have not changed for long enough, and parse, and contain tensors. A file whose
writer stopped halfway does not parse.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckstore.errors import InputError
from ckstore.formats.directory import has_checkpoint, scan
from ckstore.scanning.completeness import UNFINISHED
from ckstore.scanning.inputs import open_path, step_inside
from ckstore.storage.root import is_store

#: The files of a directory are written one after another, with pauses: their settling time is multiplied by this.
_LONGER = 5

#: Seconds after which a file that does not parse is reported: its writer is gone.
_ABANDONED = 60.0

_DIGITS = re.compile(r"[0-9]+")

#: Path below the input, which is empty for a file, size, mtime in nanoseconds, inode.
_File = tuple[str, int, int, int]

#: All files of an input.
Signature = frozenset[_File]

#: Name of an input, and path below it, size and mtime of all its files.
Traits = tuple[str, frozenset[tuple[str, int, int]]]


@dataclass(slots=True)
class _Seen:
    """The state of an input at the last look, with the time when its files were first seen in this state.

    `why` tells why it is not complete: empty for a complete one, and if there is nothing to report. `step` comes from
    its contents.
    """

    signature: Signature
    since: float
    changes: int = 0
    is_looked_into: bool = False
    is_complete: bool = False
    why: str = ""
    step: int | None = None


class Watched:
    """The files and directories in some directories: each is one input; links do not count.

    A file counts as complete after `settle` seconds without change, a directory after five times as many.
    """

    def __init__(self, folders: Sequence[Path], settle: float) -> None:
        self._folders = folders
        self._settle = settle
        self._seen: dict[Path, _Seen] = {}

    def look(self, now: float) -> list[Path]:
        """Return the inputs that have become complete since the last look; `now` is in seconds, from any origin.

        Raises `OSError` if one of the directories cannot be read.
        """
        there = dict(self._present())
        for path in self._seen.keys() - there.keys():
            del self._seen[path]
        ready = []
        for path, signature in there.items():
            seen = self._seen.get(path)
            if seen is None or seen.signature != signature:
                self._seen[path] = _Seen(signature, now, 0 if seen is None else seen.changes + 1)
            elif not seen.is_looked_into and now - seen.since >= self._quiet(path):
                seen.is_looked_into = True
                _look_into(path, seen)
                if seen.is_complete:
                    ready.append(path)
        return ready

    @property
    def settling(self) -> list[Path]:
        """The inputs that have not settled yet."""
        return sorted(path for path, seen in self._seen.items() if not seen.is_looked_into)

    @property
    def growing(self) -> list[Path]:
        """The those of them that changed between looks."""
        return [path for path in self.settling if self._seen[path].changes]

    def abandoned(self, now: float, after: float = _ABANDONED) -> list[tuple[Path, str]]:
        """Return the inputs that have not parsed for `after` seconds, each once, with the reasons."""
        found = []
        for path, seen in self._seen.items():
            if seen.why and now - seen.since >= after:
                found.append((path, seen.why))
                seen.why = ""
        return found

    def again(self, path: Path) -> None:
        """Report an input as complete once more at the next look, if it has not changed."""
        if path in self._seen:
            self._seen[path].is_looked_into = False

    def traits(self, path: Path) -> Traits:
        """Return traits that identify an input, in another process too: name, and path, size and mtime of its files."""
        return path.name, frozenset((name, size, mtime) for name, size, mtime, _ in self._seen[path].signature)

    def is_as_it_was(self, path: Path) -> bool:
        """Return whether an input has not changed since the last look."""
        try:
            return path in self._seen and frozenset(_signature(path)) == self._seen[path].signature
        except OSError:
            return False

    def alike(self, path: Path) -> dict[Path, int | None]:
        """Return complete inputs whose names differ from this one's only in numbers, and their steps by contents."""
        return {other: seen.step for other, seen in self._seen.items() if seen.is_complete and are_alike(other, path)}

    def _present(self) -> Iterator[tuple[Path, Signature]]:
        for folder in self._folders:
            for path in sorted(folder.iterdir()):
                if path.name.startswith((".", "~")) or path.name.endswith("~") or UNFINISHED.search(path.name):
                    continue
                if path.is_symlink():
                    continue
                with suppress(OSError):  # It has been deleted, or a part of it.
                    files = frozenset(_signature(path))
                    if files:
                        yield path, files

    def _quiet(self, path: Path) -> float:
        return self._settle * (_LONGER if path.is_dir() else 1)


def are_alike(one: Path, other: Path) -> bool:
    """Return whether two inputs of one directory have names that differ only in numbers."""
    return one.parent == other.parent and _DIGITS.sub("#", one.name) == _DIGITS.sub("#", other.name)


def _signature(path: Path) -> Iterator[_File]:
    """Yield the files of an input; nothing for other entries."""
    if path.is_dir():
        if not is_store(path):
            yield from _files(path, path)
    elif path.is_file():
        yield _fact("", path.stat())


def _files(root: Path, directory: Path) -> Iterator[_File]:
    for entry in os.scandir(directory):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _files(root, path)
        elif not entry.is_symlink():
            yield _fact(path.relative_to(root).as_posix(), entry.stat())


def _fact(path: str, status: os.stat_result) -> _File:
    return path, status.st_size, status.st_mtime_ns, status.st_ino


def _look_into(path: Path, seen: _Seen) -> None:
    """Parse an input, and record the result."""
    try:
        if path.is_dir() and not has_checkpoint(path, scan(path)):
            return  # Logs, which are not reported.
        scanned = open_path(path)
        scanned.close()
    except (InputError, OSError) as error:
        seen.why = str(error)
        return
    seen.is_complete = any(file.layout.kind != "opaque" and file.layout.tensors for file in scanned.files)
    seen.step = step_inside(scanned)
