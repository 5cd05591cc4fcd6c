"""The directory of a store: its contents, creation and discovery."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from ckstore.errors import ConflictError, NoStoreError, UsageError
from ckstore.runtime.local_path import local_path
from ckstore.storage import durable

#: Names inside a store.
PACKS = "packs"
LOG = "log"
CATALOG = "catalog.sqlite"
CLAIMS = "claims.sqlite"
#: Keeps the store out of the Git repository around it.
IGNORE = ".gitignore"
_IGNORED = b"*\n"
#: File that marks a directory as the mirror of a store in a bucket.
MIRROR = durable.MIRROR
#: Name of the directory that is searched upwards.
DEFAULT_NAME = ".ckstore"
#: Prefixes of URLs of object stores.
REMOTE = ("s3://", "gs://", "az://", "hf://")
#: The environment variable that names a store.
VARIABLE = "CKSTORE"
_RULE = "a store is a path, or a URL that begins with s3://, gs://, az:// or hf://"


def place(given: str | os.PathLike[str]) -> Path | str:
    """Return the place of a store: a path, or the URL of an object store as it is; refuse other URLs."""
    if isinstance(given, str) and given.startswith(REMOTE):
        return given.rstrip("/")
    return local_path(given, _RULE if isinstance(given, str) else f"{_RULE}; a URL is given as a string")


def is_store(path: Path) -> bool:
    """Return whether a directory is a store: it has packs, and a catalog or the log to rebuild one."""
    local_path(path, _RULE)
    return (path / PACKS).is_dir() and ((path / CATALOG).is_file() or (path / LOG).is_dir())


def check_no_mirror(path: Path) -> None:
    """Raise `UsageError` for the mirror of a remote store: a version stored there would reach nobody else."""
    if (path / MIRROR).is_file():
        raise UsageError(f"{path} is the mirror of a store in a bucket; open that one by its URL.")


def create_layout(root: Path, *, shared: bool = False) -> None:
    """Create the directories of a store; `Catalog.create` creates the catalog.

    With `shared`, its group may write to it. Raise `ConflictError` for a file, a store (perhaps without its catalog),
    or a directory that is not empty.
    """
    local_path(root, _RULE)
    if root.exists():
        if not root.is_dir():
            raise ConflictError(f"{root} is a file; choose another path for the store.")
        foreign = [name for name in os.listdir(root) if not _is_own(root / name)]
        if (root / CATALOG).exists():
            raise ConflictError(f"{root} is already a store; choose another path or use it as it is.")
        if any((root / name).is_dir() and os.listdir(root / name) for name in (PACKS, LOG)):
            raise ConflictError(f"{root} is a store without its catalog; run `ckstore recover` to rebuild it.")
        if foreign:
            raise ConflictError(f"{root} is not empty (it has {sorted(foreign)[0]}); choose an empty directory.")
    for directory in (root, root / PACKS, root / LOG):
        durable.new_directory(directory)
        if shared:
            _share(directory)
        durable.sync_directory(directory.parent)
    durable.write_file(root / IGNORE, _IGNORED)


def _is_own(path: Path) -> bool:
    """Return whether an interrupted `create_layout` may have left a file or directory."""
    if path.name == IGNORE:
        return path.read_bytes() == _IGNORED
    is_left = path.name == CLAIMS and (path.parent / PACKS).is_dir()  # Of a store that lost its catalog.
    return is_left or path.name in (PACKS, LOG) or path.name.startswith(".tmp-")


def _share(directory: Path) -> None:
    """Share a directory with its group; new files and directories in it follow."""
    with suppress(PermissionError):
        directory.chmod(stat.S_IMODE(directory.stat().st_mode) | 0o2770)
    # The system leaves the bit out, without an error, if this user is not in the group.
    if not durable.is_shared(directory):
        raise ConflictError(
            f"{directory} cannot be shared: it belongs to another user or group; run `chgrp` with a group of yours, and"
            " `chmod g+rwxs`, as its owner."
        )


def find_store(start: Path | None = None) -> Path | str:
    """Return the store to use: `$CKSTORE`, or else the nearest `.ckstore` in `start` or above it, or store around it.

    `start` is the working directory by default. Raise `NoStoreError` if no store was found.
    """
    named = os.environ.get(VARIABLE)
    if named:
        found = place(named)
        if isinstance(found, Path) and not is_store(found):
            raise NoStoreError(f"${VARIABLE} names {named}, which is not a store; correct it or run `ckstore init`.")
        return found
    begin = (start or Path.cwd()).absolute()
    nearest = nearest_store(begin)
    if nearest is not None:
        return nearest
    raise NoStoreError(
        f"No {DEFAULT_NAME} found in {begin} or above it; run `ckstore init`, or name a store"
        f" (`store`, or ${VARIABLE})."
    )


def nearest_store(start: Path) -> Path | None:
    """Return the nearest `.ckstore` in an absolute path or above it, or the store around it."""
    stores = (path for directory in (start, *start.parents) for path in (directory, directory / DEFAULT_NAME))
    return next(filter(is_store, stores), None)


def find_temporaries(root: Path, grace: float = 3600.0) -> list[Path]:
    """Return the temporary files of interrupted processes in the store; see `durable.find_temporaries`."""
    directories = [path for path in (root, root / PACKS, root / LOG) if path.is_dir()]
    return [path for directory in directories for path in durable.find_temporaries(directory, grace)]
