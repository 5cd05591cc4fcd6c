"""Finds the faults of an incomplete checkpoint directory: unfinished, empty and missing files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ckstore.errors import InputError
from ckstore.formats.dcp import METADATA
from ckstore.formats.detect import is_pointer
from ckstore.formats.directory import is_named_as_tensors
from ckstore.formats.facts import json_mapping
from ckstore.formats.paths import listed
from ckstore.formats.shards import directory_of
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Names that writers give to unfinished files and directories.
UNFINISHED = re.compile(
    r"^_?te?mp([-_.]|$)|[-_.]te?mp([-_.]|$)|\.(part|partial|incomplete|download|crdownload)$", re.IGNORECASE
)

#: Endings and names of files that are never empty, as are those of formats that hold tensors.
_FILLED = {".json", ".pkl", ".zip"}
_FILLED_NAMES = {METADATA, "latest", "manifest.ocdbt"}

#: Bytes at which the parsers of all formats recognise a file.
_SHORTEST = 64

#: Endings that only one format has.
_KNOWN_BY_NAME = {".gguf", ".safetensors"}

_INDEX = ".index.json"

#: Number and count of a part, as in `model-00001-of-00003.safetensors`.
_PART = re.compile(r"(\d+)-of-(\d+)")
_MOST_PARTS = 100_000

#: The name of a checkpoint in a file such as DeepSpeed's `latest`.
_POINTED = re.compile(r"[\w.=-]{1,200}")

#: Model files that make an index of other files superfluous.
_WHOLE = ("model.safetensors", "pytorch_model.bin")


def require_complete(root: Path, version: ScannedVersion) -> None:
    """Raise `InputError` with the names of the files that a directory's parsed files lack, or that are unfinished."""
    faults = list(_faults(version))
    if faults:
        raise InputError(
            f"{root} is not a complete checkpoint: {listed(faults)}; save or copy it again, or store it as it is with "
            "`force`."
        )


def _faults(version: ScannedVersion) -> Iterator[str]:
    names = [*(file.path for file in version.files), *(path for path, _ in [*version.links, *version.directories])]
    there = set(names)
    for name in sorted(names):
        if UNFINISHED.search(PurePosixPath(name).name):
            yield f"{name} is unfinished"
    for file in version.files:
        # A rank that has nothing to save writes an empty shard: the metadata tells.
        is_described = file.path.endswith(".distcp") and f"{directory_of(file.path)}{METADATA}" in there
        if not is_described and (fault := fault_of(file)):
            yield f"{file.path} {fault}"
    missing: dict[str, str] = {}
    for name, why in [*_named_by_indexes(version, there), *_named_by_pointers(version, there), *_parts(version)]:
        missing.setdefault(name, why)
    yield from (f"{name} is missing, which {why}" for name, why in missing.items())
    for directory in sorted({directory_of(file.path) for file in version.files if file.path.endswith(".distcp")}):
        if f"{directory}{METADATA}" not in there:
            yield f"{directory}{METADATA} is missing, which is written last"


def fault_of(file: ScannedFile) -> str:
    """Return a fault of a file that its parser does not see; empty for none."""
    name = PurePosixPath(file.path)
    is_of_tensors = is_named_as_tensors(name.name)
    size = file.source.size
    if size == 0:
        return "is empty" if is_of_tensors or name.suffix in _FILLED or name.name in _FILLED_NAMES else ""
    if file.path.endswith(_INDEX) and not json_mapping(file.source):
        return "is no sound JSON"
    if file.layout.kind != "opaque" or not is_of_tensors:
        return ""
    if is_pointer(file.source):
        return "is a Git LFS pointer (`git lfs pull` fetches the file)"
    if size < _SHORTEST:
        return "is cut off"
    if not any(file.source.pread(0, _SHORTEST)):
        return "" if name.suffix == ".bin" else "holds only zeros"
    return f"does not begin as a {name.suffix} file does" if name.suffix in _KNOWN_BY_NAME else ""


def _named_by_indexes(version: ScannedVersion, there: set[str]) -> Iterator[tuple[str, str]]:
    """Yield missing files that an index of tensors names, and the index.

    An index without any of its files is left over if another one of the directory is complete.
    """
    indexes = {file.path: _indexed(file) for file in version.files if file.path.endswith(_INDEX)}
    whole = {directory_of(path) for path, named in indexes.items() if named and named <= there}
    whole |= {directory_of(path) for path in there if PurePosixPath(path).name in _WHOLE}
    for path, named in indexes.items():
        if directory_of(path) not in whole or named & there:
            yield from ((name, f"{path} names") for name in sorted(named - there))


def _indexed(file: ScannedFile) -> set[str]:
    """Return the paths of the files that an index names."""
    weights = json_mapping(file.source).get("weight_map")
    values: Iterable[object] = weights.values() if isinstance(weights, dict) else ()
    return {f"{directory_of(file.path)}{value}" for value in values if isinstance(value, str)}


def _named_by_pointers(version: ScannedVersion, there: set[str]) -> Iterator[tuple[str, str]]:
    """Yield missing files and directories to which a file `latest` points."""
    for file in version.files:
        if PurePosixPath(file.path).name != "latest" or not 0 < file.source.size < 256:
            continue
        pointed = file.source.pread(0, file.source.size).decode("utf-8", "replace").strip()
        name = f"{directory_of(file.path)}{pointed}"
        if _POINTED.fullmatch(pointed) and name not in there:
            yield name, f"{file.path} names"


def _parts(version: ScannedVersion) -> Iterator[tuple[str, str]]:
    """Yield missing files of tensors in several files, numbered from 0 or 1, by the count in their names."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for file in version.files:
        name = PurePosixPath(file.path).name
        part = _PART.search(name)
        if part is not None and file.layout.tensors and 0 < int(part[2]) <= _MOST_PARTS:
            key = directory_of(file.path) + name[: part.start()], name[part.end() :], part[2]
            found.setdefault(key, {})[int(part[1])] = part[1]
    for (before, after, count), numbers in found.items():
        width = min(map(len, numbers.values()))
        first = 0 if 0 in numbers else 1
        for number in range(first, first + int(count)):
            if number not in numbers:
                yield f"{before}{number:0{width}}-of-{count}{after}", f"is one of {int(count)} parts"
