"""Exports: tensors of a version as safetensors, pt or npz."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, get_args

import numpy as np
from msgspec.structs import replace

from ckstore.dtypes import ITEM_SIZES, NATIVE, plain_dtype
from ckstore.errors import CkstoreError, UsageError
from ckstore.formats.containers.safetensors import FLOAT4
from ckstore.formats.flat_writers import write_npz, write_safetensors
from ckstore.formats.layout import Extent, FileLayout, Tensor, TensorRef, row_major
from ckstore.formats.layout import Path as TensorPath
from ckstore.formats.torch.zip_writer import write_torch
from ckstore.formats.trees import replace_tensors, select_tensors, tensor_numbers
from ckstore.reading.buffers import read_tensor
from ckstore.reading.checkout import Block, staged
from ckstore.reading.real_values import plain_numbers, to_float64
from ckstore.reading.sharded import sharded_directories, sharded_files, sharded_tree
from ckstore.reading.subtree import Format, chosen_tensors, stripped_names, subtree_of
from ckstore.runtime.threads import in_order, worker_count
from ckstore.storage import durable

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Progress = Callable[[int], None]

#: Formats of exports.
FORMATS: tuple[Format, ...] = get_args(Format)

#: Metadata that loaders of safetensors files expect.
_METADATA = {"format": "pt"}


def export(
    version: StoredVersion,
    target: Path,
    format: Format,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    strip: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write tensors of a version to one file, with memory for a few chunks; return the paths of those left out.

    For safetensors and npz, a tensor that is not contiguous, or a conj or neg view, is held in memory whole.

    Parameters
    ----------
    format
        `safetensors` and `npz` store tensors by name: the text of their path, or the plain name if the version is one
        file with one flat dictionary. `pt` keeps the nesting, plain values, ties, and conj and neg views, and loads
        with ``weights_only=True``: objects of unknown classes become plain dictionaries, parameters tensors.
    strip
        Write one subtree alone: tensors get their names in it, joined by dots as in torch, and `pt` contains the
        subtree itself. Files of a directory, such as the shards of a model, are merged.

    Raises
    ------
    NotFoundError
        No tensor matches.
    UsageError
        The format is unknown or lacks a tensor's dtype; with `strip`, tensors lie in several subtrees, or two have the
        same name.
    ConflictError
        The target exists, and `force` is not set.
    """
    if format not in FORMATS:
        raise UsageError(f"Unknown format {format}; choose one of {', '.join(FORMATS)}.")
    chosen = chosen_tensors(version, include, exclude)
    subtree = subtree_of(version, chosen, include) if strip else None
    names = _names(version, chosen) if subtree is None else stripped_names(version, chosen, subtree)
    with staged(target, force=force) as made, _created(made) as out:
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            reader = _TensorReader(version, pool, progress)
            if format == "pt":
                _write_pt(version, dict(zip(chosen, names, strict=True)), subtree, reader, out, version.parsed)
            else:
                _write_flat(version, dict(zip(chosen, names, strict=True)), reader, out, format)
        out.flush()
        durable.sync_file(out.fileno())
    written = set(chosen)
    return [path for path in version.paths if path not in written]


def write_whole(version: StoredVersion, place: Path, chosen: Sequence[str], progress: Progress | None = None) -> None:
    """Write tensors of a version to a new file as `pt`: in their nesting, or by path if that is lost."""
    names = {path: path for path in chosen}
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        reader = _TensorReader(version, pool, progress)
        try:
            with _created(place) as out:
                _write_pt(version, names, None, reader, out, lambda file: version.parsed(file, gaps=True))
        except CkstoreError:  # The skeleton is damaged.
            place.unlink()
            with _created(place) as out:
                _write_pt(version, names, None, reader, out, version.layout.files.__getitem__, flat=True)


def _created(path: Path) -> IO[bytes]:
    return open(path, "xb", buffering=1 << 20, opener=lambda name, flags: os.open(name, flags, 0o666))


