"""Versions as nested containers of torch tensors; each chunk is decoded directly into its storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ckstore.dtypes import ITEM_SIZES, torch_dtype
from ckstore.errors import CkstoreError, IntegrityError, UsageError
from ckstore.formats.detect import parse
from ckstore.formats.layout import FileLayout, Tensor
from ckstore.formats.paths import path_to_text
from ckstore.formats.shards import slabs
from ckstore.formats.trees import replace_tensors, select_tensors
from ckstore.objects.records import Raw
from ckstore.objects.stored_chunks import is_whole
from ckstore.reading.buffers import Destination, fill, read_tensor
from ckstore.reading.known_types import ObjectBuilder
from ckstore.reading.sharded import sharded_directories, sharded_files, sharded_tree
from ckstore.runtime.memory import use_large_pages
from ckstore.runtime.threads import worker_count
from ckstore.storage.pack_reader import MissingPackError

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion

#: Kinds of files whose tensors may share a storage.
_SHARED = ("torch-zip", "torch-legacy", "dcp", "zip", "tar")


def build(
    version: StoredVersion, file: int, allow: Sequence[type] = (), *, mmap: bool | Literal["checked"] = False
) -> Any:
    """Return the object that `torch.load` would return for a file of a version, on the CPU.

    Tensors with a common storage share one again. Parameters stay parameters, other subclasses become plain tensors.
    Objects of classes that neither `ckstore.reading.known_types` nor `allow` lists become `ckstore.formats.Unknown`,
    safetensors files flat dictionaries. With `mmap`, storages that are stored in one piece are mapped instead of read;
    `checked` compares checksums.

    Raise `UsageError` if the file has no tensors, or a dtype that the installed torch lacks, or if `allow` contains a
    value that is not a class, or a class that cannot be instantiated.
    """
    layout = version.layout.files[file]
    path = version.document.files[file].path
    # A damaged file stored as opaque bytes, as requested, must not be parsed here.
    if layout.kind == "opaque":
        raise _no_tensors(path)
    first, last = version.layout.bounds[1][file : file + 2]
    for number in {*version.layout.dtypes[first:last].tolist()}:
        torch_dtype(version.layout.names[number])  # Raise for a dtype that torch lacks before anything is decoded.
    source = version.source(file)
    version.require(file)
    gone = {extent for number, extent in version.contents.dropped if number == file}
    storages = _Storages(layout, _mapped(version, file, checked=mmap == "checked") if mmap else {}, gone)
    with ThreadPoolExecutor(1, thread_name_prefix="ckstore") as aside:
        advising = aside.submit(use_large_pages, storages.spans())
        parsing = aside.submit(parse, source, path)
        fill(version, storages.requests(file), keep=False)
        advising.result()
        parsed = parsing.result()
    if parsed.tree is None:
        raise _no_tensors(path)
    if _cut(parsed) != _cut(layout):
        raise IntegrityError(f"The layout of {path} does not match its bytes; run `ckstore verify`.")
    tree, kept = _left(version, file, parsed)
    tensors = {number: storages.tensor(parsed.tensors[number]) for number in kept}
    skeleton_bytes = layout.size - sum(extent.nbytes for extent in layout.extents)
    return replace_tensors(tree, tensors.__getitem__, ObjectBuilder(skeleton_bytes, allow), parsed.shared)


def _mapped(version: StoredVersion, file: int, *, checked: bool) -> dict[int, memoryview]:
    """Return the extents of a file that are stored unencoded in one piece, by number: views of mapped packs.

    Writes to a view change neither the pack nor other views. With `checked`, damaged extents are left out, so that
    reading them raises an error with their names; otherwise no checksums are compared.
    """
    repository, contents = version.repository, version.contents
    packs: dict[str, memoryview] = {}
    whole: dict[int, bool] = {}
    found = {}
    for extent, cut in enumerate(version.layout.files[file].extents):
        parts = contents.parts(file, extent)
        if len(parts) != 1 or (file, extent) in contents.dropped:
            continue
        _, number, position = parts[0]
        record = repository.resolver.record(version.document.objects[number])
        if not isinstance(record, Raw):
            continue
        try:
            if record.pack not in packs:
                packs[record.pack] = repository.packs.mapped(record.pack)
        except MissingPackError:  # Another process encodes the version: read it as it is then.
            repository.resolver.forget()
            return {}
        start = record.offset + position * ITEM_SIZES[record.dtype]
        view = packs[record.pack][start : start + cut.nbytes]
        if len(view) != cut.nbytes:
            raise IntegrityError(f"Pack {record.pack} is too short; restore it from a copy.")
        if checked and number not in whole:
            whole[number] = is_whole(record, packs[record.pack], worker_count())
        if whole.get(number, True):
            found[extent] = view
    return found


def _left(version: StoredVersion, file: int, parsed: FileLayout) -> tuple[Any, Sequence[int]]:
    """Return the tree of a file without dropped tensors, and the numbers of the others."""
    if not any(place[0] == file for place in version.contents.dropped):
        return parsed.tree, range(len(parsed.tensors))
    kept = [
        number
        for number, tensor in enumerate(parsed.tensors)
        if version.contents.dropped.isdisjoint(tensor.places(file))
    ]
    return select_tensors(parsed.tree, kept), kept


def build_sharded(version: StoredVersion, directory: str, allow: Sequence[type] = ()) -> Any:
    """Return the state dict of a torch.distributed.checkpoint, loaded into one process: whole tensors, on the CPU.

    `directory` is that of the checkpoint; empty if it is the whole version. For errors see `build`.
    """
    tree, paths, rest = sharded_tree(version, directory)
    tensors = [version.paths[path] for path in paths]
    try:
        made = [torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype)) for _, tensor in tensors]
    except (RuntimeError, MemoryError) as error:  # Strides of 0 repeat a few elements any number of times.
        raise CkstoreError(f"The tensors of version {version.row.number} do not fit into memory.") from error
    requests: list[Destination] = []
    for (file, tensor), out in zip(tensors, made, strict=True):
        for place in tensor.places(file):
            version.require(*place)
        flat = _bytes_of(out)
        ordered = slabs(tensor.shards, version.layout.files)
        if ordered is None:
            wanted = [range(size) for size in tensor.shape]
            flat[...] = read_tensor(version, file, tensor, wanted).reshape(-1).view(np.uint8)
            continue
        start = 0
        for number, shard in ordered:
            stop = start + prod(shard.shape) * ITEM_SIZES[shard.dtype]
            requests.append(Destination(number, shard.extent, 0, prod(shard.shape), flat[start:stop]))
            start = stop
    fill(version, requests, keep=False)
    return replace_tensors(tree, made.__getitem__, ObjectBuilder(rest, allow))


def outline(version: StoredVersion, leaf: Callable[[str], Any], allow: Sequence[type] = ()) -> Any:
    """Return the tree of `Version.state_dict` with `leaf(path)` in place of each tensor."""
    found: dict[str, Any] = {}
    for directory in sharded_directories(version):
        tree, paths, rest = sharded_tree(version, directory)
        made = replace_tensors(tree, [leaf(path) for path in paths].__getitem__, ObjectBuilder(rest, allow))
        found |= {directory: made} if directory else made
    sharded = sharded_files(version)
    for number, layout in enumerate(version.layout.files):
        if not layout.tensors or number in sharded:
            continue
        prefix = version.contents.prefix(number)
        tree, kept = _left(version, number, version.parsed(number))
        leaves = {index: leaf(path_to_text((*prefix, *layout.tensors[index].path))) for index in kept}
        builder = ObjectBuilder(layout.size - sum(extent.nbytes for extent in layout.extents), allow)
        made = replace_tensors(tree, leaves.__getitem__, builder)
        if not version.document.is_directory:
            return made
        found[version.document.files[number].path] = made
    return found


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous tensor."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    found: npt.NDArray[np.uint8] = memory.numpy()
    return found


def _no_tensors(path: str) -> UsageError:
    return UsageError(f"{path} has no readable tensors; use `ckstore checkout` to get the file itself.")


def _cut(layout: FileLayout) -> tuple[list[int], list[int], list[str]]:
    extents = layout.extents
    return [one.start for one in extents], [prod(one.shape) for one in extents], [one.dtype for one in extents]


def _marked(made: torch.Tensor, tensor: Tensor) -> Any:
    """Return a tensor with its marks as torch attributes; an array if it was one."""
    if "array" in tensor.marks:
        return made.numpy()
    if tensor.lazy:
        torch._utils.set_tensor_metadata(made, dict.fromkeys(tensor.lazy, True))  # type: ignore[no-untyped-call]
    grad = "requires_grad" in tensor.marks and (made.is_floating_point() or made.is_complex())
    if "parameter" in tensor.marks:
        return torch.nn.Parameter(made, requires_grad=grad)
    return made.requires_grad_(grad)


class _Storages:
    """The storages of a file: views of `mapped` extents, and new ones to be filled.

    Extents that are all `gone` have no storage. The extents of one storage are adjacent, at multiples of their items'
    sizes; the torch formats write headers between storages.
    """

    def __init__(self, layout: FileLayout, mapped: Mapping[int, memoryview], gone: Collection[int]) -> None:
        self._extents = [*layout.extents]
        self._gone = gone
        # Plain arithmetic, as below: properties would be calls of Python for every tensor.
        self._counts = [prod(extent.shape) for extent in layout.extents]
        self._stops = [
            extent.start + count * ITEM_SIZES[extent.dtype]
            for extent, count in zip(layout.extents, self._counts, strict=True)
        ]
        self._starts: list[int] = []
        sizes: dict[int, int] = {}
        shared = layout.kind in _SHARED
        for index, extent in enumerate(layout.extents):
            start = extent.start
            if shared and index > 0 and self._stops[index - 1] == start:
                follows = (start - self._starts[-1]) % ITEM_SIZES[extent.dtype] == 0
                start = self._starts[-1] if follows else start
            self._starts.append(start)
            sizes[start] = self._stops[index] - start
        alone = {start: index for index, start in enumerate(self._starts)}
        shares = Counter(self._starts)
        self._mapped = {
            start: torch.frombuffer(mapped[index], dtype=torch.uint8)
            for start, index in alone.items()
            if index in mapped and shares[start] == 1
        }
        held = {start for index, start in enumerate(self._starts) if index not in gone}
        partly = {self._starts[index] for index in gone}
        self._made = {
            start: (torch.zeros if start in partly else torch.empty)(size, dtype=torch.uint8)
            for start, size in sizes.items()
            if start in held and start not in self._mapped
        }

    def spans(self) -> list[tuple[int, int]]:
        """Address and bytes of each storage to be filled."""
        return [(made.data_ptr(), made.numel()) for made in self._made.values()]

    def tensor(self, tensor: Tensor) -> Any:
        """Return a tensor in its storage, or an array."""
        empty = torch.empty(0, dtype=torch_dtype(tensor.dtype))
        if tensor.extent < 0:
            return _marked(empty.as_strided(tensor.shape, tensor.strides), tensor)
        start = self._starts[tensor.extent]
        before = (self._extents[tensor.extent].start - start) // ITEM_SIZES[tensor.dtype]
        storage = (self._mapped if start in self._mapped else self._made)[start].untyped_storage()
        made = empty.set_(storage, before + tensor.offset, tensor.shape, tensor.strides)
        return _marked(made, tensor) if tensor.marks else made

    def requests(self, file: int) -> Iterator[Destination]:
        """Yield the destinations that fill the storages."""
        for index, (extent, start) in enumerate(zip(self._extents, self._starts, strict=True)):
            if start in self._mapped or index in self._gone:
                continue
            out = self._made[start].numpy()[extent.start - start : self._stops[index] - start]
            yield Destination(file, index, 0, self._counts[index], out)
