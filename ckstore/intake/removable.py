"""The removal of a stored checkpoint's files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckstore.errors import InputError


class Removable:
    """A file or directory tree before its ingest, to be removed afterwards if unchanged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, tuple[int, int, int]] = {}
        self._links: dict[Path, str] = {}
        self._directories: list[Path] = []
        if path.is_dir():
            self._note_directory(path)
        elif path.exists():
            self._files[path] = _stamp(path)

    def _note_directory(self, directory: Path) -> None:
        for entry in directory.iterdir():
            if entry.is_symlink():
                self._links[entry] = os.readlink(entry)
            elif entry.is_dir():
                self._note_directory(entry)
            else:
                self._files[entry] = _stamp(entry)
        # After its contents: directories are removed in this order.
        self._directories.append(directory)

    def remove(self) -> None:
        """Remove files, links and then empty directories; later additions stay.

        Raise `InputError` if the path is a link, or a file has changed; this file and later ones stay.
        """
        if self.path.is_symlink():
            raise InputError(f"{self.path} is stored, but it is a link; remove its target yourself.")
        for file, stamp in self._files.items():
            if _stamp(file) != stamp:
                raise InputError(f"{file} changed while it was stored; it was not removed.")
            file.unlink()
        for link, target in self._links.items():
            with suppress(OSError):
                if os.readlink(link) == target:
                    link.unlink()
        for directory in self._directories:
            with suppress(OSError):
                directory.rmdir()


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.lstat()
    return status.st_size, status.st_mtime_ns, status.st_ino
