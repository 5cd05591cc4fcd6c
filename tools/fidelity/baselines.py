"""Baselines of Inshrinkerator's evaluation: QD-compressor, Check-N-Run and GOBO, as their papers describe them.

Each quantises the matrices of a model, tensor by tensor, with a number of levels that is searched for each checkpoint,
as Agrawal et al. extended them: the fewest levels for which an evaluation stays within a tolerance. Vectors and
everything outside of the model stay exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from math import ceil, log2, pi
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.fidelity.archives import Setting
from tools.fidelity.states import State, load

Floats = NDArray[np.float32]
Indices = NDArray[np.uint8]

#: Numbers of levels, from the gentlest on.
LEVELS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4)

#: The log probability density below which values are GOBO's outliers, in a normal distribution with the layer's mean
#: and variance.
_UNLIKELY = -4.0

#: Shares of the range by which Check-N-Run may shrink it at either end.
_SHRUNK = tuple(np.linspace(0, 0.9, 19))


class Quantised(NamedTuple):
    """A tensor's restored values, the index of each among `levels` levels, and its outliers."""

    values: Floats
    indices: Indices
    levels: int
    outliers: int = 0


def uniform(values: Floats, low: float, high: float, levels: int) -> Quantised:
    """Quantise to the nearest of `levels` evenly spaced values from `low` to `high`."""
    step = (high - low) / (levels - 1) or 1.0
    indices = np.rint((np.clip(values, low, high) - low) / step).astype(np.uint8)
    return Quantised((low + step * indices).astype(np.float32), indices, levels)


def entropy(values: Floats) -> float:
    """Return the entropy per element, in bits, of a histogram of 256 bins."""
    counts = np.histogram(values, 256)[0]
    shares = counts[counts > 0] / values.size
    return float(-(shares * np.log2(shares)).sum())


def qd(tensors: Mapping[str, Floats], levels: int) -> dict[str, Quantised]:
    """Quantise by QD-compressor (Jin et al., ICCD 2021): evenly spaced levels, fewer in layers of less entropy.

    The layer whose histogram has the most bits gets all levels; each bit less halves them.
    """
    bits = {name: entropy(values) for name, values in tensors.items()}
    most = max(bits.values())
    return {
        name: uniform(values, values.min(), values.max(), max(4, round(levels * 2.0 ** (bits[name] - most))))
        for name, values in tensors.items()
    }


