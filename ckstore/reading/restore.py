"""Restores many versions into a directory: each under its own name, with its step if names repeat."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from blake3 import blake3

from ckstore.errors import ConflictError
from ckstore.runtime.local_path import is_relative

if TYPE_CHECKING:
    from ckstore.objects.documents import FileEntry
    from ckstore.reading.stored_version import StoredVersion

_BLOCK = 1 << 20


def own_name(version: StoredVersion) -> str:
    """Return the name of the file or directory that a version was ingested from."""
    document = version.document
    name = PurePosixPath(document.source or "" if document.is_directory else document.files[0].path).name
    return name if is_relative(name) else f"version-{version.row.number}"


def places(versions: Sequence[StoredVersion], folder: Path) -> list[Path]:
    """Return a path in a directory for each version, below the name of its run if there are several.

    Names that repeat in a directory get the step, and then the number: `state_dict-400.pt`, `state_dict-400-v7.pt`.
    So do names of the directories of other runs: run `a` may hold a file `b`, and there may be a run `a/b`.
    Raise `ConflictError` if the directory is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ConflictError(f"{folder} is a file, and several versions need a directory; name another path.")
    several = len({version.row.run for version in versions}) > 1
    parents = [folder / version.row.run if several else folder for version in versions]
    names = [own_name(version) for version in versions]
    folders = {place for parent in parents for place in (parent, *parent.parents)}
    taken = [(place.parent, place.name.casefold()) for place in folders]
    for suffix in ("-{step}", "-v{number}"):
        counts = Counter([*taken, *((parent, name.casefold()) for parent, name in zip(parents, names, strict=True))])
        names = [
            _with(name, suffix, version) if counts[parent, name.casefold()] > 1 else name
            for parent, name, version in zip(parents, names, versions, strict=True)
        ]
    return [parent / name for parent, name in zip(parents, names, strict=True)]


def _with(name: str, suffix: str, version: StoredVersion) -> str:
    row = version.row
    if row.step is None and "step" in suffix:
        return name
    path = PurePosixPath(name)
    last = path.suffixes[-2:] if path.suffix == ".tar" else path.suffixes[-1:]
    endings = "" if version.document.is_directory else "".join(last)
    return f"{name.removesuffix(endings)}{suffix.format(step=row.step, number=row.number)}{endings}"


def is_there(version: StoredVersion, place: Path, *, force: bool = False) -> bool:
    """Return whether a version's files are at a path already; raise `ConflictError` if others are, without `force`.

    The files of a coarse version, whose digests the store does not know, count as something else.
    """
    if not os.path.lexists(place):
        return False
    document = version.document
    exact = version.row.fidelity == "exact"
    if document.is_directory:
        links, directories = dict(document.links), {path for path, _ in document.directories}
        expected = {*links, *directories, *(entry.path for entry in document.files)}
        equal = (
            exact
            and place.is_dir()
            and expected == set(_below(place))
            and all(os.path.islink(place / path) and os.readlink(place / path) == aim for path, aim in links.items())
            and all(_is_equal(place / entry.path, entry) for entry in document.files)
        )
    else:
        equal = exact and _is_equal(place, document.files[0])
    if not equal and not force:
        raise ConflictError(
            f"{place} exists, and is not version {version.row.number}; name another directory, or add --force."
        )
    return equal


def _below(place: Path) -> Iterator[str]:
    for directory, directories, names in os.walk(place):
        for name in [*directories, *names]:
            yield os.path.relpath(os.path.join(directory, name), place).replace(os.sep, "/")


def _is_equal(place: Path, entry: FileEntry) -> bool:
    """Return whether a regular file has the bytes of a file of a version."""
    status = os.lstat(place)
    if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
        return False
    digest = blake3()
    with place.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == entry.blake3
