"""Directories in which checkpoints appear: finds the complete files and directories in them.

An input is complete when its files have not changed for long enough, and parse, and contain tensors. A file whose
writer stopped halfway does not parse.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckstore.errors import CkstoreError, InputError, UsageError
from ckstore.formats.directory import has_checkpoint, scan
from ckstore.scanning.completeness import UNFINISHED
from ckstore.scanning.inputs import open_path, step_inside
from ckstore.steps import without_numbers
from ckstore.storage.root import is_store

#: The files of a directory are written one after another, with pauses: their settling time is multiplied by this.
_LONGER = 5

#: Seconds after which a file that does not parse is reported: its writer is gone.
_ABANDONED = 60.0

#: Path below the input, which is empty for a file, size, mtime in nanoseconds, inode.
_File = tuple[str, int, int, int]

#: All files of an input.
Signature = frozenset[_File]

#: Name of an input, and path below it, size and mtime of all its files.
Traits = tuple[str, frozenset[tuple[str, int, int]]]


class Complete(NamedTuple):
    """A complete input at the time when it was looked into."""

    path: Path
    signature: Signature

    @property
    def traits(self) -> Traits:
        """Traits that identify it, in another process too: name, and path, size and mtime of its files."""
        return self.path.name, frozenset((name, size, mtime) for name, size, mtime, _ in self.signature)

    @property
    def change(self) -> str:
        """Its change since: empty for none, else `overwritten` or `deleted`."""
        try:
            present = frozenset(_signature(self.path))
        except OSError:
            present = frozenset()
        if present == self.signature:
            return ""
        return "overwritten" if present else "deleted"


@dataclass(slots=True)
class _Seen:
    """The state of an input at the last look, with the time when its files were first seen in this state.

    `why` tells why it is not complete: empty for a complete one, and if there is nothing to report. `step` comes from
    its contents. A complete input is returned once, which `is_taken` then.
    """

    signature: Signature
    since: float
    changes: int = 0
    is_looked_into: bool = False
    is_complete: bool = False
    is_taken: bool = False
    why: str = ""
    step: int | None = None


class Watched:
    """The files and directories in some directories: each is one input; links do not count.

    A file counts as complete after `settle` seconds without change, a directory after five times as many. Directories
    need not exist: their inputs are those of the last look. `now` is a time of `time.monotonic`.
    """

    def __init__(self, folders: Sequence[Path], settle: float) -> None:
        for folder in folders:
            if os.path.isfile(folder):
                raise UsageError(f"{folder} is a file; name the directory to watch.")
        self._folders = folders
        self._settle = settle
        self._seen: dict[Path, _Seen] = {}
        #: Complete inputs whose names differ only in numbers, the latest last.
        self._alike: dict[tuple[Path, str], dict[Path, None]] = {}
        self._lost: list[tuple[Path, str]] = []
        self._closed: dict[Path, str] = {}
        self._lock = threading.RLock()

    def look(self, now: float) -> list[Complete]:
        """Return the inputs that have become complete and were not returned before."""
        with self._lock:
            self._update(now)
            ready = [path for path, seen in self._seen.items() if seen.is_complete and not seen.is_taken]
            for path in ready:
                self._seen[path].is_taken = True
            return [Complete(path, self._seen[path].signature) for path in ready]

    @contextmanager
    def looking(self, seconds: float) -> Iterator[None]:
        """Look every few seconds in another thread during the block, so that no complete input is missed."""
        stop = threading.Event()

        def look() -> None:
            with suppress(CkstoreError):  # The next look in the caller's thread raises it again.
                while not stop.wait(seconds):
                    with self._lock:
                        self._update(time.monotonic())

        thread = threading.Thread(target=look, name="ckstore-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _update(self, now: float) -> None:
        there = dict(self._present())
        for path in self._seen.keys() - there.keys():
            if path.parent not in self._closed:
                self._lose(path, "deleted")
                del self._seen[path]
        for path, signature in there.items():
            seen = self._seen.get(path)
            if seen is None or seen.signature != signature:
                self._lose(path, "overwritten")
                self._seen[path] = _Seen(signature, now, 0 if seen is None else seen.changes + 1)
            elif not seen.is_looked_into and now - seen.since >= self._quiet(path):
                seen.is_looked_into = True
                _look_into(path, seen)
                if seen.is_complete:
                    self._alike.setdefault(kind_of(path), {})[path] = None

    def _lose(self, path: Path, how: str) -> None:
        """Forget a complete input, if it is one, that has changed; note it unless `look` returned it before."""
        seen = self._seen.get(path)
        if seen is not None and seen.is_complete:
            self._alike.get(kind_of(path), {}).pop(path, None)
            if not seen.is_taken:
                self._lost.append((path, how))

    def lost(self) -> list[tuple[Path, str]]:
        """Return the complete inputs that were overwritten or deleted before `look` returned them, each once."""
        with self._lock:
            lost, self._lost = self._lost, []
            return lost

    @property
    def closed(self) -> dict[Path, str]:
        """The directories that could not be listed at the last look: `missing`, or `unreadable` with the reason."""
        with self._lock:
            return dict(self._closed)

    @property
    def settling(self) -> list[Path]:
        """The inputs that have not settled yet."""
        return sorted(path for path, seen in self._seen.items() if not seen.is_looked_into)

    @property
    def growing(self) -> list[Path]:
        """Those of them that changed between looks."""
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
        """Return an input from the next look once more, if it has not changed."""
        with self._lock:
            if path in self._seen:
                self._seen[path].is_taken = False

    def alike(self, kind: tuple[Path, str]) -> dict[str, int | None]:
        """Return the complete inputs of a kind, the latest last, and their steps by contents."""
        with self._lock:
            return {str(path): self._seen[path].step for path in self._alike.get(kind, ())}

    def _present(self) -> Iterator[tuple[Path, Signature]]:
        self._closed = {}
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    inside = sorted(entries, key=lambda entry: entry.name)
            except FileNotFoundError:
                self._closed[folder] = "missing"
                continue
            except OSError as error:
                self._closed[folder] = f"unreadable ({error.strerror})"
                continue
            for entry in inside:
                name = entry.name
                if name.startswith((".", "~")) or name.endswith("~") or UNFINISHED.search(name):
                    continue
                with suppress(OSError):  # It has been deleted, or a part of it.
                    path = folder / name
                    is_file = entry.is_file(follow_symlinks=False)
                    files = frozenset([_fact("", entry.stat())] if is_file else _signature(path))
                    if files:
                        yield path, files

    def _quiet(self, path: Path) -> float:
        return self._settle * (_LONGER if path.is_dir() else 1)


def kind_of(path: Path) -> tuple[Path, str]:
    """Return the same for inputs of one directory whose names differ only in numbers."""
    return path.parent, without_numbers(path.name)


def _signature(path: Path) -> Iterator[_File]:
    """Yield the files of an input; nothing for links and other entries."""
    if path.is_symlink():
        return
    if path.is_dir():
        if not is_store(path):
            yield from _files(path, path)
    elif path.is_file():
        yield _fact("", path.stat())


def _files(root: Path, directory: Path) -> Iterator[_File]:
    with os.scandir(directory) as entries:
        for entry in entries:
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
        scanned = open_path(path, any_kind=True)
        scanned.close()
        seen.step, _ = step_inside(scanned)
    except (InputError, OSError) as error:
        seen.why = str(error)
        return
    seen.is_complete = any(file.layout.kind != "opaque" and file.layout.tensors for file in scanned.files)
