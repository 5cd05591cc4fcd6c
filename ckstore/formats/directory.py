"""The contents of a checkpoint directory: files, directories and links, and whether a file is a checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from ckstore.errors import InputError
from ckstore.formats.detect import holds_tensors, is_pointer
from ckstore.formats.paths import listed
from ckstore.formats.sources import PERMISSIONS, FileSource
from ckstore.runtime.access import DENIED, denied
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
    "_CHECKPOINT_METADATA",
}
#: Names of files that are parts of one checkpoint.
_PART = re.compile(
    r"\.index\.json$|\.distcp$|-\d+-of-\d+|^consolidated\.\d+|^random_states_\d+|(?<![a-z])(?:rank|shard|part)[-_]?\d+",
    re.IGNORECASE,
)
#: Endings of files that hold tensors.
_ENDINGS = {
    ".bin", ".ckpt", ".distcp", ".gguf", ".h5", ".hdf5", ".keras", ".msgpack", ".npy", ".npz", ".ocdbt", ".onnx", ".pt",
    ".pt2", ".pth", ".safetensors",
}  # fmt: skip
#: Endings that packers and compressors add.
_PACKED = re.compile(r"(?:\.(?:tar|gz|zst|xz|bz2))+$")
#: Files of a run next to the configuration of all its steps: mlx_lm writes an adapter every hundred steps.
_OF_SERIES = re.compile(r"[0-9]{7}_adapters\.safetensors")
#: The directory of the files to which a snapshot in the cache of Hugging Face links, from its root.
_BLOBS = os.path.join("..", "..", "blobs")
_UP_TO_NUMBER = re.compile(r"[^0-9]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory tree: its path from the root with `/`, permissions, the target of a link as written."""

    path: str
    kind: Literal["file", "directory", "symlink"]
    mode: int
    size: int = 0
    target: str = ""


def scan(root: str | os.PathLike[str], *, blobs: bool = False) -> list[Entry]:
    """Return all entries below a directory, sorted by path.

    With `blobs`, the links of a snapshot in the cache of Hugging Face are the regular files to which they lead.

    Raises `InputError` for links that lead out of the tree, devices, sockets and FIFOs, names that are not UTF-8,
    unreadable directories.
    """
    base = os.fspath(root)
    real_base = os.path.realpath(base)
    real_blobs = os.path.realpath(os.path.join(base, _BLOBS)) if blobs else None
    entries: list[Entry] = []
    left = [""]
    while left:
        folder = left.pop()
        try:
            with os.scandir(os.path.join(base, folder)) as found:
                children = list(found)
        except OSError as error:
            place = os.path.join(base, folder)
            if error.errno in DENIED:
                raise InputError(str(denied(place, error))) from error
            raise InputError(f"{place} cannot be listed ({error.strerror}); name a directory that can.") from error
        for child in children:
            path = f"{folder}/{child.name}" if folder else child.name
            try:
                path.encode("utf-8")
            except UnicodeEncodeError:
                shown = os.path.join(base, path).encode("utf-8", "backslashreplace").decode("utf-8")
                raise InputError(f"The name {shown} is not UTF-8; rename it, then ingest again.") from None
            entry = _entry(child, path, base, real_base, real_blobs)
            entries.append(entry)
            if entry.kind == "directory":
                left.append(path)
    return sorted(entries, key=lambda entry: entry.path)


def has_checkpoint(root: str | os.PathLike[str], entries: Iterable[Entry]) -> bool:
    """Return whether a file of a scanned directory is of a kind with tensors; reads heads and directories only.

    An unreadable file counts by its name.
    """
    for entry in entries:
        if entry.kind == "file" and entry.size:
            try:
                with FileSource(os.path.join(root, entry.path)) as source:
                    if holds_tensors(source):
                        return True
            except InputError:
                if is_named_as_tensors(entry.path):
                    return True
    return False


def is_named_as_tensors(name: str) -> bool:
    """Return whether a file's name has the ending of a format that holds tensors, packed or not.

    Examples
    --------
    >>> is_named_as_tensors("step5.pth.tar"), is_named_as_tensors("notes.txt")
    (True, False)
    """
    return PurePosixPath(_PACKED.sub("", name)).suffix.lower() in _ENDINGS


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
    remedy = (
        "`force` stores their bytes unchanged" if any(entry.kind == "file" for entry in entries) else "name another"
    )
    raise InputError(f"{os.fspath(root)} holds no checkpoint: none of its files is of a kind with tensors; {remedy}.")


