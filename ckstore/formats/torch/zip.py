"""Zip archives of `torch.save` since 1.6: one pickle, and one stored entry for each storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError
from ckstore.formats.facts import facts_of_mapping
from ckstore.formats.layout import (
    LARGE_BYTES,
    Checked,
    Extent,
    FileLayout,
    Format,
    Path,
    Shared,
    Source,
    Tensor,
    TensorRef,
    Unknown,
)
from ckstore.formats.torch.objects import TorchPersistent, reduce
from ckstore.formats.torch.pickle_reader import MAX_PICKLE_BYTES, read_pickle
from ckstore.formats.torch.storages import StorageData, View, cut
from ckstore.formats.torch.tree_reader import TreeReader
from ckstore.formats.trees import renumber_tensors
from ckstore.formats.zip_directory import (
    FIRST_RECORD,
    NoDirectoryError,
    ZipEntry,
    check_crc,
    first_name,
    read_directory,
    starts_like_zip,
)


def parse_torch_zip(source: Source) -> FileLayout | None:
    """Return the layout of a torch zip; None for any other archive (TorchScript, zip of zips, big-endian).

    The CRCs of all entries but the large ones are compared here; those of storages are in `checked`, for later
    comparison. Raises `InputError` if a torch zip is cut off, or damaged outside of its storages.
    """
    try:
        entries = read_directory(source)
    except NoDirectoryError:
        if first_name(source.pread(0, min(source.size, FIRST_RECORD))).endswith("/data.pkl"):
            raise
        return None
    prefix = _torch_prefix(entries)
    if prefix is None:
        return _parse_package(source, entries)
    by_name = {entry.name.removeprefix(prefix): entry for entry in entries}
    pickle_entry = by_name["data.pkl"]
    if pickle_entry.size > MAX_PICKLE_BYTES:
        return None
    storages: dict[str, ZipEntry] = {}
    others: list[ZipEntry] = []
    for name, entry in by_name.items():
        if name.startswith("data/") and name != "data/":
            storages[name.removeprefix("data/")] = entry
        elif entry is not pickle_entry and entry.size >= LARGE_BYTES:
            others.append(entry)
        else:
            check_crc(source, entry)
    if _is_big_endian(source, by_name.get("byteorder")):
        return None
    persistent = TorchPersistent()
    data = source.pread(pickle_entry.start, pickle_entry.size)
    node, _ = read_pickle(data, reduce=reduce, persistent=persistent)
    return _layout_of(source, node, persistent, storages, others)


def _parse_package(source: Source, entries: list[ZipEntry]) -> FileLayout | None:
    """Return the layout of an archive of `torch.package`, whose tree has its pickles by name; None for another one.

    A pickle that is not readable by itself, as that of a `torch.fx` graph, stays bytes, and so do storages of such
    pickles alone. Source: https://github.com/pytorch/pytorch/blob/main/torch/package/package_exporter.py.
    """
    marker = next((one.name for one in entries if one.name.endswith("/.data/extern_modules")), "")
    prefix = marker.removesuffix(".data/extern_modules")
    by_name = {entry.name.removeprefix(prefix): entry for entry in entries}
    if not marker or not all(one.plain and one.name.startswith(prefix) for one in entries):
        return None
    if _is_big_endian(source, by_name.get("byteorder")):
        return None
    persistent = TorchPersistent()
    nodes: dict[str, Any] = {}
    for name, entry in by_name.items():
        if name.endswith(".pkl") and entry.size <= MAX_PICKLE_BYTES:
            data = source.pread(entry.start, entry.size)
            # Its storages have numbers for names.
            with suppress(InputError):
                nodes[name.removesuffix(".pkl")], _ = read_pickle(
                    data, reduce=reduce, persistent=lambda identity: persistent(_with_text(identity))
                )
    storages = {
        key: by_name[f".data/{key}.storage"] for key in persistent.storages if f".data/{key}.storage" in by_name
    }
    others: list[ZipEntry] = []
    for name in by_name.keys() - {f".data/{key}.storage" for key in storages}:
        if name.removesuffix(".pkl") not in nodes and by_name[name].size >= LARGE_BYTES:
            others.append(by_name[name])
        else:
            check_crc(source, by_name[name])
    layout = _layout_of(source, nodes, persistent, storages, others)
    return layout if layout.tensors else None


def _with_text(identity: Any) -> Any:
    """Return a persistent id whose key is text."""
    is_storage = type(identity) is tuple and len(identity) > 2 and type(identity[2]) is int
    return (*identity[:2], str(identity[2]), *identity[3:]) if is_storage else identity


def _is_big_endian(source: Source, entry: ZipEntry | None) -> bool:
    return entry is not None and source.pread(entry.start, min(entry.size, 8)) != b"little"


def _layout_of(
    source: Source, node: Any, persistent: TorchPersistent, storages: dict[str, ZipEntry], others: list[ZipEntry]
) -> FileLayout:
    """Return the layout of an archive from the content of its pickles, its storages, and entries that stay bytes."""
    reader = TreeReader()
    tree = reader.read(node)
    placed = []
    for key, storage in persistent.storages.items():
        entry_of_key = storages.get(key)
        if entry_of_key is None:
            raise InputError(f"the pickle refers to storage {key!r}, which the archive does not contain")
        if entry_of_key.size != storage.count * ITEM_SIZES[storage.dtype]:
            raise InputError(f"storage {key!r} has another size than in the pickle")
    for key, entry in storages.items():
        known = persistent.storages.get(key)
        dtype = "uint8" if known is None else None if known.untyped else known.dtype
        placed.append(StorageData(key, dtype, entry.start, entry.size))
    layout = assemble("torch-zip", source.size, placed, reader.views, tree, reader.shared)
    for entry in others:
        layout.add_bytes(("__entry__", entry.name), entry.start, entry.stop)
    layout.sort()
    layout.checked = [
        Checked(entry.name, entry.start, entry.stop, entry.crc_positions) for entry in (*storages.values(), *others)
    ]
    layout.checked.sort(key=lambda checked: checked.start)
    return layout


def assemble(
    kind: str, size: int, storages: list[StorageData], views: list[View], tree: Any, shared: Shared = ()
) -> FileLayout:
    """Return a layout of storages, views and the tree that refers to the views; for `shared` see `FileLayout`."""
    extents, placed = cut(storages, views)
    tensors = [tensor for tensor in placed if tensor is not None]
    if len(tensors) < len(placed):
        tree, shared = renumber_tensors(tree, _numbers_of(placed), shared)
    if len({extent.path for extent in extents}) < len(extents):
        extents = _with_distinct_paths(extents)
    return FileLayout(kind, size, extents, tensors, tree=tree, facts=facts_of_mapping(tree), shared=list(shared))


def _with_distinct_paths(extents: list[Extent]) -> list[Extent]:
    """Return the extents with distinct paths: a tensor may have the path of the rest of a storage."""
    seen: set[Path] = set()
    distinct = []
    for extent in extents:
        path, number = extent.path, 1
        while path in seen:
            number += 1
            path = (*extent.path, f"~{number}")
        seen.add(path)
        distinct.append(replace(extent, path=path))
    return distinct


def _numbers_of(placed: list[Tensor | None]) -> Callable[[int], TensorRef | Unknown]:
    """Return a function that numbers the placed tensors consecutively, and makes the others `Unknown`."""
    numbers: list[int] = []
    following = 0
    for tensor in placed:
        numbers.append(-1 if tensor is None else following)
        following += tensor is not None

    def renumbered(index: int) -> TensorRef | Unknown:
        return Unknown("torch.Tensor.view") if numbers[index] < 0 else TensorRef(numbers[index])

    return renumbered


def is_script(source: Source) -> bool:
    """Return whether a zip archive is a program of TorchScript."""
    try:
        entries = read_directory(source)
    except InputError:
        return False
    return any(entry.name.count("/") == 1 and entry.name.endswith("/constants.pkl") for entry in entries)


def _torch_prefix(entries: list[ZipEntry]) -> str | None:
    """Return the folder of all entries of a torch zip, with its slash; None for another archive."""
    pickles = [entry.name for entry in entries if entry.name.endswith("/data.pkl") and entry.name.count("/") == 1]
    if len(pickles) != 1:
        return None
    prefix = pickles[0].removesuffix("data.pkl")
    for entry in entries:
        name = entry.name.removeprefix(prefix)
        if not entry.plain or not entry.name.startswith(prefix) or name == "constants.pkl" or name.startswith("code/"):
            return None
    return prefix


FORMAT = Format("torch-zip", starts_like_zip, parse_torch_zip)
