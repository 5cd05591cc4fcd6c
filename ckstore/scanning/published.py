"""State dicts as the Hugging Face directories that they would be, without writing them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ckstore.dtypes import ITEM_SIZES
from ckstore.errors import InputError, UsageError
from ckstore.formats.containers.safetensors import DTYPES
from ckstore.formats.detect import parse
from ckstore.formats.directory import is_named_as_tensors, scan
from ckstore.formats.paths import listed
from ckstore.formats.sources import CompositeSource, FileSource
from ckstore.formats.torch.live_state import LiveState
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

_SUFFIX = ".safetensors"

#: Names of dtypes in headers.
_NAMES = {name: kind for kind, name in DTYPES.items()}

#: Keys of a model's configuration with the dtype of its weights.
_DTYPE_KEYS = ("torch_dtype", "dtype")

#: dtypes that a directory may have for its weights.
FLOATS = ("float32", "bfloat16", "float16")


class Template:
    """A model's directory: its shards with the names, dtypes and shapes of tensors, and its other files.

    Parameters
    ----------
    directory
        The directory, as `save_pretrained` writes it; its weights are not read.
    dtype
        The dtype of the weights in place of the one there; for floats alone.

    Attributes
    ----------
    tensors
        (dtype, shape) by name.
    """

    def __init__(self, directory: Path, dtype: str | None = None) -> None:
        if dtype is not None and dtype not in FLOATS:
            raise UsageError(f"`dtype` is one of {', '.join(FLOATS)}, not {dtype}.")
        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory; give `like` a model's, with safetensors files.")
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._dtype = dtype
        self._files: dict[str, bytes] = {}
        self._shards: dict[str, list[str]] = {}
        for entry in scan(directory, blobs=True):
            if entry.kind != "file" or any(part.startswith(".") for part in entry.path.split("/")):
                continue
            with FileSource(os.path.join(directory, entry.path)) as source:
                if entry.path.endswith(_SUFFIX):
                    self._add_shard(entry.path, source)
                elif not is_named_as_tensors(entry.path):
                    self._files[entry.path] = source.pread(0, source.size)
        if not self._shards:
            raise UsageError(f"{directory} has no safetensors file, whose layout published files would have.")
        if dtype is not None:
            self._set_dtype(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(prod(shape) * ITEM_SIZES[dtype] for dtype, shape in self.tensors.values())

    def _add_shard(self, path: str, source: FileSource) -> None:
        layout = parse(source, path)
        if layout.kind != "safetensors":
            raise UsageError(f"{path} is not a safetensors file; save the model again, or name another directory.")
        length = int.from_bytes(source.pread(0, 8), "little")
        header: dict[str, Any] = json.loads(source.pread(8, length))
        metadata = header.pop("__metadata__", None)
        names = sorted(header, key=lambda name: (header[name]["data_offsets"], name))
        for name in names:
            dtype = DTYPES.get(header[name]["dtype"])
            if dtype is None:
                raise UsageError(f"{name} in {path} has a packed dtype, which cannot be published.")
            if name in self.tensors:
                raise UsageError(f"{name} is in two files of the directory; name one with each tensor once.")
            self.tensors[name] = (self._dtype or dtype) if dtype in FLOATS else dtype, tuple(header[name]["shape"])
        shown: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        position = 0
        for name in names:
            dtype, shape = self.tensors[name]
            end = position + prod(shape) * ITEM_SIZES[dtype]
            shown[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [position, end]}
            position = end
        text = json.dumps(shown, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._files[path] = len(text).to_bytes(8, "little") + text
        self._shards[path] = names

    def _set_dtype(self, dtype: str) -> None:
        """Write the dtype, and the size of the weights, into the configuration and the index."""
        for path, data in self._files.items():
            if path == "config.json" or path.endswith(f"{_SUFFIX}.index.json"):
                try:
                    facts = json.loads(data)
                except ValueError as error:
                    raise UsageError(f"{path} is no JSON ({error}); repair it, or name another directory.") from error
                for key in _DTYPE_KEYS:
                    if key in facts:
                        facts[key] = dtype
                if "total_size" in facts.get("metadata", {}):
                    facts["metadata"]["total_size"] = self.nbytes
                self._files[path] = json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n"

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `UsageError` unless a state has the tensors of the directory, given by name with their shapes."""
        if missing := [name for name in self.tensors if name not in shapes]:
            raise UsageError(f"The state lacks {listed(missing)}, which `like` has; give the model's own state dict.")
        for name, (_, shape) in self.tensors.items():
            if shapes[name] != shape:
                raise UsageError(f"{name} has the shape {shapes[name]}, and {shape} in `like`; give the same model.")

    def scanned(self, state: LiveState) -> ScannedVersion:
        """Return the directory with the tensors of a state, which has these alone, by name."""
        found = {str(tensor.path[0]): tensor for tensor in state.tensors}
        files = []
        for path, head in self._files.items():
            extents, position, views = [], len(head), []
            for name in self._shards.get(path, ()):
                tensor = found[name]
                dtype, shape = self.tensors[name]
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                    raise InputError(f"{name} is {tensor.dtype}, not {dtype}; publish values of one dtype.")
                nbytes = prod(shape) * ITEM_SIZES[dtype]
                extents.append((position, nbytes))
                views.append((tensor.extent, tensor.offset * ITEM_SIZES[dtype]))
                position += nbytes

            def read(index: int, offset: int, nbytes: int, views: list[tuple[int, int]] = views) -> memoryview:
                extent, first = views[index]
                return state.view(extent, first + offset, nbytes)

            source = CompositeSource(head, extents, position, read, is_still=state.is_still)
            files.append(ScannedFile(path, source, parse(source, path), 0o644))
        return ScannedVersion(files, is_directory=True)
