"""The interface to the place of a store: objects by name, in a directory or in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Listed:
    """An object: its name, size in bytes, and time of writing by the clock of the place."""

    name: str
    size: int
    modified: datetime


class Storage(Protocol):
    """Packs, records of the log and other objects of one store, by name. Safe for threads."""

    @property
    def read_price(self) -> float:
        """Stored bytes that reading one more byte is worth, within a budget of 2; 0 for local files."""

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object from bytes or a file, durably; overwrite an existing one."""

    def put_absent(self, name: str, data: bytes) -> bool:
        """Write an object durably if absent; return whether it was written. After a lost response, False may be wrong.

        Raises
        ------
        UnreachableError
            The outcome is unknown.
        """

    def read(self, name: str) -> bytes:
        """Return the bytes of an object; raise `FileNotFoundError`."""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of an object from `offset` on; raise `FileNotFoundError`, `EOFError`."""

    def list(self, prefix: str, after: str = "") -> Iterator[Listed]:
        """Yield objects whose names have a prefix that is empty or ends in a slash, in order, after a name.

        Raises
        ------
        ForeignNameError
            An object has a name such as `a/../b`.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; ignore missing ones."""
