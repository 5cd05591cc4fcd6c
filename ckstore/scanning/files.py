"""The files that an ingest reads: any number of them, with a limit on open ones."""

from __future__ import annotations

import os
from pathlib import Path

from ckstore.formats.sources import FileSource, check_identity, file_identity
from ckstore.runtime.lru import Lru

#: Files that stay open. Directories may hold more files than a process may open.
_LIMIT = 64


class OpenFiles:
    """Open files by path, the least recently used dropped beyond a limit; safe for threads."""

    def __init__(self) -> None:
        self._files: Lru[str, FileSource] = Lru(_LIMIT)

    def get(self, path: str) -> tuple[FileSource, bool]:
        """Return the file, and whether it was just opened."""
        found = self._files.get(path)
        if found is not None:
            return found, False
        opened = FileSource(path)
        kept = self._files.put(path, opened)
        return kept, kept is opened

    def drop(self, path: str) -> None:
        """Close a file, or leave that to the last thread that reads it."""
        self._files.drop(path)


class InputFile:
    """One regular input file, reopened as often as needed, and verified to be the same file.

    Parameters
    ----------
    path
        Of a regular file; anything else raises `InputError`.
    files
        The cache of open files.

    Attributes
    ----------
    path, size, mtime_ns, mode
        The state at the first opening.
    """

    def __init__(self, path: Path, files: OpenFiles) -> None:
        self.path = os.fspath(path)
        self._files = files
        opened, _ = files.get(self.path)
        self.size = opened.size
        self.mtime_ns = opened.mtime_ns
        self.mode = opened.mode
        self._identity = file_identity(self.path)
        opened.check_unchanged()

    def pread(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`; raise `InputError` if the file is shorter."""
        return self._opened().pread(offset, length)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes) from `offset` on; raise `InputError` if the file is shorter."""
        self._opened().read_into(offset, target)

    def _opened(self) -> FileSource:
        opened, is_new = self._files.get(self.path)
        if is_new:
            opened.check_unchanged()
            self.check_unchanged()
        return opened

    def check_unchanged(self) -> None:
        """Raise `InputError` if size or mtime changed since the first opening, or another file has the path."""
        check_identity(self.path, self._identity)

    def close(self) -> None:
        """Close the file; reading it opens it again."""
        self._files.drop(self.path)
