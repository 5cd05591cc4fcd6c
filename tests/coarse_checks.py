"""Shared by tests of coarse versions: tensors of files by path, and whether a version keeps its stated bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckstore
from ckstore.formats.paths import path_to_text
from ckstore.version import Version


def tensors_of(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Path as text, tensor) of nested containers."""
    if isinstance(tree, torch.Tensor):
        yield path_to_text(path), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from tensors_of(value, (*path, key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for index, value in enumerate(tree):
            yield from tensors_of(value, (*path, index))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a torch file by path, read with `weights_only`."""
    return dict(tensors_of(torch.load(path, weights_only=True)))


def wide(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements as float64, or complex128."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


def check_deviations(version: Version, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Check that each tensor's stated bound holds, and is tight; tensors without a bound are equal.

    For tensors that are all that their extents hold.
    """
    said = version.deviations()
    assert before.keys() == after.keys() == set(version)
    assert said.keys() <= before.keys()
    for path, tensor in before.items():
        if path not in said:
            assert same_bits(tensor, after[path]), path
            continue
        values = wide(tensor)
        difference = np.abs(values - wide(after[path]))
        measured = difference.max(), np.sqrt(np.mean(difference**2)), np.sqrt(np.mean(values**2))
        for bound, exact in zip(said[path], measured, strict=True):
            assert exact * (1 - 1e-9) <= bound <= exact * (1.001 + 1e-9), (path, said[path], measured)
        assert said[path].max_abs >= measured[0]


def stored(store: ckstore.Store, tree: dict[str, Any] | Path, **options: Any) -> Version:
    """Store a state dict, or a file, as a coarse version."""
    return store[store.ingest(tree, **{"policy": "coarse", **options}).version.number]


def values_of(version: Version) -> dict[str, torch.Tensor]:
    """Return the tensors of a version, each read by itself."""
    return {path: version[path].torch() for path in version}


def kinds_of(version: Version) -> dict[str, str]:
    """Return the kind of each unit's lattice by key."""
    resolver = version._stored.repository.resolver
    units, objects = version._stored.layout.units, version._stored.document.objects
    return {unit.key: resolver.record(identity).kind for unit, identity in zip(units, objects, strict=True)}
