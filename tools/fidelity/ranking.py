"""The worth of Inshrinkerator's two metrics on the GPT: loss at once of weights split by either, and by both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ckstore.codecs.schemes.dynaquant import (
    DynaQuantSettings,
    RankStatistics,
    Split,
    Treatment,
    moment_sensitivity,
    treated,
)
from ckstore.encoding.layer_types import layer_type
from ckstore.objects.units import SMALL
from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load

#: Common settings of all ways.
_LEVELS, _PRUNE, _PROTECT = 8, 0.3, 0.005

#: The number of evaluated versions: early, late and in between.
_VERSIONS = 4


@dataclass(frozen=True)
class Ranked:
    """One way of splitting one version's weights.

    Attributes
    ----------
    step
        Of the version.
    way
        The metric of protection; the metric of pruning; the levels of embeddings.
    rise
        Relative rise of the evaluation loss at once.
    """

    step: int
    way: str
    rise: float


def measure(bench: Bench) -> list[Ranked]:
    """Quantise the weights of evenly spaced versions, with 8 levels, 30 % pruned and 0.5 % protected."""
    language = gpt_language(bench)
    paths = bench.run("gpt")
    found = []
    for path in paths[len(paths) // _VERSIONS - 1 :: len(paths) // _VERSIONS]:
        state = load(path)
        exact = language.loss(state["model"])
        for protected in ("magnitude", "sensitivity", "either"):
            for pruned in ("magnitude", "sensitivity"):
                for levels in (_LEVELS, 32) if protected == "either" else (_LEVELS,):
                    weights = _quantised(state, protected, pruned, levels)
                    way = f"protected by {protected}, pruned by {pruned}, embeddings {levels}"
                    found.append(Ranked(state["step"], way, language.loss(weights) / exact - 1))
                    bench.report(str(found[-1]))
    return found


def _quantised(state: State, protected: str, pruned: str, embedding_levels: int) -> Mapping[str, torch.Tensor]:
    """Return the weights as Inshrinkerator decodes them; small ones unchanged."""
    settings = DynaQuantSettings(_LEVELS, _PRUNE, _PROTECT, pruned, embedding_levels)
    layers = {}
    together: dict[str, RankStatistics] = defaultdict(RankStatistics)
    for number, (name, weight) in enumerate(state["model"].items()):
        if weight.numel() < SMALL:
            continue
        values = weight.numpy().reshape(-1)
        second = state["optimizer"]["state"][number]["exp_avg_sq"].numpy().reshape(-1)
        kind = layer_type((name,), weight.dim())
        layers[name] = kind, values, moment_sensitivity(values, second)
        together[kind].add(*layers[name][1:])
    weights = dict(state["model"])
    for name, (kind, values, sensitivity) in layers.items():
        split = _alone(together[kind].split(settings, known=True), protected)
        levels = embedding_levels if kind == "embedding" else _LEVELS
        lattice, indices, aside = treated(values, Treatment(split, levels, sensitivity))
        decoded = lattice.values(indices, aside).view(np.float32)
        weights[name] = torch.from_numpy(decoded).reshape(weights[name].shape)
    return weights


def _alone(split: Split, protected: str) -> Split:
    """Return the split that protects by one metric alone."""
    never = RankStatistics().magnitudes.size
    if protected == "magnitude":
        return split._replace(protect_sensitivity=never)
    return split._replace(protect_magnitude=never) if protected == "sensitivity" else split