class _TensorReader:
    """Reads pieces of tensors and extents ahead of the writer, with a pool of threads."""

    def __init__(self, version: StoredVersion, pool: ThreadPoolExecutor, progress: Progress | None) -> None:
        self._version = version
        self._pool = pool
        self._progress = progress or (lambda nbytes: None)

    def extent(self, file: int, extent: int, first: int = 0, last: int | None = None) -> Iterator[Block]:
        """Yield the bytes of an extent, or of its elements from `first` to before `last`."""
        stretches = self._version.contents.stretches(file, extent, first, last)

        def work(stretch: tuple[int, int]) -> Block:
            return self._version.read_extent(file, extent, *stretch)

        for piece in in_order(self._pool, work, stretches, 4 * worker_count()):
            self._progress(len(piece))
            yield piece

    def tensor(self, path: str) -> Iterator[Block]:
        """Yield the bytes of a tensor in C order."""
        file, tensor = self._version.paths[path]
        size = prod(tensor.shape)
        if size == 0:
            return
        if tensor.is_adjacent:
            yield from self.extent(file, tensor.extent, tensor.offset, tensor.offset + size)
            return
        data = read_tensor(self._version, file, tensor, [range(length) for length in tensor.shape]).tobytes()
        self._progress(len(data))
        yield data


def _names(version: StoredVersion, chosen: Sequence[str]) -> list[str]:
    """Return full paths, or plain names for a flat dictionary."""
    flat = not version.document.is_directory and all(
        len(tensor.path) == 1 and isinstance(tensor.path[0], str) for _, tensor in version.paths.values()
    )
    return [str(version.paths[path][1].path[0]) if flat else path for path in chosen]


def _write_flat(
    version: StoredVersion, names: dict[str, str], reader: _TensorReader, out: IO[bytes], format: Format
) -> None:
    chosen = list(names)
    tensors = [version.paths[path][1] for path in chosen]
    items = [(name, tensor.dtype, tensor.shape) for name, tensor in zip(names.values(), tensors, strict=True)]
    if format == "npz":
        plain = [(name, *_plain(dtype, shape)) for name, dtype, shape in items]
        write_npz(out, plain, lambda index: _numbers(reader.tensor(chosen[index]), items[index][1]))
    else:
        write_safetensors(out, items, lambda index: reader.tensor(chosen[index]), _METADATA)