def check_n_run(tensors: Mapping[str, Floats], levels: int) -> dict[str, Quantised]:
    """Quantise by Check-N-Run (Eisenman et al., NSDI 2022): evenly spaced levels over the range of least squared error.

    The range shrinks towards the mean; a regular sample of the elements determines the amount.
    """
    found = {}
    for name, values in tensors.items():
        sample = values[:: max(1, values.size // 20_000)]
        mean, low, high = (float(part) for part in (values.mean(), values.min(), values.max()))
        ranges = [(low + share * (mean - low), high - share * (high - mean)) for share in _SHRUNK]
        best = min(
            ranges, key=lambda ends: float(np.square(uniform(sample, ends[0], ends[1], levels).values - sample).sum())
        )
        found[name] = uniform(values, best[0], best[1], levels)
    return found


def gobo(tensors: Mapping[str, Floats], levels: int) -> dict[str, Quantised]:
    """Quantise by GOBO (Zadeh et al., MICRO 2020): levels by k-means, unlikely values unchanged."""
    found = {}
    for name, values in tensors.items():
        deviation = float(values.std()) or 1.0
        likelihood = -np.square((values - values.mean()) / deviation) / 2 - np.log(deviation * np.sqrt(2 * pi))
        kept = likelihood < _UNLIKELY
        centroids = plain_kmeans(values[~kept], levels)
        indices = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values).astype(np.uint8)
        found[name] = Quantised(np.where(kept, values, centroids[indices]), indices, levels, int(kept.sum()))
    return found


def plain_kmeans(values: Floats, count: int, rounds: int = 100) -> Floats:
    """Return centroids of all values, unweighted, by Lloyd's rounds from their quantiles; ascending.

    On sorted values and their prefix sums a round takes time logarithmic in their number.
    """
    ordered = np.sort(values).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    found = np.unique(ordered[((np.arange(count) + 0.5) / count * len(ordered)).astype(int)])
    for _ in range(rounds):
        cuts = np.concatenate([[0], np.searchsorted(ordered, (found[1:] + found[:-1]) / 2), [len(ordered)]])
        counts = np.diff(cuts)
        means = np.diff(sums[cuts])[counts > 0] / counts[counts > 0]
        if np.array_equal(means, found):
            break
        found = means
    return found.astype(np.float32)


def _fixed_bits(new: Mapping[str, Quantised], before: Mapping[str, Quantised]) -> int:
    """Return the size of indices of a fixed width, the levels, and each outlier's value and place in 16 bits."""
    return sum(ceil(log2(one.levels)) * one.indices.size + 32 * one.levels + 48 * one.outliers for one in new.values())


def _delta_bits(new: Mapping[str, Quantised], before: Mapping[str, Quantised]) -> int:
    """Return the size of Huffman codes of the cyclic differences to the indices before, with their tables."""
    total = 0
    for name, one in new.items():
        old = before.get(name, one._replace(indices=np.zeros_like(one.indices)))
        total += 64 + huffman_bits(
            np.remainder(old.indices.astype(np.int16) - one.indices, max(one.levels, old.levels))
        )
    return total


def huffman_bits(symbols: NDArray[Any]) -> int:
    """Return the bits of the symbols in their own Huffman code, and of its table.

    A table's entry is a code length in 5 bits and the distance to the symbol before it in Elias' gamma code.
    """
    values, counts = np.unique(symbols, return_counts=True)
    if not values.size:
        return 0
    distances = np.diff(values, prepend=values[0] - 1 - abs(int(values[0])))
    table = int((5 + 2 * np.floor(np.log2(distances)) + 1).sum())
    heap = counts.tolist()
    if len(heap) == 1:
        return table + int(heap[0])
    heapq.heapify(heap)
    total = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return table + total


#: Quantiser and size in bits of each baseline.
BASELINES = {"QD-compressor": (qd, _delta_bits), "Check-N-Run": (check_n_run, _fixed_bits), "GOBO": (gobo, _fixed_bits)}


def matrices(state: State) -> dict[str, Floats]:
    """Return the quantised tensors of a model, flat: floats of more than one axis."""
    return {
        name: value.numpy().reshape(-1)
        for name, value in state["model"].items()
        if value.dtype == torch.float32 and value.dim() > 1
    }


class BaselineArchive:
    """A baseline, in memory.

    Parameters
    ----------
    name
        A key of `BASELINES`.
    degradation
        The degradation of a model relative to the checkpoint's: decides whether levels are enough.
    tolerance
        The tolerated degradation of each checkpoint. If no number of levels meets it, the checkpoint is kept exactly.

    Attributes
    ----------
    chosen
        Levels of each checkpoint; 0 for an exact one.
    """

    def __init__(self, name: str, degradation: Callable[[Path, State], float], tolerance: float) -> None:
        self.setting = Setting(name)
        self.chosen: list[int] = []
        self._quantise, self._bits = BASELINES[name]
        self._degradation = degradation
        self._tolerance = tolerance
        self._kept: list[tuple[Path, dict[str, Tensor], int]] = []
        self._last: dict[str, Quantised] = {}

    def add(self, path: Path) -> bool:
        """Quantise a checkpoint with the last number of levels, or with the smallest larger one that is enough."""
        state = load(path)
        tensors = matrices(state)
        start = next((place for place, levels in enumerate(LEVELS) if levels in self.chosen[-1:]), len(LEVELS) - 1)
        bits = 32 * sum(value.numel() for value in state["model"].values())
        model, chosen, last = state["model"], 0, dict[str, Quantised]()
        for levels in LEVELS[start::-1]:
            quantised = self._quantise(tensors, levels)
            decoded = {name: torch.from_numpy(one.values).view(model[name].shape) for name, one in quantised.items()}
            if self._degradation(path, state | {"model": model | decoded}) <= self._tolerance:
                bits += self._bits(quantised, self._last) - 32 * sum(values.size for values in tensors.values())
                model, chosen, last = model | decoded, levels, quantised
                break
        is_base = not self._last
        self.chosen.append(chosen)
        self._kept.append((path, model, ceil(bits / 8)))
        self._last = last
        return is_base or not chosen

    def restore(self, index: int) -> State:
        """Return the checkpoint with its model as it was kept."""
        path, model, _ = self._kept[index]
        return load(path) | {"model": model}

    def nbytes(self) -> int:
        """Return the bytes of all models."""
        return sum(nbytes for _, _, nbytes in self._kept)

    def remove(self) -> None:
        """Release the models."""
        self._kept.clear()
