"""Directories of torch.distributed.checkpoint: shards of tensors, and a metadata file.

A `.distcp` file is a sequence of `torch.save` archives, one for each shard or object, without gaps. `.metadata` is a
pickle with the name, the file and the place in the whole tensor of each; it is read inertly. Without it the tensors of
a file have numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from msgspec import structs

from ckstore.errors import InputError
from ckstore.formats.archive import embed
from ckstore.formats.facts import facts_of_mapping
from ckstore.formats.layout import Box, Extent, FileLayout, Format, Path, Source, Tensor, opaque
from ckstore.formats.paths import listed
from ckstore.formats.shards import fit_together
from ckstore.formats.sources import PartSource
from ckstore.formats.torch.objects import reduce
from ckstore.formats.torch.pickle_reader import MAX_PICKLE_BYTES, Identity, Object, read_pickle
from ckstore.formats.torch.tree_reader import ROOT
from ckstore.formats.torch.zip import parse_torch_zip
from ckstore.formats.zip_directory import archive_starts, follows_others, starts_like_zip

#: Name of the file that describes the others of its directory.
METADATA = ".metadata"

_MODULE = "torch.distributed.checkpoint.metadata"
_MODULE_BYTES = _MODULE.encode() + b"\x94\x8c\x08Metadata"


@dataclass(frozen=True, slots=True)
class Item:
    """A shard of a tensor, or an object, which has no box, by its typed path.

    Its archive is `nbytes` bytes from `start` of a file, whose path is below the directory.
    """

    path: Path
    file: str
    start: int
    nbytes: int
    box: Box | None


def _starts_like_metadata(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is the metadata of a checkpoint."""
    return head[:1] == b"\x80" and _MODULE_BYTES in head


def _parse(source: Source) -> FileLayout | None:
    """Return the layout of a file of archives; the tensors of the n-th have paths that begin with n.

    None for a single archive; bytes if it contains anything but torch zips. Raises `InputError` if one is damaged.
    """
    if not follows_others(source):
        return None
    layout = FileLayout("dcp", source.size, tree=[])
    starts = archive_starts(source)
    for number, (start, stop) in enumerate(pairwise([*starts, source.size])):
        inner = parse_torch_zip(PartSource(source, start, stop - start))
        if inner is None:
            starts = []
            break
        layout.tree.append(embed(layout, inner, start, (number,), f"[{number}]"))
    return layout if starts else opaque(source, why="consecutive archives, not all written by torch")


