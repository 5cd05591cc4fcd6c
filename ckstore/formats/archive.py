"""Zip archives of files with tensors, such as those of Stable-Baselines 3 and Keras.

A stored entry is a file in a file: it is parsed like any other, and its tensors are named after it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ckstore.errors import InputError
from ckstore.formats.facts import facts_of_mapping
from ckstore.formats.layout import Checked, Extent, FileLayout, Source, TensorRef
from ckstore.formats.sources import PartSource
from ckstore.formats.trees import replace_tensors
from ckstore.formats.zip_directory import (
    FIRST_RECORD,
    LARGE_ENTRY_BYTES,
    NoDirectoryError,
    ZipEntry,
    check_crc,
    first_name,
    read_directory,
)

#: The entry with the attributes of a Stable-Baselines 3 model, its key for the step, and its largest size in bytes.
_ATTRIBUTES = "data"
_STEPS = "num_timesteps"
_MAX_ATTRIBUTES_BYTES = 1 << 26
#: The first entries that Stable-Baselines 3 and Keras write; they identify a truncated archive.
_FIRST_NAMES = (_ATTRIBUTES, "metadata.json")


def parse_archive(source: Source, parse_entry: Callable[[Source], FileLayout | None]) -> FileLayout | None:
    """Return the layout of an archive; an entry's name without its ending is the first segment of its tensors' paths.

    Compressed entries, and stored ones without tensors, stay bytes. The CRCs of large entries are in `checked`, after
    the CRCs within them; those of small entries are compared.

    Parameters
    ----------
    source
        The file.
    parse_entry
        Parses a file in the archive; returns None for a kind without tensors.

    Returns
    -------
    FileLayout or None
        None if no entry holds tensors.

    Raises
    ------
    InputError
        If the archive is cut off or damaged.
    """
    try:
        entries = sorted(read_directory(source), key=lambda entry: entry.start)
    except NoDirectoryError:
        if first_name(source.pread(0, min(source.size, FIRST_RECORD))) in _FIRST_NAMES:
            raise
        return None
    layout = FileLayout("zip", source.size, tree={})
    short = Counter(_short(entry.name) for entry in entries)
    compressed = []
    for entry in entries:
        extents = len(layout.extents)
        inner = _parsed(source, entry, parse_entry) if entry.plain else None
        if inner is not None and inner.tensors:
            _insert(layout, inner, entry, _short(entry.name) if short[_short(entry.name)] == 1 else entry.name)
        elif entry.size >= LARGE_ENTRY_BYTES:
            layout.extents.append(Extent(entry.start, "uint8", (entry.size,), ("__entry__", entry.name)))
        if not entry.plain:
            compressed.append(entry.name)
        elif len(layout.extents) > extents:
            layout.checked.append(Checked(entry.name, entry.start, entry.stop, entry.crc_positions))
        else:
            check_crc(source, entry)
        if entry.name == _ATTRIBUTES and entry.plain:
            layout.facts |= _facts(source, entry)
    layout.bytes_for |= dict.fromkeys(compressed, "compressed")
    return layout if layout.tensors else None


def _short(name: str) -> str:
    """Return a name without its ending."""
    ending = PurePosixPath(name).suffix
    return name.removesuffix(ending) if ending else name


def _parsed(source: Source, entry: ZipEntry, parse_entry: Callable[[Source], FileLayout | None]) -> FileLayout | None:
    """Return the layout of an entry; None for bytes."""
    try:
        return parse_entry(PartSource(source, entry.start, entry.size))
    except InputError:
        return None  # The archive's own CRC is valid: the entry was damaged before it was packed, and stays unchanged.


def _insert(layout: FileLayout, inner: FileLayout, entry: ZipEntry, name: str) -> None:
    """Add the layout of an entry to that of the archive."""
    extents, tensors = len(layout.extents), len(layout.tensors)
    for extent in inner.extents:
        layout.extents.append(replace(extent, start=entry.start + extent.start, path=(name, *extent.path)))
    for tensor in inner.tensors:
        number = extents + tensor.extent if tensor.extent >= 0 else -1
        layout.tensors.append(replace(tensor, path=(name, *tensor.path), extent=number))
    for checked in inner.checked:
        positions = tuple(entry.start + position for position in checked.positions)
        layout.checked.append(
            Checked(f"{entry.name}/{checked.name}", entry.start + checked.start, entry.start + checked.stop, positions)
        )
    layout.tree[name] = replace_tensors(inner.tree, lambda number: TensorRef(tensors + number))
    layout.bytes_for |= {f"{entry.name}/{part}" if part else entry.name: why for part, why in inner.bytes_for.items()}
    layout.facts = inner.facts | layout.facts


def _facts(source: Source, entry: ZipEntry) -> dict[str, Any]:
    """Return the step of a Stable-Baselines 3 model."""
    if not 2 <= entry.size <= _MAX_ATTRIBUTES_BYTES:
        return {}
    try:
        attributes = json.loads(source.pread(entry.start, entry.size))
    except (ValueError, RecursionError):
        return {}
    return facts_of_mapping({"step": attributes.get(_STEPS)} if isinstance(attributes, dict) else None)