def refuse_several(root: str | os.PathLike[str], entries: Iterable[Entry]) -> None:
    """Raise `InputError` if a scanned directory holds checkpoints of several steps, which are separate versions."""
    several = _several(root, list(entries))
    if len(several) > 1:
        raise several_error(root, several)


def _several(root: str | os.PathLike[str], entries: Sequence[Entry]) -> list[str]:
    """Return the names in a directory that have different steps and are checkpoints, by step."""
    several: dict[int, str] = {}
    for entry in entries:
        step = None if "/" in entry.path else named_step(entry.path)
        if step is not None and step not in several:
            inside = [other for other in entries if other.path == entry.path or other.path.startswith(f"{entry.path}/")]
            if has_checkpoint(root, inside):
                several[step] = entry.path
    return [name for _, name in sorted(several.items())]


def several_error(root: str | os.PathLike[str], names: Sequence[str]) -> InputError:
    """Return the error for a directory with several checkpoints, given by name."""
    pattern = os.path.join(os.fspath(root), _UP_TO_NUMBER.findall(names[0])[0])
    return InputError(
        f"{os.fspath(root)} holds {len(names)} checkpoints, not one ({listed(names)}): store each with "
        f"`recursive`, all as one version with `force`, or name them, as {pattern}*."
    )


def is_of_series(name: str) -> bool:
    """Return whether a file is one step of a run in its directory, whatever lies next to it."""
    return _OF_SERIES.fullmatch(name) is not None


def is_marked(names: Iterable[str]) -> bool:
    """Return whether one of the files of a directory is a part of one checkpoint, or accompanies its tensors."""
    those = list(names)
    if any(map(is_of_series, those)):
        return False
    return any(name in _COMPANIONS or _PART.search(name) for name in those)


def is_one(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory is one checkpoint, even a damaged or incomplete one.

    It holds tensors, but not those of several steps, and either its name has a step, unless its only entry has one too,
    or a file marks it.
    """
    with os.scandir(directory) as found:
        inside = list(found)
    alone = inside[0].name if len(inside) == 1 else ""
    named = named_step(os.path.basename(os.path.realpath(directory))) is not None and named_step(alone) is None
    if not named and not is_marked(entry.name for entry in inside if not entry.is_dir(follow_symlinks=False)):
        return False
    files = list(_files(directory))
    if not has_checkpoint(directory, files):
        return False
    steps = _several(directory, files)
    if named or len(steps) != 1:
        return len(steps) < 2
    # The first step of a run, next to files of all its steps, as DeepSpeed writes them.
    return has_checkpoint(directory, [file for file in files if not f"{file.path}/".startswith(f"{steps[0]}/")])


def is_part(file: str | os.PathLike[str]) -> bool:
    """Return whether a file is a part of a checkpoint directory: files there mark one, and its name has no step."""
    directory, name = os.path.split(os.path.abspath(file))
    return named_step(name) is None and is_marked(os.listdir(directory))


def _files(root: str | os.PathLike[str]) -> Iterator[Entry]:
    """Yield the entries of a tree that can be listed, directories without their permissions; links are left out."""
    for place, directories, names in os.walk(root):
        inner = os.path.relpath(place, root)
        prefix = "" if inner == "." else f"{inner}/"
        yield from (Entry(f"{prefix}{name}", "directory", 0) for name in directories)
        for name in names:
            status = os.lstat(os.path.join(place, name))
            if stat.S_ISREG(status.st_mode):
                yield Entry(f"{prefix}{name}", "file", status.st_mode & PERMISSIONS, status.st_size)


def _entry(child: os.DirEntry[str], path: str, base: str, real_base: str, real_blobs: str | None) -> Entry:
    status = child.stat(follow_symlinks=False)
    mode = status.st_mode & PERMISSIONS
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(child.path)
        if real_blobs is not None and os.path.dirname(os.path.realpath(child.path)) == real_blobs:
            status = os.stat(child.path)
            if stat.S_ISREG(status.st_mode):
                return Entry(path, "file", status.st_mode & PERMISSIONS, status.st_size)
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