def read_metadata(data: bytes) -> list[Item]:
    """Return all items of a checkpoint, in the order of its state dict; raise `InputError` for any other bytes."""
    if len(data) > MAX_PICKLE_BYTES:
        raise InputError(f"the metadata has more than {MAX_PICKLE_BYTES:,} bytes")
    root, _ = read_pickle(data, reduce=reduce)
    try:
        return _items(_state(root, "Metadata"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError("the metadata does not describe a checkpoint") from error


def name_tensors(layouts: dict[str, FileLayout], items: Sequence[Item], sources: dict[str, Source]) -> bool:
    """Give the tensors of a checkpoint's files, by their paths in the directory, the names and places of its metadata.

    Returns whether names were given: not if a file contains anything but archives, or is cut in another way than the
    metadata describes. Only then the layouts are changed. Raises `InputError` if a file is missing or cut off, or the
    shards of a tensor do not make up the tensor.
    """
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    missing = sorted(by_file.keys() - layouts.keys())
    if missing:
        raise InputError(f"it names {listed(missing)}, which is missing: copy the whole checkpoint")
    for file, members in by_file.items():
        if any(one.start + one.nbytes > layouts[file].size for one in members):
            raise InputError(f"it names {file}, which is cut off: copy the whole checkpoint")
    named: dict[str, FileLayout] = {}
    shards: dict[Path, list[Tensor]] = {}
    objects: dict[Any, Any] = {}
    for file, members in by_file.items():
        layout = layouts[file]
        members.sort(key=lambda item: item.start)
        starts = archive_starts(sources[file])
        stretches = [(start, stop - start) for start, stop in pairwise([*starts, layout.size])]
        if layout.kind not in ("dcp", "torch-zip") or [(one.start, one.nbytes) for one in members] != stretches:
            return False
        trees = layout.tree if layout.kind == "dcp" else [layout.tree]
        tensors = []
        for tensor in layout.tensors:
            number, inner = (tensor.path[0], tensor.path[1:]) if layout.kind == "dcp" else (0, _inside(tensor.path))
            item = members[int(number)]
            box = item.box or Box((0,) * len(tensor.shape), tensor.shape)
            if item.box is not None and inner:
                return False
            tensors.append(structs.replace(tensor, path=(*item.path, *inner), box=box))
            shards.setdefault(tensors[-1].path, []).append(tensors[-1])
        for number, item in enumerate(members):
            if item.box is None and len(item.path) == 1:
                objects[item.path[0]] = trees[number]
        named[file] = replace(layout, kind="dcp", tensors=tensors, extents=_named_extents(layout, members))
    for path, parts in shards.items():
        if not fit_together(parts):
            raise InputError(f"the shards of {'.'.join(map(str, path))} do not make up the tensor: copy all files")
    layouts |= named
    for layout in named.values():
        layout.facts = facts_of_mapping(objects)
    return bool(named)


def nested(leaves: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Return the state dict of leaves by typed path; a container with exactly the keys 0, 1, 2, … becomes a list.

    Raises `InputError` if a path leads through a leaf, or two paths are equal.
    """
    top: dict[Any, Any] = {}
    inner = {id(top)}
    containers = [top]
    for path, leaf in leaves:
        node = top
        for segment in path[:-1]:
            if segment not in node:
                node[segment] = {}
                inner.add(id(node[segment]))
                containers.append(node[segment])
            node = node[segment]
            if id(node) not in inner:
                raise InputError(f"{'.'.join(map(str, path))} leads through a value that is no container")
        if not path or path[-1] in node:
            raise InputError(f"{'.'.join(map(str, path))} occurs twice")
        node[path[-1]] = leaf
    # The last container is the deepest: references to it come later.
    for node in reversed(containers):
        for key, value in node.items():
            if id(value) in inner and list(value) and sorted(map(_place, value)) == list(range(len(value))):
                node[key] = [value[index] for index in range(len(value))]
    return top


def _place(key: Any) -> int:
    return key if type(key) is int else -1


def _inside(path: Path) -> Path:
    """Return the path below the root of an archive: a tensor that is all of it has none."""
    return path[1:] if path[: len(ROOT)] == ROOT else path


def _named_extents(layout: FileLayout, members: Sequence[Item]) -> list[Extent]:
    extents = []
    number = 0
    for extent in layout.extents:
        while number + 1 < len(members) and members[number + 1].start <= extent.start:
            number += 1
        inner = extent.path[1:] if layout.kind == "dcp" else _inside(extent.path)
        extents.append(structs.replace(extent, path=(*members[number].path, *inner)))
    return extents


def _items(metadata: dict[str, Any]) -> list[Item]:
    paths = metadata.get("planner_data") or {}
    wholes: dict[str, tuple[int, ...] | None] = {}
    for name, described in metadata["state_dict_metadata"].items():
        is_tensor = type(described) is Object and described.name == f"{_MODULE}.TensorStorageMetadata"
        wholes[name] = _sizes(described.state["size"]) if is_tensor else None
    order = {name: number for number, name in enumerate(wholes)}
    items = []
    for key, place in metadata["storage_data"].items():
        index = _state(key.value if type(key) is Identity else key, "MetadataIndex")
        name, stored = index["fqn"], place.state
        whole = wholes[name]
        box = None if whole is None else Box(_sizes(index["offset"]), whole)
        path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
        file, start, nbytes = stored["relative_path"], stored["offset"], stored["length"]
        if type(file) is not str or not all(type(one) is int and one >= 0 for one in (start, nbytes)):
            raise ValueError("an invalid place")
        if not path or not all(type(segment) in (str, int) for segment in path):
            raise ValueError("an invalid path")
        items.append((order[name], Item(tuple(path), file, start, nbytes, box)))
    items.sort(key=lambda one: one[0])
    return [item for _, item in items]


def _state(node: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of a class of the metadata."""
    if type(node) is not Object or node.name != f"{_MODULE}.{name}" or not isinstance(node.state, dict):
        raise ValueError(f"no {name}")
    return node.state


def _sizes(node: Any) -> tuple[int, ...]:
    sizes = node.args[0] if type(node) is Object and node.name == "torch.Size" else node
    if not isinstance(sizes, tuple | list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("invalid sizes")
    return tuple(sizes)


FORMAT = Format("dcp", starts_like_zip, _parse)
METADATA_FORMAT = Format("dcp-metadata", _starts_like_metadata, lambda source: opaque(source, "dcp-metadata"))
