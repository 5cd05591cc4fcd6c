"""Other ways to store and restore a checkpoint, timed against ckstore, as their users would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file

from tools.bench.peers import zipnn_decode, zipnn_encode
from tools.bench.series import load

#: Names in tables of the ways that ratios refer to.
SAVE, LOAD, COPY = "torch.save, fsync", "torch.load", "cp, fsync"

#: Threads of zstd.
_THREADS = 2

#: The float types of ZipNN, by torch's.
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class Source:
    """The version that a round stores: as a file in the page cache, and as the state dict in it."""

    path: Path
    state: Any = None

    def take(self, path: Path) -> None:
        """Make the checkpoint at `path` the version."""
        self.state = None
        shutil.copyfile(path, self.path)
        self.state = load(path)


@dataclass(frozen=True)
class Keeper:
    """A way to store a checkpoint.

    Attributes
    ----------
    stores, restores
        Its names in tables.
    store
        Writes a version to a path, durably.
    restore
        Restores it from the first path: as a durable file at the second, or as tensors that it returns.
    """

    stores: str
    restores: str
    store: Callable[[Source, Path], Any]
    restore: Callable[[Path, Path], Any]


def _save(source: Source, target: Path) -> None:
    torch.save(source.state, target)
    _sync(target)


def _load(saved: Path, target: Path) -> Any:
    return torch.load(saved, weights_only=True)


def _save_safetensors(source: Source, target: Path) -> None:
    # Tied tensors are refused: each storage goes in once.
    once = {tensor.untyped_storage().data_ptr(): (name, tensor) for name, tensor in _flat(source.state)}
    save_file({name: tensor.contiguous() for name, tensor in once.values()}, target)
    _sync(target)


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries by their joined keys, the only form of safetensors files."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", str(source), str(target)], check=True)
    _sync(target)


def _zstd(source: Source, target: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=3, threads=_THREADS)
    with source.path.open("rb") as plain, target.open("wb") as packed:
        compressor.copy_stream(plain, packed, size=source.path.stat().st_size)
    _sync(target)


def _unzstd(packed: Path, target: Path) -> None:
    with packed.open("rb") as compressed, target.open("wb") as plain:
        zstandard.ZstdDecompressor().copy_stream(compressed, plain)
    _sync(target)


def _zipnn(source: Source, target: Path) -> None:
    """Compress the file as floats of its most frequent type, padded with zeros to a whole number of them."""
    sizes = dict.fromkeys(_DTYPES.values(), 0)
    for _, tensor in _flat(source.state):
        if tensor.dtype in _DTYPES:
            sizes[_DTYPES[tensor.dtype]] += tensor.nbytes
    dtype, size = max(sizes, key=lambda name: sizes[name]), source.path.stat().st_size
    data = np.zeros(-(-size // 4) * 4, np.uint8)
    with source.path.open("rb") as file:
        file.readinto(data)
    target.write_bytes(f"{data.size - size}{dtype:8}".encode() + zipnn_encode(data, dtype))
    _sync(target)


def _unzipnn(packed: Path, target: Path) -> None:
    with packed.open("rb") as file:
        padding, dtype = int(file.read(1)), file.read(8).decode().strip()
        data = zipnn_decode(file.read(), dtype)
    data[: data.size - padding].tofile(target)
    _sync(target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


KEEPERS = (
    Keeper(SAVE, LOAD, _save, _load),
    Keeper("safetensors, fsync", "safetensors", _save_safetensors, lambda packed, target: load_file(packed)),
    Keeper(COPY, COPY, lambda source, target: _copy(source.path, target), _copy),
    Keeper(f"zstd -3 -T{_THREADS}, fsync", "zstd -3, fsync", _zstd, _unzstd),
    Keeper("ZipNN, fsync", "ZipNN, fsync", _zipnn, _unzipnn),
)
