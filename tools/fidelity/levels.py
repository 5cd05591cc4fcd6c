"""The numbers of levels that three quantisers need: k-means on the sketch, evenly spaced levels, plain k-means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ckstore.codecs.schemes.dynaquant import DynaQuantSettings, RankStatistics, Treatment, treated
from ckstore.objects.units import SMALL
from tools.fidelity.baselines import Floats, plain_kmeans, uniform
from tools.fidelity.evaluation import evenly
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import load
from tools.fidelity.whole import judge

#: Tolerances of a checkpoint's degradation, as in Agrawal et al..
TOLERANCES = (0.001, 0.01, 0.05)

_LEVELS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192)

#: Versions of each run.
_POINTS = {"cnn": 6, "gpt": 3}


def _sketch(values: Floats, levels: int) -> Floats:
    """Quantise without pruning and protection."""
    ranks = RankStatistics()
    ranks.add(values, None)
    split = ranks.split(DynaQuantSettings(prune=0.0, protect=0.0), known=False)
    lattice, indices, aside = treated(values, Treatment(split, levels, None))
    decoded: Floats = lattice.values(lattice.numbers(indices, aside)).view(np.float32)
    return decoded


def _plain(values: Floats, levels: int) -> Floats:
    centroids = plain_kmeans(values, levels)
    return centroids[np.searchsorted((centroids[1:] + centroids[:-1]) / 2, values)]


QUANTISERS: dict[str, Callable[[Floats, int], Floats]] = {
    "k-means on the sketch": _sketch,
    "evenly spaced": lambda values, levels: uniform(values, float(values.min()), float(values.max()), levels).values,
    "plain k-means": _plain,
}


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for every run and quantiser: the fewest levels within each tolerance, version by version."""
    for run in _POINTS:
        for name in QUANTISERS:
            found.row("levels", f"{run}, {name}", partial(_row, bench, run, name))


def _row(bench: Bench, run: str, name: str) -> dict[str, Any]:
    paths = bench.run(run)
    degradation = judge(bench, run, paths)
    needed: dict[str, list[int | None]] = {f"{tolerance:g}": [] for tolerance in TOLERANCES}
    for index in evenly(len(paths), _POINTS[run]):
        state = load(paths[index])
        lost: dict[int, float] = {}

        def at(place: int, index: int = index, state: Any = state, lost: dict[int, float] = lost) -> float:
            if place not in lost:
                model = {
                    key: torch.from_numpy(QUANTISERS[name](value.numpy().reshape(-1), _LEVELS[place])).view(value.shape)
                    if value.numel() >= SMALL and value.dtype == torch.float32 else value
                    for key, value in state["model"].items()
                }  # fmt: skip
                lost[place] = degradation(paths[index], state | {"model": model})
            return lost[place]

        for tolerance in TOLERANCES:
            low, high = 0, len(_LEVELS)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if at(middle) <= tolerance else (middle + 1, high)
            needed[f"{tolerance:g}"].append(_LEVELS[low] if low < len(_LEVELS) else None)
    bench.report(f"{run}, {name}: {needed}")
    return {"run": run, "quantiser": name, "needed": needed}
