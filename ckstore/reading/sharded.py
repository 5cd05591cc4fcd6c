"""The state dict of a checkpoint of torch.distributed.checkpoint: whole tensors and objects, nested by their paths."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any

from ckstore.errors import InputError, IntegrityError
from ckstore.formats.dcp import METADATA, Item, nested, read_metadata
from ckstore.formats.layout import Path, TensorRef
from ckstore.formats.paths import path_to_text
from ckstore.formats.sources import PartSource
from ckstore.formats.torch.tree import ROOT
from ckstore.formats.torch.zip import parse_torch_zip
from ckstore.formats.trees import replace_tensors

if TYPE_CHECKING:
    from ckstore.reading.stored_version import StoredVersion


def sharded_directories(version: StoredVersion) -> dict[str, int]:
    """The directories of a version that are such checkpoints, the whole being `""`, with their metadata's numbers."""
    return {
        posixpath.dirname(entry.path): number
        for number, entry in enumerate(version.document.files)
        if version.layout.files[number].kind == "dcp-metadata" and posixpath.basename(entry.path) == METADATA
    }


def is_sharded(version: StoredVersion, file: int) -> bool:
    """Whether a file's tensors are shards, or its objects are those of such a checkpoint."""
    directory = posixpath.dirname(version.document.files[file].path)
    return version.layout.files[file].kind == "dcp" and directory in sharded_directories(version)


def sharded_tree(version: StoredVersion, directory: str) -> tuple[Any, list[str], int]:
    """The state dict of such a checkpoint.

    Returns
    -------
    tuple
        The tree, with `TensorRef` counting the paths; the paths of its tensors; and the bytes that are not tensors.

    Raises
    ------
    IntegrityError
        The metadata does not describe the files beside it.
    """
    try:
        return _sharded_tree(version, directory)
    except (InputError, KeyError) as error:
        path = posixpath.join(directory, METADATA)
        raise IntegrityError(
            f"Version {version.row.number}: {path} does not describe the files beside it; run `ckstore verify`."
        ) from error


def _sharded_tree(version: StoredVersion, directory: str) -> tuple[Any, list[str], int]:
    source = version.source(sharded_directories(version)[directory])
    prefix: Path = tuple(directory.split("/")) if directory else ()
    numbers = {entry.path: number for number, entry in enumerate(version.document.files)}
    paths: dict[str, int] = {}
    leaves: dict[Path, Any] = {}
    rest = source.size

    def leaf(path: Path) -> TensorRef:
        text = path_to_text((*prefix, *path))
        if text not in version.paths:
            raise InputError(f"there is no tensor {text}")
        return TensorRef(paths.setdefault(text, len(paths)))

    def of_object(item: Item) -> Any:
        file = numbers[posixpath.join(directory, item.file)]
        part = parse_torch_zip(PartSource(version.source(file), item.start, item.nbytes))
        if part is None:
            raise InputError(f"{item.file} holds no object at byte {item.start}")
        inner = [tensor.path if tensor.path != ROOT else () for tensor in part.tensors]
        return replace_tensors(part.tree, lambda index: leaf((*item.path, *inner[index])))

    for item in read_metadata(source.pread(0, source.size)):
        if item.box is not None:
            leaves[item.path] = leaf(item.path)
        else:
            leaves[item.path] = of_object(item)
            rest += item.nbytes
    return nested(leaves.items()), list(paths), rest
