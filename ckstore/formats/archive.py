"""Archives of files with tensors: npz, zips such as those of Stable-Baselines 3 and Keras, and tars such as `.nemo`.

A stored entry is a file in a file: it is parsed like any other, and its tensors are named after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from msgspec.structs import replace

from ckstore.errors import InputError
from ckstore.formats.facts import facts_of_mapping, json_mapping
from ckstore.formats.layout import LARGE_BYTES, Checked, FileLayout, Path, Source, TensorRef
from ckstore.formats.sources import PartSource
from ckstore.formats.tar_headers import BLOCK, TarEntry, read_headers
from ckstore.formats.torch.exported import weights_of
from ckstore.formats.trees import renumber_tensors
from ckstore.formats.zip_directory import (
    FIRST_RECORD,
    NoDirectoryError,
    ZipEntry,
    check_crc,
    first_name,
    read_directory,
)

#: The entry with the attributes of a Stable-Baselines 3 model, and its key for the step.
_ATTRIBUTES = "data"
_STEPS = "num_timesteps"
#: The first entries that Stable-Baselines 3 and Keras write; they identify a truncated archive.
_FIRST_NAMES = (_ATTRIBUTES, "metadata.json")
#: The files of a tar by torch before 0.1.10, in a format that is not read.
_OF_OLD_TORCH = {"sys_info", "pickle", "storages", "tensors"}
#: Maximal bytes of a tar's headers and small files without tensors, which are read as one.
_MAX_SMALL_BYTES = 1 << 26


def parse_archive(source: Source, kind: str, parse_entry: Callable[[Source], FileLayout | None]) -> FileLayout | None:
    """Return the layout of an archive of kind `npz` or `zip`; None if no entry of a `zip` holds tensors.

    An entry's name without its ending is the first segment of its tensors' paths. `parse_entry` parses an entry;
    compressed ones, and stored ones without tensors, for which it returns None, stay bytes. The CRCs of large entries
    are in `checked`, after the CRCs within them; those of small entries are compared. Raises `InputError` if the
    archive is cut off or damaged.
    """
    try:
        entries = sorted(read_directory(source), key=lambda entry: entry.start)
    except NoDirectoryError:
        if kind == "npz" or first_name(source.pread(0, min(source.size, FIRST_RECORD))) in _FIRST_NAMES:
            raise
        return None
    layout = FileLayout(kind, source.size, tree={})
    names = _names(entries)
    weights = weights_of(source, entries, names) if kind == "zip" else {}
    for entry, name in zip(entries, names, strict=True):
        extents = len(layout.extents)
        weight, why = weights.get(entry.name), ""
        if weight is None:
            inner, why = _parsed(source, entry, kind, parse_entry)
            _add(layout, entry, name, inner)
        elif weight.tensors:
            _add(layout, entry, "", weight)
        if why:
            layout.bytes_for[entry.name] = why
        if not entry.plain:
            continue  # The CRC covers the bytes before compression.
        if len(layout.extents) > extents:
            layout.checked.append(Checked(entry.name, entry.start, entry.stop, entry.crc_positions))
        else:
            check_crc(source, entry)
        if entry.name == _ATTRIBUTES:
            attributes = json_mapping(PartSource(source, entry.start, entry.size))
            layout.facts |= facts_of_mapping({"step": attributes.get(_STEPS)})
    if layout.tensors:
        return layout
    layout.tree = None
    return layout if layout.kind == "npz" else None


def is_of_old_torch(source: Source) -> bool:
    """Return whether a tar archive is a checkpoint of torch before 0.1.10."""
    headers = read_headers(source)
    return headers is not None and {entry.name for entry in headers.entries} >= _OF_OLD_TORCH


def parse_tar(source: Source, parse_entry: Callable[[Source], FileLayout | None]) -> FileLayout | None:
    """Return the layout of a tar archive; None if no file in it holds tensors, or if it is too unusual to be read.

    Paths of tensors are those of `parse_archive`. Raises `InputError` if a file with tensors is damaged, or the archive
    of one is.
    """
    headers = read_headers(source)
    if headers is None or {entry.name for entry in headers.entries} >= _OF_OLD_TORCH:
        return None
    layout = FileLayout("tar", source.size, tree={})
    small = 0
    for entry, name in zip(headers.entries, _names(headers.entries), strict=True):
        try:
            inner = parse_entry(PartSource(source, entry.start, entry.size))
        except InputError as error:
            raise InputError(f"{entry.name}: {error}") from error
        small += BLOCK + (entry.size if entry.size < LARGE_BYTES and (inner is None or not inner.tensors) else 0)
        if small > _MAX_SMALL_BYTES:
            return None
        _add(layout, entry, name, inner)
    if not layout.tensors:
        return None
    if headers.problem:
        raise InputError(headers.problem)
    layout.add_bytes(("__trailer__",), headers.stop, source.size)
    return layout


def _names(entries: Sequence[ZipEntry] | Sequence[TarEntry]) -> list[str]:
    """Return the first segments of the paths of entries: names without endings where these are distinct."""
    short = Counter(_short(entry.name) for entry in entries)
    return [_short(entry.name) if short[_short(entry.name)] == 1 else entry.name for entry in entries]


def _add(layout: FileLayout, entry: ZipEntry | TarEntry, name: str, inner: FileLayout | None) -> None:
    """Add an entry's tensors below `name`, or without one at the top, or its bytes."""
    if inner is not None and (inner.tensors or inner.bytes_for):
        tree = embed(layout, inner, entry.start, (name,) if name else (), entry.name)
        layout.tree |= ({name: tree} if name else tree) if inner.tensors else {}
        layout.facts = inner.facts | layout.facts
    else:
        layout.add_bytes(("__entry__", entry.name), entry.start, entry.stop)
    if inner is not None:
        layout.bytes_for |= {f"{entry.name}/{part}" if part else entry.name: at for part, at in inner.bytes_for.items()}


