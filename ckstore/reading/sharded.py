"""The state dict of a torch.distributed.checkpoint: whole tensors and objects, nested by their paths."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from ckstore.errors import InputError, IntegrityError
from ckstore.formats.dcp import METADATA, Item, nested, read_metadata
from ckstore.formats.layout import Path, TensorRef
from ckstore.formats.paths import match_texts, path_to_text
from ckstore.formats.sources import CompositeSource, PartSource
from ckstore.formats.torch.tree_reader import ROOT
from ckstore.formats.torch.zip import parse_torch_zip
from ckstore.formats.trees import replace_tensors, select_tensors

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion


#: Placeholder for the number of a dropped tensor.
_DROPPED = -1


def sharded_directories(version: StoredVersion) -> dict[str, int]:
    """Return the directories of a version that are such checkpoints (`""` for all of it), with metadata numbers."""
    return {
        posixpath.dirname(entry.path): number
        for number, entry in enumerate(version.document.files)
        if version.layout.files[number].kind == "dcp-metadata" and posixpath.basename(entry.path) == METADATA
    }


def sharded_files(version: StoredVersion) -> set[int]:
    """Return the numbers of the files with shards or objects of such a checkpoint."""
    directories = sharded_directories(version)
    # Files of an earlier save are not part of it, and have tensors that its metadata does not name.
    return {
        number
        for number, (entry, layout) in enumerate(zip(version.document.files, version.layout.files, strict=True))
        if layout.kind == "dcp"
        and posixpath.dirname(entry.path) in directories
        and all(tensor.box is not None for tensor in layout.tensors)
    }


def sharded_tree(version: StoredVersion, directory: str) -> tuple[Any, list[str], int]:
    """Return the state dict of such a checkpoint.

    It is the tree, with `TensorRef` indexing the paths; the paths of its tensors; and the bytes of other objects. Raise
    `IntegrityError` if the metadata does not describe the files next to it.
    """
    try:
        return _sharded_tree(version, directory)
    except (InputError, KeyError) as error:
        path = posixpath.join(directory, METADATA)
        raise IntegrityError(
            f"Version {version.row.number}: {path} does not describe its files; run `ckstore verify`."
        ) from error


def _sharded_tree(version: StoredVersion, directory: str) -> tuple[Any, list[str], int]:
    source = version.source(sharded_directories(version)[directory])
    prefix: Path = tuple(directory.split("/")) if directory else ()
    numbers = {entry.path: number for number, entry in enumerate(version.document.files)}
    sources: dict[int, CompositeSource] = {}
    paths: dict[str, int] = {}
    leaves: dict[Path, Any] = {}

    def leaf(path: Path) -> TensorRef:
        text = path_to_text((*prefix, *path))
        if text not in version.paths:
            if not match_texts([text], version.document.dropped or [""]):
                raise InputError(f"tensor {text} is missing")
            return TensorRef(_DROPPED)
        return TensorRef(paths.setdefault(text, len(paths)))

    def of_object(item: Item) -> Any:
        file = numbers[posixpath.join(directory, item.file)]
        if file not in sources:
            sources[file] = version.source(file)
        part = parse_torch_zip(PartSource(sources[file], item.start, item.nbytes))
        if part is None:
            raise InputError(f"{item.file} has no object at byte {item.start}")
        inner = [tensor.path if tensor.path != ROOT else () for tensor in part.tensors]
        return replace_tensors(part.tree, lambda index: leaf((*item.path, *inner[index])))

    for item in read_metadata(source.pread(0, source.size)):
        leaves[item.path] = of_object(item) if item.box is None else leaf(item.path)
    layouts = [version.layout.files[number] for number in sources]
    rest = sum(layout.size - sum(extent.nbytes for extent in layout.extents) for layout in layouts)
    tree: Any = nested(leaves.items())
    if version.document.dropped:
        tree = select_tensors(tree, range(len(paths))) or {}
    return tree, list(paths), source.size + rest
