"""Opens what a caller names: a file, a directory, or a state dict in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckstore.errors import InputError
from ckstore.formats import step_of
from ckstore.scanning.scan import ScannedVersion, open_directory, open_file


def open_source(source: str | os.PathLike[str] | Any, store: Path, *, force: bool) -> ScannedVersion:
    """Parse a checkpoint; nothing of its tensors is read yet.

    Parameters
    ----------
    source
        Path of a file or directory, or a state dict.
    store
        The store's directory, which no source may hold.
    force
        Take damaged files as opaque bytes.

    Raises
    ------
    InputError
        It does not exist, is damaged, holds no checkpoint, or holds the store.
    UsageError
        The state dict holds what cannot be stored.
    """
    if not isinstance(source, str | os.PathLike):
        from ckstore.scanning.state_dicts import scan_state_dict

        scanned = scan_state_dict(source)
        scanned.step = _told_step(scanned, "")
        return scanned
    path = Path(source)
    if path.is_dir() and store.resolve().is_relative_to(path.resolve()):
        raise InputError(f"{path} holds the store itself; name a directory that does not.")
    if not path.exists():
        raise InputError(f"{path} does not exist; name a checkpoint file or directory.")
    return _opened(path, force=force)


def source_step(path: Path, *, force: bool = False) -> int | None:
    """The step that an ingest would store a file or directory at; None where neither it nor its name tells one.

    Raises
    ------
    InputError
        It is damaged or holds no checkpoint.
    """
    scanned = _opened(path, force=force)
    scanned.close()
    return scanned.step


def _opened(path: Path, *, force: bool) -> ScannedVersion:
    scanned = open_directory(path, force=force) if path.is_dir() else ScannedVersion([open_file(path, force=force)])
    scanned.name = str(path).encode("utf-8", "backslashreplace").decode()
    scanned.step = _told_step(scanned, path.name)
    return scanned


def _told_step(scanned: ScannedVersion, name: str) -> int | None:
    """The step that the files, or else a name, tell."""
    for fact in ("step", "epoch"):
        for file in scanned.files:
            value = file.layout.facts.get(fact)
            if isinstance(value, int):
                return value
    return step_of(name)
