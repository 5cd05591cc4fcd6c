"""The marker of a followed directory: which version it holds, whether it is complete, and whether it was applied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from ckstore.errors import ConflictError, UsageError
from ckstore.policy import Fidelity
from ckstore.runtime import forks
from ckstore.runtime.access import DENIED, denied
from ckstore.runtime.local_path import is_relative, local_path
from ckstore.storage import durable
from ckstore.storage.names import Name
from ckstore.storage.schema import Id, Integer, Positive, Whole, decode, encode

#: Names of the marker and of the lock in a followed directory.
MARKER, LOCK = ".ckstore-version", ".ckstore-version.lock"

#: Seconds between attempts to take a lock.
_LOOK = 0.02


class HeldFile(Struct, frozen=True, array_like=True):
    """A file as an update left it."""

    size: Whole
    mtime_ns: int
    blake3: str


class Marker(Struct, frozen=True, kw_only=True):
    """The contents of `.ckstore-version`.

    Attributes
    ----------
    state
        `updating` from before the first write of an update until everything is durable: then the files may be a
        mixture. Otherwise `complete`.
    id, number, run, step, fidelity
        The version that the directory holds, or is updated to.
    origin
        During an update the id of the version before, None if there was none; `from` in the file.
    applied
        The id of the version that was applied last, None before the first one.
    files
        Size, modification time and BLAKE3 by path; during an update, of all files that were or will be there.
    links
        The paths of symbolic links.
    include
        The globs of the files that the directory holds; none for all.
    """

    state: Literal["updating", "complete"]
    id: Id
    number: Positive
    run: Name
    step: Integer | None
    fidelity: Fidelity
    origin: Id | None = field(name="from", default=None)
    applied: Id | None = None
    files: dict[str, HeldFile] = {}
    links: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the files are those of the version."""
        return self.state == "complete"

    def write(self, root: Path) -> None:
        """Write the marker durably."""
        durable.write_file(root / MARKER, encode(self) + b"\n")

    def as_applied(self) -> Marker:
        """Return the marker after its version was applied."""
        return replace(self, applied=self.id)

    def changed(self, root: Path) -> list[str]:
        """Return the paths of missing files and links, and of files with another size or time than after the update."""
        files = [path for path, held in self.files.items() if not is_as_left(root / path, held)]
        return files + [path for path in self.links if not (root / path).is_symlink()]


def is_as_left(place: Path, held: HeldFile) -> bool:
    """Return whether a file has the size and the time that an update gave it."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (held.size, held.mtime_ns)


def read_marker(root: Path) -> Marker | None:
    """Return the marker of a directory; None without one, and for a damaged one, whose files are compared by digest."""
    try:
        marker: Marker = decode((root / MARKER).read_bytes(), Marker)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno in DENIED:
            raise denied(root / MARKER, error) from error
        raise
    return marker if all(map(is_relative, [*marker.files, *marker.links])) else None


def prepare(root: Path) -> None:
    """Make a directory to follow; raise `ConflictError` for one that holds something else."""
    local_path(root)
    try:
        durable.new_directory(root)
        present = set(os.listdir(root))
    except (FileExistsError, NotADirectoryError):
        raise ConflictError(f"{root} is not a directory; name another one.") from None
    except OSError as error:
        if error.errno in DENIED:
            raise denied(root, error, writing=True) from error
        raise UsageError(f"{root} cannot be a directory ({error.strerror}); name another one.") from error
    if present and MARKER not in present and not all(name.startswith((LOCK, ".tmp-")) for name in present):
        raise ConflictError(f"{root} holds files that no follower wrote; name an empty directory, or a new one.")
    durable.sweep_temporaries(root, 60.0)


def twins(root: Path) -> tuple[Path, Path]:
    """Return the directories between which a link at `root` changes."""
    return root.with_name(f"{root.name}.a"), root.with_name(f"{root.name}.b")


def prepare_twins(root: Path) -> None:
    """Make two directories to follow in turn; raise `ConflictError` if something else than their link is at `root`."""
    local_path(root)
    if os.path.lexists(root) and current(root) == root:
        raise ConflictError(f"{root} is not a link to a followed directory; name another place for the link.")
    for twin in twins(root):
        prepare(twin)


def current(root: Path) -> Path:
    """Return the directory to which a link of twins leads; the path itself if it is none."""
    target = os.readlink(root) if root.is_symlink() else ""
    return next((twin for twin in twins(root) if twin.name == target), root)


def point(root: Path, twin: Path) -> None:
    """Make the link at `root` lead to a directory next to it, at once."""
    temporary = durable.temporary_path(root.parent)
    temporary.symlink_to(twin.name)
    os.replace(temporary, root)
    durable.sync_directory(root.parent)


@contextmanager
def held(root: Path, stop: Event, *, exclusive: bool) -> Iterator[bool]:
    """Hold the lock of a directory: exclusively to write its files, or with others to read them.

    Yield False if `stop` was set before the lock was free.
    """
    import fcntl

    if not (root / LOCK).exists():
        durable.touch(root / LOCK)
    descriptor = forks.open_unshared(root / LOCK, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if stop.wait(_LOOK):
                    yield False
                    return
                continue
            break
        yield True
    finally:
        forks.close_unshared(descriptor)
