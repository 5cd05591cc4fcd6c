"""The contents of a checkpoint directory: files, directories and links, and whether a file is a checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckstore.errors import InputError
from ckstore.formats.detect import holds_tensors, is_pointer
from ckstore.formats.paths import listed
from ckstore.formats.sources import PERMISSIONS, FileSource
from ckstore.runtime.local_path import leads_out
from ckstore.steps import named_step

#: Files that accompany the tensors of one checkpoint.
_COMPANIONS = {
    "config.json",
    "adapter_config.json",
    "trainer_state.json",
    "model_index.json",
    ".metadata",
    "zero_to_fp32.py",
    "manifest.ocdbt",
}
_UP_TO_NUMBER = re.compile(r"[^0-9]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory tree: its path from the root with `/`, permissions, the target of a link as written."""

    path: str
    kind: Literal["file", "directory", "symlink"]
    mode: int
    size: int = 0
    target: str = ""


def scan(root: str | os.PathLike[str]) -> list[Entry]:
    """Return all entries below a directory, sorted by path.

    Raises `InputError` for links that lead out of the tree, devices, sockets and FIFOs, names that are not UTF-8,
    unreadable directories.
    """
    base = os.fspath(root)
    real_base = os.path.realpath(base)
    entries: list[Entry] = []
    left = [""]
    while left:
        folder = left.pop()
        try:
            with os.scandir(os.path.join(base, folder)) as found:
                children = list(found)
        except OSError as error:
            raise InputError(
                f"{os.path.join(base, folder)} cannot be listed ({error.strerror}); check its permissions."
            ) from error
        for child in children:
            path = f"{folder}/{child.name}" if folder else child.name
            try:
                path.encode("utf-8")
            except UnicodeEncodeError:
                shown = os.path.join(base, path).encode("utf-8", "backslashreplace").decode("utf-8")
                raise InputError(f"The name {shown} is not UTF-8; rename it, then ingest again.") from None
            entry = _entry(child, path, base, real_base)
            entries.append(entry)
            if entry.kind == "directory":
                left.append(path)
    return sorted(entries, key=lambda entry: entry.path)


def has_checkpoint(root: str | os.PathLike[str], entries: Iterable[Entry]) -> bool:
    """Return whether a file of a scanned directory is of a kind with tensors; reads heads and directories only."""
    for entry in entries:
        if entry.kind == "file" and entry.size:
            with FileSource(os.path.join(root, entry.path)) as source:
                if holds_tensors(source):
                    return True
    return False


def require_checkpoint(root: str | os.PathLike[str], entries: Iterable[Entry]) -> None:
    """Raise `InputError` with the remedy if a scanned directory holds no checkpoint."""
    entries = list(entries)
    if has_checkpoint(root, entries):
        return
    for entry in entries:
        if entry.kind == "file" and 0 < entry.size < 1024:
            with FileSource(os.path.join(root, entry.path)) as source:
                if is_pointer(source):
                    raise InputError(
                        f"{os.path.join(root, entry.path)} is a Git LFS pointer, not the checkpoint itself; "
                        "run `git lfs pull` first."
                    )
    raise InputError(f"{os.fspath(root)} holds no checkpoint: none of its files is of a kind with tensors.")


def refuse_several(root: str | os.PathLike[str], entries: Iterable[Entry]) -> None:
    """Raise `InputError` if a scanned directory holds checkpoints of several steps, which are separate versions."""
    entries = list(entries)
    several: dict[int, str] = {}
    for entry in entries:
        step = None if "/" in entry.path else named_step(entry.path)
        if step is not None and step not in several:
            inside = [other for other in entries if other.path == entry.path or other.path.startswith(f"{entry.path}/")]
            if has_checkpoint(root, inside):
                several[step] = entry.path
    if len(several) > 1:
        raise several_error(root, [name for _, name in sorted(several.items())])


def several_error(root: str | os.PathLike[str], names: Sequence[str]) -> InputError:
    """Return the error for a directory with several checkpoints, given by name."""
    pattern = os.path.join(os.fspath(root), _UP_TO_NUMBER.findall(names[0])[0])
    return InputError(
        f"{os.fspath(root)} holds {len(names)} checkpoints, not one ({listed(names)}): store each with "
        f"`recursive`, all as one version with `force`, or name them, as {pattern}*."
    )


def is_marked(names: Iterable[str]) -> bool:
    """Return whether one of the files of a directory accompanies the tensors of one checkpoint."""
    return any(name in _COMPANIONS or name.endswith(".index.json") for name in names)


def _entry(child: os.DirEntry[str], path: str, base: str, real_base: str) -> Entry:
    status = child.stat(follow_symlinks=False)
    mode = status.st_mode & PERMISSIONS
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(child.path)
        _check_link(path, target, base, real_base)
        return Entry(path, "symlink", mode, target=target)
    if stat.S_ISDIR(status.st_mode):
        return Entry(path, "directory", mode)
    if stat.S_ISREG(status.st_mode):
        return Entry(path, "file", mode, status.st_size)
    raise InputError(f"{os.path.join(base, path)} is a device, socket or FIFO; remove it from the directory first.")


def _check_link(path: str, target: str, base: str, real_base: str) -> None:
    """Refuse links that leave the tree, here or wherever it is restored."""
    if leads_out(path, target, base, real_base):
        raise InputError(
            f"{os.path.join(base, path)} is a link that leads out of the directory (to {target}); "
            "copy the directory with `cp -rL` and ingest the copy."
        )
    try:
        target.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(
            f"{os.path.join(base, path)} is a link to a name that is not UTF-8; rename its target."
        ) from None
