"""Training states: read from files, named by their values, split into parameters and their moments."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

#: The contents of a training script's checkpoint: `model`, `optimizer`, `step` and more.
State = dict[str, Any]

#: Names of a module's tensors other than its parameters.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Parameter:
    """A parameter and its state in the optimiser.

    Attributes
    ----------
    name
        In the model's state dict.
    weight
        The values.
    moments
        Tensors of the weight's shape by name (`exp_avg`, `exp_avg_sq`, `momentum_buffer`); none before the first step.
    """

    name: str
    weight: Tensor
    moments: dict[str, Tensor]


def load(path: Path) -> State:
    """Return a checkpoint of a trained run; a safetensors file gives its tensors under `model`."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return {"model": load_file(path)}
    state: State = torch.load(path, weights_only=True)
    return state


def as_state(restored: Any) -> State:
    """Return a restored checkpoint in the form of `load`: safetensors files hold the tensors alone."""
    return restored if "model" in restored else {"model": restored}


def parameters(state: State) -> list[Parameter]:
    """Return the parameters of a model, in the optimiser's order, without the buffers of its norms."""
    entries = state.get("optimizer", {}).get("state", {})
    found = []
    weights = [(name, value) for name, value in state["model"].items() if not name.endswith(_BUFFERS)]
    for index, (name, weight) in enumerate(weights):
        moments = {k: v for k, v in entries.get(index, {}).items() if isinstance(v, Tensor) and v.shape == weight.shape}
        found.append(Parameter(name, weight, moments))
    return found


def digest(value: Any) -> str:
    """Return the BLAKE3 of names, dtypes, shapes and bits of all nested tensors, and of all other values."""
    hasher = blake3()
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    match value:
        case Tensor():
            hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hasher.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        case Mapping():
            hasher.update(f"{{{len(value)}".encode())
            for key, item in value.items():
                hasher.update(f"{key!r}:".encode())
                _feed(hasher, item)
        case list() | tuple():
            hasher.update(f"[{len(value)}".encode())
            for item in value:
                _feed(hasher, item)
        case _:
            hasher.update(f"{value!r},".encode())


def weights_only(paths: list[Path], out: Path) -> list[Path]:
    """Return files of the same names in `out` with only the weights and the step; write missing ones."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in paths:
        target = out / path.name
        if not target.exists() or target.stat().st_mtime_ns < path.stat().st_mtime_ns:
            state = load(path)
            kept: State = {name: state[name] for name in ("model", "step", "epoch") if name in state}
            save(kept, target)
        written.append(target)
    return written


def save(state: State, target: Path) -> None:
    """Write a state to a file atomically."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    os.close(handle)
    try:
        torch.save(state, name)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
