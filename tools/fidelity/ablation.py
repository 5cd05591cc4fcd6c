"""DynaQuant's ablation: the savings of each step of its coding over whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.codecs.schemes.dynaquant import DynaQuantSettings, RankStatistics, Treatment, treated
from ckstore.objects.units import SMALL
from tools.fidelity.coded_bits import CodedBits, coded_bits
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import load

#: Runs and settings: the default, and the results of the searches on the residual network.
_CHOSEN = [("cnn", DynaQuantSettings(4, 0.4, 0.0005)), ("cnn", DynaQuantSettings()), ("gpt", DynaQuantSettings())]


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for each run and setting: bits of each version's large tensors, coded in three ways."""
    for run, settings in _CHOSEN:
        found.row("ablation", f"{run}, {settings.levels} levels", partial(_row, bench, run, settings))


def _row(bench: Bench, run: str, settings: DynaQuantSettings) -> dict[str, Any]:
    bits = []
    elements = 0
    before: dict[str, tuple[NDArray[np.uint8], int]] = {}
    for path in bench.run(run):
        quantised = _quantised(path, settings)
        elements = sum(indices.size for indices, _ in quantised.values())
        total = [0] * len(CodedBits._fields)
        for name, (indices, levels) in quantised.items():
            base, most = before.get(name, (np.zeros_like(indices), levels))
            found = coded_bits(indices, base, max(levels, most))
            total = [one + more for one, more in zip(total, found, strict=True)]
        bits.append(total)
        before = quantised
    bench.report(f"{run}: bits an element of the last version: {[one / elements for one in bits[-1]]}")
    return {
        "run": run, "levels": settings.levels, "ways": list(CodedBits._fields), "bits": bits, "elements": elements,
    }  # fmt: skip


def _quantised(path: Path, settings: DynaQuantSettings) -> dict[str, tuple[NDArray[np.uint8], int]]:
    found = {}
    for name, weight in load(path)["model"].items():
        if weight.numel() >= SMALL:
            values, ranks = weight.numpy().reshape(-1), RankStatistics()
            ranks.add(values, None)
            lattice, indices, _ = treated(values, Treatment(ranks.split(settings, known=False), settings.levels, None))
            found[name] = indices, lattice.levels
    return found
