"""ExCP (Li et al., ICML 2024), the baseline: pruned residuals and moments, 15 centres each, four bits, LZMA.

Section 3 of the paper: a checkpoint is the residual of its weights against the restored previous checkpoint, and its
moments. Residuals below a threshold are dropped. So are moments that are small or belong to a dropped residual. The
rest is quantised to the nearest of 15 centres found by k-means, 0 being the sixteenth. SGD with momentum has no second
moments, so the limit of the first threshold applies to its residuals.
"""

from __future__ import annotations

import io
import lzma
import math
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.fidelity.archives import Setting
from tools.fidelity.baselines import plain_kmeans
from tools.fidelity.states import Parameter, State, load, parameters

Floats = NDArray[np.float32]
Labels = NDArray[np.uint8]

#: α and β of the paper's equations for the two thresholds, and the authors' limit of the first one.
_ALPHA, _BETA, _MOST = 5e-5, 2.0, 2.5

_CENTRES = 15
_ROUNDS = 25


def weight_mask(residual: Tensor, second: Tensor | None) -> Tensor:
    """Return the mask of kept residuals: above min(2.5, α / sqrt(mean v)) times their median magnitude (v: moments)."""
    mean = 0.0 if second is None else second.double().mean().item()
    factor = min(_MOST, _ALPHA / math.sqrt(max(mean, 1e-300)))
    return residual.abs() > factor * residual.abs().median()


def moment_mask(first: Tensor, kept: Tensor) -> Tensor:
    """Return mask of kept moments: the first one's magnitude is above β times its mean, and the residual is kept."""
    return (first.abs() > _BETA * first.abs().mean()) & kept


def centres(values: Floats) -> Floats:
    """Return up to 15 centres of the values by Lloyd's algorithm from their quantiles, ascending."""
    return plain_kmeans(values, _CENTRES, _ROUNDS)


def quantise(values: Floats) -> tuple[Floats, Labels]:
    """Return centres of the non-zero values, and a label each: 0 for 0, else 1 + the number of the nearest centre."""
    labels = np.zeros(values.shape, np.uint8)
    present = values != 0
    if not present.any():
        return np.zeros(0, np.float32), labels
    found = centres(values[present])
    labels[present] = 1 + np.searchsorted((found[1:] + found[:-1]) / 2, values[present]).astype(np.uint8)
    return found, labels


def pack(values: Floats) -> bytes:
    """Return centres and labels of values, two labels per byte."""
    found, labels = quantise(values.reshape(-1))
    labels = np.append(labels, np.zeros(len(labels) % 2, np.uint8))
    return bytes([len(found)]) + found.tobytes() + (labels[0::2] << 4 | labels[1::2]).tobytes()


def unpack(data: memoryview, count: int) -> tuple[Floats, int]:
    """Return `count` values that `pack` wrote at the start of `data`, and their bytes."""
    start = 1 + 4 * data[0]
    levels = np.concatenate([np.zeros(1, np.float32), np.frombuffer(data[1:start], np.float32)])
    stop = start + (count + 1) // 2
    packed = np.frombuffer(data[start:stop], np.uint8)
    return levels[np.stack([packed >> 4, packed & 15], 1).reshape(-1)[:count]], stop


def compress(state: State, previous: dict[str, Tensor] | None) -> bytes:
    """Return a checkpoint in ExCP's form.

    Parameters
    ----------
    state
        The checkpoint.
    previous
        The restored weights of the previous one. None for the first, whose weights are kept exactly.
    """
    body = io.BytesIO()
    torch.save(_rest(state), body)
    parts = [struct.pack("<Q", body.tell()), body.getvalue()]
    for parameter in parameters(state):
        residual, kept = parameter.weight, torch.ones_like(parameter.weight, dtype=torch.bool)
        if previous is None:
            parts.append(parameter.weight.numpy().tobytes())
        else:
            residual = parameter.weight - previous[parameter.name]
            kept = weight_mask(residual, parameter.moments.get("exp_avg_sq"))
            parts.append(pack(torch.where(kept, residual, 0).numpy()))
        names = _moments(parameter)
        if names:
            kept = moment_mask(parameter.moments[names[0]], kept)
            parts += [pack(torch.where(kept, parameter.moments[name], 0).numpy()) for name in names]
    return lzma.compress(b"".join(parts))


def decompress(data: bytes, previous: dict[str, Tensor] | None) -> State:
    """Restore a checkpoint from the result of `compress`."""
    body = memoryview(lzma.decompress(data))
    start = 8 + struct.unpack("<Q", body[:8])[0]
    state: State = torch.load(io.BytesIO(body[8:start]), weights_only=True)
    for index, parameter in enumerate(parameters(state)):
        shape, count = parameter.weight.shape, parameter.weight.numel()
        if previous is None:
            weight = torch.frombuffer(bytearray(body[start : start + 4 * count]), dtype=torch.float32).view(shape)
            start += 4 * count
        else:
            values, used = unpack(body[start:], count)
            weight = previous[parameter.name] + torch.from_numpy(values).view(shape)
            start += used
        state["model"][parameter.name] = weight
        for name in _moments(parameter):
            values, used = unpack(body[start:], count)
            state["optimizer"]["state"][index][name] = torch.from_numpy(values).view(shape)
            start += used
    return state


class ExcpArchive:
    """Files of ExCP in a directory.

    Parameters
    ----------
    directory
        Belongs to one run; created if absent.
    """

    setting = Setting("excp")

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.files: list[Path] = []
        self._last: tuple[int, State] | None = None

    def add(self, path: Path) -> bool:
        """Compress a checkpoint against the last one that was added."""
        previous = self.restore(len(self.files) - 1)["model"] if self.files else None
        target = self.directory / f"{path.stem}.xz"
        target.write_bytes(compress(load(path), previous))
        self.files.append(target)
        return previous is None

    def restore(self, index: int) -> State:
        """Return a version, decoded from the first one on unless the version before was the last one restored."""
        at, state = self._last or (-1, None)
        if state is None or at > index:
            at, state = -1, None
        while at < index:
            state = decompress(self.files[at + 1].read_bytes(), None if state is None else state["model"])
            at += 1
        assert state is not None
        self._last = (at, state)
        return state

    def nbytes(self) -> int:
        """Return the bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def remove(self) -> None:
        """Delete the files."""
        self._last = None
        shutil.rmtree(self.directory)


def _moments(parameter: Parameter) -> list[str]:
    """Return the names of the moments, the first one first."""
    return [name for name in ("exp_avg", "momentum_buffer", "exp_avg_sq") if name in parameter.moments]


def _rest(state: State) -> State:
    """Return the state with only the shape of everything that is kept otherwise."""
    optimizer = state["optimizer"]
    entries = {
        index: {name: _shape(value) if isinstance(value, Tensor) and value.ndim else value for name, value in e.items()}
        for index, e in optimizer["state"].items()
    }
    model = state["model"] | {parameter.name: _shape(parameter.weight) for parameter in parameters(state)}
    return state | {"model": model, "optimizer": optimizer | {"state": entries}}


def _shape(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