def embed(layout: FileLayout, inner: FileLayout, start: int, path: Path, name: str) -> Any:
    """Add the layout of a file at byte `start` of another; return its tree.

    `path` precedes its paths, and is the path of a tensor that is all of the file; `name` precedes the names of its
    checked stretches.
    """
    extents, tensors = len(layout.extents), len(layout.tensors)
    skip = 1 if isinstance(inner.tree, TensorRef) else 0
    for extent in inner.extents:
        layout.extents.append(replace(extent, start=start + extent.start, path=(*path, *extent.path[skip:])))
    for tensor in inner.tensors:
        number = extents + tensor.extent if tensor.extent >= 0 else -1
        layout.tensors.append(replace(tensor, path=(*path, *tensor.path[skip:]), extent=number))
    for one in inner.checked:
        positions = tuple(start + position for position in one.positions)
        layout.checked.append(Checked(f"{name}/{one.name}", start + one.start, start + one.stop, positions))
    tree, shared = renumber_tensors(inner.tree, lambda number: TensorRef(tensors + number), inner.shared)
    layout.shared += shared
    return tree


def _short(name: str) -> str:
    """Return a name without its ending."""
    ending = PurePosixPath(name).suffix
    return name.removesuffix(ending) if ending else name


def _parsed(
    source: Source, entry: ZipEntry, kind: str, parse_entry: Callable[[Source], FileLayout | None]
) -> tuple[FileLayout | None, str]:
    """Return the layout of an entry; None for bytes, with the reason if it is known."""
    if not entry.plain:
        return None, "compressed"
    try:
        found = parse_entry(PartSource(source, entry.start, entry.size))
    except InputError as error:
        if kind == "npz":
            raise InputError(f"{entry.name}: {error}") from error
        return None, ""  # The archive's own CRC is valid: the entry was damaged before it was packed.
    return found, "no npy file" if found is None and kind == "npz" else ""
