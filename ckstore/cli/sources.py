"""What storing files takes beside the API: proving that they come back, and removing them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ckstore.errors import InputError


def check_restores(store: Path | str, number: int) -> None:
    """Decode every file of a version from what is on disk; raises `IntegrityError` where one does not come back."""
    from ckstore.operations.verify import check_restores
    from ckstore.store import Store

    # A store of its own: nothing that an ingest has in memory takes part.
    with Store(store, "r") as reopened:
        check_restores(reopened[number].stored)


class Removable:
    """A file or directory tree as it is before its ingest: what may be removed afterwards, if it is still that.

    Parameters
    ----------
    path
        What will be ingested.
    """

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
        # After what lies in it: directories are removed in this order.
        self._directories.append(directory)

    def remove(self) -> None:
        """Remove the files and links, and the directories that are empty then; what came later stays.

        Raises
        ------
        InputError
            It is a link, or a file is not the one that was there before; that one and those after it stay.
        """
        if self.path.is_symlink():
            raise InputError(f"{self.path} is stored, but it is a link; remove what it points to yourself.")
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
