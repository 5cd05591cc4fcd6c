"""Exports: a version's tensors, or some of them, as safetensors, pt or npz."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from ckstore.errors import NotFoundError, UsageError
from ckstore.formats.flat_writers import write_npz, write_safetensors
from ckstore.formats.layout import Extent, Tensor, TensorRef
from ckstore.formats.paths import match_paths, text_to_path
from ckstore.formats.torch.writer import write_torch
from ckstore.formats.trees import replace_tensors, select_tensors
from ckstore.reading.buffers import read_tensor
from ckstore.reading.checkout import Block, beside
from ckstore.runtime.threads import in_order, worker_count

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

Format = Literal["safetensors", "pt", "npz"]
Progress = Callable[[int], None]

#: Formats that tensors can be exported in.
FORMATS: tuple[Format, ...] = get_args(Format)

#: What libraries that load safetensors files look for.
_METADATA = {"format": "pt"}


def export(
    version: StoredVersion,
    target: Path,
    format: Format,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write tensors of a version to one file, in memory of a few chunks.

    In safetensors and npz a tensor that is not contiguous, or a conj or neg view, is held in memory whole.

    Parameters
    ----------
    version
        The version.
    target
        The file; it is written beside and renamed.
    format
        `safetensors` and `npz` hold tensors by name: the text of their path, or the plain name where the version is one
        file and holds them in one flat dictionary. `pt` keeps the nesting, plain values, ties, and conj and neg views,
        and loads with ``weights_only=True``: objects of unknown classes become plain dictionaries, parameters tensors.
    include, exclude
        Globs over the paths of tensors; see `ckstore.formats.paths.match_paths`.
    force
        Overwrite the target.
    progress
        Called with numbers of bytes of tensors that were decoded.

    Returns
    -------
    int
        Number of tensors written.

    Raises
    ------
    NotFoundError
        No tensor is left.
    UsageError
        The format lacks a tensor's dtype, or there is no such format.
    ConflictError
        The target exists, and `force` is not set.
    """
    if format not in FORMATS:
        raise UsageError(f"There is no format {format}; choose one of {', '.join(FORMATS)}.")
    paths = list(version.paths)
    chosen = [paths[number] for number in match_paths(map(text_to_path, paths), include, exclude)]
    if not chosen:
        raise NotFoundError(f"No tensor of version {version.row.number} is chosen; see `ckstore ls` for their paths.")
    with beside(target, force=force) as made, _created(made) as out:
        with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
            reader = _TensorReader(version, pool, progress)
            if format == "pt":
                _write_pt(version, chosen, reader, out)
            else:
                _write_flat(version, chosen, reader, out, format)
        out.flush()
        os.fsync(out.fileno())
    return len(chosen)


def _created(path: Path) -> IO[bytes]:
    return open(path, "xb", buffering=1 << 20, opener=lambda name, flags: os.open(name, flags, 0o666))


class _TensorReader:
    """Reads tensors and extents in pieces, ahead of the writer, by a pool of threads."""

    def __init__(self, version: StoredVersion, pool: ThreadPoolExecutor, progress: Progress | None) -> None:
        self._version = version
        self._pool = pool
        self._progress = progress or (lambda nbytes: None)

    def extent(self, file: int, extent: int, first: int = 0, last: int | None = None) -> Iterator[Block]:
        """The bytes of an extent, or of its elements from `first` to before `last`."""
        stop = self._version.layout.files[file].extents[extent].count if last is None else last
        stretches = (
            (max(first, low), min(stop, high))
            for low, high in self._version.stretches(file, extent)
            if low < stop and high > first
        )

        def work(stretch: tuple[int, int]) -> Block:
            return self._version.read_extent(file, extent, *stretch)

        for piece in in_order(self._pool, work, stretches, 4 * worker_count()):
            self._progress(len(piece))
            yield piece

    def tensor(self, path: str) -> Iterator[Block]:
        """The bytes of a tensor in C order."""
        file, tensor = self._version.paths[path]
        size = prod(tensor.shape)
        if size == 0:
            return
        if _is_contiguous(tensor) and not tensor.lazy:
            yield from self.extent(file, tensor.extent, tensor.offset, tensor.offset + size)
            return
        data = read_tensor(self._version, file, tensor, [range(length) for length in tensor.shape]).tobytes()
        self._progress(len(data))
        yield data


def _is_contiguous(tensor: Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _write_flat(
    version: StoredVersion, chosen: Sequence[str], reader: _TensorReader, out: IO[bytes], format: Format
) -> None:
    tensors = [version.paths[path][1] for path in chosen]
    flat = not version.document.is_directory and all(
        len(tensor.path) == 1 and isinstance(tensor.path[0], str) for _, tensor in version.paths.values()
    )
    names = [str(tensor.path[0]) if flat else path for path, tensor in zip(chosen, tensors, strict=True)]
    items = [(name, tensor.dtype, tensor.shape) for name, tensor in zip(names, tensors, strict=True)]
    if format == "npz":
        write_npz(out, items, lambda index: reader.tensor(chosen[index]))
    else:
        write_safetensors(out, items, lambda index: reader.tensor(chosen[index]), _METADATA)


def _write_pt(version: StoredVersion, chosen: Sequence[str], reader: _TensorReader, out: IO[bytes]) -> None:
    trees: dict[str, Any] = {}
    tensors: list[Tensor] = []
    extents: list[Extent] = []
    places: list[tuple[int, int]] = []
    wanted = {(file, tensor.path) for file, tensor in map(version.paths.__getitem__, chosen)}
    for number, entry in enumerate(version.document.files):
        if not version.layout.files[number].tensors:
            continue
        layout = version.parsed(number)
        kept = {index for index, tensor in enumerate(layout.tensors) if (number, tensor.path) in wanted}
        if not kept:
            continue
        tensors_before, extents_before = len(tensors), len(extents)
        tree = select_tensors(layout.tree, kept)
        refs = [TensorRef(tensors_before + index) for index in range(len(layout.tensors))]
        trees[entry.path] = replace_tensors(tree, refs.__getitem__)
        for tensor in layout.tensors:
            extent = tensor.extent + extents_before if tensor.extent >= 0 else -1
            tensors.append(replace(tensor, extent=extent))
        extents += layout.extents
        places += [(number, index) for index in range(len(layout.extents))]
    top = trees if version.document.is_directory else next(iter(trees.values()))
    write_torch(out, top, tensors, extents, lambda index: reader.extent(*places[index]))
