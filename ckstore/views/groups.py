"""Versions and runs as read-only Zarr groups of plain arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import zarr

from ckstore.codecs.lattice import CHUNK
from ckstore.reading.buffers import read_tensor
from ckstore.reading.renames import under_last_names
from ckstore.reading.stored_version import StoredVersion, stored_version
from ckstore.repository import Address
from ckstore.runtime.collector import collection_seldom
from ckstore.views.nodes import ArrayNode, Hierarchy, join
from ckstore.views.zarr_store import ViewStore

#: Name of the array of a tensor whose path is a prefix of other tensors' paths; no segment of a path has this form.
TENSOR = "__tensor__"

#: The axis of a run's arrays that counts versions.
VERSION_AXIS = "version"

if TYPE_CHECKING:
    # zarr's own types are unions that no slice passes: a path leads to an array or a group, a slice is an array or a
    # scalar. Where the argument decides, `Any`, as in typeshed.

    class TypedArray(zarr.Array[Any]):
        """An array whose slices are NumPy arrays."""

        def __getitem__(self, selection: Any) -> npt.NDArray[Any] | Any: ...  # type: ignore[override]

    class TypedGroup(zarr.Group):
        """A group of such arrays."""

        def __getitem__(self, path: str) -> TypedArray | Any: ...


@collection_seldom()
def version_group(version: StoredVersion) -> TypedGroup:
    """Return all tensors of a version as a group; see `Version.arrays`."""
    return _group(version_store(version))


def run_group(name: str, versions: Sequence[StoredVersion]) -> TypedGroup:
    """Return the tensors that all of a run's versions share as a group; see `Run.arrays`."""
    return _group(run_store(name, versions))


def _group(store: ViewStore) -> TypedGroup:
    return cast("TypedGroup", zarr.open_group(store, mode="r"))


def version_store(version: StoredVersion) -> ViewStore:
    """Return the Zarr store of a version."""
    arrays: dict[str, ArrayNode] = {}
    for path, name, dimensions in _named(version):
        _, tensor = version.paths[path]
        chunk = chunk_shape(tensor.shape, tensor.strides)
        arrays[name] = ArrayNode(tensor.dtype, tensor.shape, chunk, dimensions, _box_reader(version, path))
    row = version.row
    attributes = {"version": row.number, "run": row.run, "step": row.step, "id": row.uid}
    identity = (_reopened_version, version.repository.address, row.uid, row.number)
    return ViewStore(Hierarchy(arrays, attributes), identity)


def run_store(run: str, versions: Sequence[StoredVersion]) -> ViewStore:
    """Return the Zarr store of some versions of a run."""
    own, versions = versions, under_last_names(versions)
    common, left_out = _common(versions)
    arrays: dict[str, ArrayNode] = {}
    for path, name, dimensions in _named(versions[-1]) if versions else []:
        if path not in common:
            continue
        _, tensor = versions[-1].paths[path]
        arrays[name] = ArrayNode(
            tensor.dtype, (len(versions), *tensor.shape), (1, *chunk_shape(tensor.shape, tensor.strides)),
            (_free(VERSION_AXIS, name, versions[-1].paths), *dimensions), _run_reader(versions, path),
        )  # fmt: skip
    attributes = {
        "run": run,
        "versions": [version.row.number for version in versions],
        "steps": [version.row.step for version in versions],
        "left_out": left_out,
    }
    if renamed := {name: path for before, after in zip(own, versions, strict=True) if before is not after
                   for name, path in zip(before.paths, after.paths, strict=True) if name != path}:  # fmt: skip
        attributes["renamed"] = renamed
    names = tuple((version.row.uid, version.row.number) for version in versions)
    address = versions[0].repository.address if versions else None
    identity = (_reopened_run, address, run, names)
    return ViewStore(Hierarchy(arrays, attributes), identity)


@lru_cache
def chunk_shape(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a view's chunks: about 2^18 elements that are adjacent in memory.

    Trailing axes are whole as far as they fit, in the order of memory, as in the chunks of objects.

    Examples
    --------
    >>> chunk_shape((1000, 50, 40), (2000, 40, 1)), chunk_shape((1000, 2000), (1, 1000)), chunk_shape((0, 3), (3, 1))
    ((131, 50, 40), (1000, 262), (1, 3))
    """
    chunk = [1] * len(shape)
    inner = 1
    for axis in sorted(range(len(shape)), key=lambda axis: (strides[axis], -axis)):
        chunk[axis] = max(1, min(shape[axis], CHUNK // inner))
        inner *= chunk[axis]
        if chunk[axis] < shape[axis]:
            break
    return tuple(chunk)


def _named(version: StoredVersion) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (path as text, name in Zarr, names of the axes) of all tensors."""
    paths = version.paths
    above = {path[: slash.start()] for path in paths for slash in re.finditer("/", path)}
    named = []
    for path, (_, tensor) in paths.items():
        name = path + (f"/{TENSOR}" if path in above else "")
        last = name.rpartition("/")[2]
        dimensions = tuple(_free(f"{last}_dim{axis}", name, paths) for axis in range(len(tensor.shape)))
        named.append((path, name, dimensions))
    return named


def _free(dimension: str, name: str, paths: Collection[str]) -> str:
    """Return a name of an axis that no array next to `name` has: xarray would use it as the axis's coordinate."""
    group = name.rpartition("/")[0]
    while join(group, dimension) in paths:
        dimension += "_"
    return dimension


def _box_reader(version: StoredVersion, path: str) -> Callable[..., npt.NDArray[Any]]:
    """Return a function that reads boxes of one tensor."""

    def read(starts: tuple[int, ...], stops: tuple[int, ...]) -> npt.NDArray[Any]:
        file, tensor = version.place(path)
        wanted = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
        return read_tensor(version, file, tensor, wanted)

    return read


def _run_reader(versions: Sequence[StoredVersion], path: str) -> Callable[..., npt.NDArray[Any]]:
    readers = [_box_reader(version, path) for version in versions]

    def read(starts: tuple[int, ...], stops: tuple[int, ...]) -> npt.NDArray[Any]:
        return np.stack([readers[number](starts[1:], stops[1:]) for number in range(starts[0], stops[0])])

    return read


def _common(versions: Sequence[StoredVersion]) -> tuple[set[str], dict[str, list[str]]]:
    """Return the paths that all versions have with one dtype and shape; and the others, by their problem."""
    held: dict[str, int] = {}
    kinds: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for version in versions:
        for path, (_, tensor) in version.paths.items():
            held[path] = held.get(path, 0) + 1
            kinds.setdefault(path, set()).add((tensor.dtype, tensor.shape))
    common = {path for path, number in held.items() if number == len(versions) and len(kinds[path]) == 1}
    return common, {
        "missing": [path for path, number in held.items() if number < len(versions)],
        "changed": [path for path, number in held.items() if number == len(versions) and len(kinds[path]) > 1],
    }


def _reopened_version(address: Address, uid: str, number: int) -> ViewStore:
    """Return the Zarr store of a version, from a store that this process opens once: the target of a pickled view."""
    return version_store(stored_version(address, uid, number))


def _reopened_run(address: Address | None, name: str, versions: tuple[tuple[str, int], ...]) -> ViewStore:
    return run_store(name, [] if address is None else [stored_version(address, *version) for version in versions])
