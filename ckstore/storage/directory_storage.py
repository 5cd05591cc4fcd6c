"""A store's place in a directory: one file for each object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import starmap
from pathlib import Path

from ckstore.runtime.access import access_explained
from ckstore.storage import durable
from ckstore.storage.interface import Listed


class DirectoryStorage:
    """The files of a directory, by their paths below it."""

    read_price = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, name: str, data: bytes | Path) -> None:
        """Write a file durably; one at its place, as packs are, stays."""
        if data != self.path / name:
            durable.write_file(self._made(name), data if isinstance(data, bytes) else data.read_bytes())

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write a file durably if absent, through a second link of a temporary file."""
        return durable.write_file(self._made(name), data, absent=True)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        descriptor, _ = durable.open_file(self.path / name)
        with open(descriptor, "rb") as file:
            return file.read()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return a range of a file."""
        descriptor, size = durable.open_file(self.path / name)
        with open(descriptor, "rb") as file:
            if offset + length > size:
                raise EOFError(f"{name} is shorter than the requested range.")
            file.seek(offset)
            return file.read(length)

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Yield files in order, temporary ones included; below a prefix also directories, which `read` refuses."""
        found = []
        for name, entry in self._entries(prefix):
            if name > after and (prefix or not entry.is_dir(follow_symlinks=False)):
                with suppress(FileNotFoundError):  # Its writer may remove it concurrently.
                    status = entry.stat()
                    found.append((name, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)))
        return starmap(Listed, sorted(found))

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield everything below a prefix, in any order."""
        with access_explained(self.path / prefix), suppress(FileNotFoundError):
            with os.scandir(self.path / prefix) as found:
                entries = list(found)
            for entry in entries:
                yield prefix + entry.name, entry
                if entry.is_dir(follow_symlinks=False):
                    yield from self._entries(f"{prefix}{entry.name}/")

    def delete(self, names: Sequence[str]) -> None:
        """Delete files."""
        for name in names:
            path = self.path / name
            with access_explained(path.parent, writing=True):
                path.unlink(missing_ok=True)

    def _made(self, name: str) -> Path:
        """Return the path of a file in a directory that exists."""
        path = self.path / name
        with access_explained(path.parent, writing=True):
            durable.new_directory(path.parent)
        return path