def _plain(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape of a tensor in NumPy: float32 and complex64 for dtypes that it lacks."""
    if dtype == FLOAT4:
        return "float32", (*shape[:-1], 2 * (shape or (1,))[-1])
    return plain_dtype(dtype), shape


def _numbers(pieces: Iterator[Block], dtype: str) -> Iterator[Block]:
    """Yield the bytes of the numbers of elements, as `_plain` describes them."""
    if dtype in NATIVE:
        yield from pieces
        return
    for piece in pieces:
        bits = np.frombuffer(piece, f"u{ITEM_SIZES[dtype]}")
        numbers = to_float64(bits, dtype).astype(np.float32) if dtype == FLOAT4 else plain_numbers(bits, dtype)
        yield memoryview(numbers).cast("B")


def _write_pt(
    version: StoredVersion,
    names: dict[str, str],
    subtree: TensorPath | None,
    reader: _TensorReader,
    out: IO[bytes],
    parsed: Callable[[int], FileLayout],
    *,
    flat: bool = False,
) -> None:
    """Write tensors as `pt`; `parsed` gives the layouts of files, which need no trees for one flat dictionary."""
    parts = _TorchParts(version, names, subtree)
    parts.add_sharded(flat=flat)
    parts.add_files(parsed)

    def read(index: int) -> Iterator[Block]:
        place = parts.places[index]
        return reader.tensor(place) if isinstance(place, str) else reader.extent(*place)

    write_torch(out, parts.by_name if flat else parts.top(), parts.tensors, parts.extents, read)


class _TorchParts:
    """The trees, tensors and extents of one torch file, from those of a version's files.

    Attributes
    ----------
    tensors, extents
        Of the torch file; its trees have references to these tensors.
    places
        (File, extent) in the version of each extent, or the path of a tensor that is joined from shards.
    by_name
        References by the given names of the tensors.
    """

    def __init__(self, version: StoredVersion, names: dict[str, str], subtree: TensorPath | None) -> None:
        self.tensors: list[Tensor] = []
        self.extents: list[Extent] = []
        self.places: list[tuple[int, int] | str] = []
        self.by_name: dict[str, TensorRef] = {}
        self._trees: dict[str, Any] = {}
        self._version = version
        self._names = names
        self._subtree = subtree

    def add_sharded(self, *, flat: bool) -> None:
        """Add the tensors that are joined from shards, and without `flat` the trees with them."""
        joined: dict[str, TensorRef] = {}
        for path, name in self._names.items():
            whole = self._version.paths[path][1]
            if whole.shards:
                joined[path] = self.by_name[name] = TensorRef(len(self.tensors))
                extent = -1 if 0 in whole.shape else len(self.extents)
                self.tensors.append(Tensor(whole.path, whole.dtype, whole.shape, row_major(whole.shape), extent, 0))
                if extent >= 0:
                    self.extents.append(Extent(0, whole.dtype, whole.shape, whole.path))
                    self.places.append(path)
        for directory in sharded_directories(self._version) if joined and not flat else ():
            tree, found, _ = sharded_tree(self._version, directory)
            kept = {index for index, path in enumerate(found) if path in joined}
            if kept:
                tree = replace_tensors(
                    self._part(tree, kept), {index: joined[found[index]] for index in kept}.__getitem__
                )
                self._trees |= {directory: tree} if directory or self._subtree is not None else tree

    def add_files(self, parsed: Callable[[int], FileLayout]) -> None:
        """Add the other tensors, file by file."""
        found = {path: self._version.paths[path] for path in self._names}
        wanted = {(file, one.path): self._names[path] for path, (file, one) in found.items() if not one.shards}
        sharded = sharded_files(self._version)
        for number, layout in enumerate(self._version.layout.files):
            if layout.tensors and number not in sharded:
                self._add_file(number, parsed(number), wanted)

    def _add_file(self, number: int, layout: FileLayout, wanted: dict[tuple[int, TensorPath], str]) -> None:
        kept = {index for index, tensor in enumerate(layout.tensors) if (number, tensor.path) in wanted}
        if not kept:
            return
        refs = [TensorRef(len(self.tensors) + index) for index in range(len(layout.tensors))]
        self.by_name |= {wanted[number, layout.tensors[index].path]: refs[index] for index in sorted(kept)}
        path = self._version.document.files[number].path
        self._trees[path] = replace_tensors(self._part(layout.tree, kept), refs.__getitem__)
        before = len(self.extents)
        for tensor in layout.tensors:
            self.tensors.append(replace(tensor, extent=tensor.extent + before if tensor.extent >= 0 else -1))
        self.extents += layout.extents
        self.places += [(number, index) for index in range(len(layout.extents))]

    def _part(self, tree: Any, kept: Collection[int]) -> Any:
        """Return the chosen part of a file's tree."""
        return select_tensors(tree if self._subtree is None else _descend(tree, self._subtree, kept), kept)

    def top(self) -> Any:
        """Return the tree of the torch file."""
        only = next(iter(self._trees.values()))
        if self._subtree is not None:
            return only if len(self._trees) == 1 and only is not None else self.by_name
        return self._trees if self._version.document.is_directory else only


def _descend(tree: Any, subtree: TensorPath, kept: Collection[int]) -> Any:
    """Return the node of a tree at a path; None if no plain container there contains all kept tensors."""
    for segment in subtree:
        if isinstance(tree, dict):
            tree = tree.get(segment)
        elif isinstance(tree, list | tuple) and isinstance(segment, int) and segment < len(tree):
            tree = tree[segment]
        else:
            return None
    return tree if set(kept) <= set(tensor_numbers(tree)) else None
