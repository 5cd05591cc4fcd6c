"""One fine-tune against its base: the ratio of its weights, the lost part of its gain in loss, and CPU seconds a GB.

*Factors* and *lattices* are schemes of coarse versions; bytes are those of a version of a store that has the base, with
its manifest, and seconds those of storing and restoring it. *UltraDelta*, after Wang et al., arXiv 2505.13563: changes
are dropped at random, more of them in layers of small variance, scaled to their sum of sizes, and have four bits. Its
bits are entropies, without tables.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import ckstore
from ckstore.policy import Policy
from tools import models, runs
from tools.fidelity.evaluation import Language, held_out_prose
from tools.fidelity.states import load

Matrix = npt.NDArray[np.float64]
Weights = Mapping[str, Tensor]

_WINDOWS = 256

#: The step of vectors, as a part of that of matrices.
_FINER = 1 / 8


@dataclass(frozen=True)
class FineTune:
    """The weights before and after."""

    base: Weights
    last: Weights

    @property
    def count(self) -> int:
        """The number of weights."""
        return sum(value.numel() for value in self.last.values())

    def change(self, name: str) -> Matrix:
        """Return the change of a tensor."""
        return (self.last[name].double() - self.base[name].double()).numpy()

    @property
    def matrices(self) -> list[str]:
        """The names of the tensors with two axes."""
        return [name for name, value in self.last.items() if value.ndim == 2]

    def unit(self) -> float:
        """Return the root mean square of the changes of all matrices."""
        squares = [np.square(self.change(name)) for name in self.matrices]
        return float(np.sqrt(sum(one.sum() for one in squares) / sum(one.size for one in squares)))

    def changed(self, changes: Mapping[str, Matrix]) -> dict[str, Tensor]:
        """Return the base with changes."""
        return {name: self.base[name] + torch.from_numpy(change).float() for name, change in changes.items()}


def entropy(symbols: Matrix) -> float:
    """Return the bits of symbols by their frequencies."""
    counts = np.unique(symbols, return_counts=True)[1]
    return float((counts * np.log2(symbols.size / counts)).sum())


def vectors(tune: FineTune) -> tuple[dict[str, Matrix], float]:
    """Return the rounded changes of all tensors but matrices, and their bits."""
    step, bits = _FINER * tune.unit(), 0.0
    found = {}
    for name in tune.last.keys() - set(tune.matrices):
        rounded = np.rint(tune.change(name) / step)
        found[name], bits = rounded * step, bits + entropy(rounded)
    return found, bits


def ultra_delta(tune: FineTune, kept: float, seed: int) -> tuple[dict[str, Tensor], float]:
    """Return the weights that UltraDelta restores from a part of the changes, and the bits."""
    found, bits = vectors(tune)
    generator = np.random.default_rng(seed)
    ordered = sorted(tune.matrices, key=lambda name: float(tune.change(name).std()))
    for place, name in enumerate(ordered):
        change = tune.change(name)
        share = kept * (0.75 + 0.5 * place / max(len(ordered) - 1, 1))
        step = np.abs(change).max() / 7 or 1.0
        symbols = np.rint(change / step) * (generator.random(change.shape) < share)
        scale = np.abs(change).sum() / max(np.abs(symbols).sum(), 1.0)
        found[name], bits = symbols * scale, bits + entropy(symbols)
    return tune.changed(found), bits


@dataclass(frozen=True)
class Stored:
    """Restored weights, their bits in the store, and CPU seconds of storing and restoring them, if they are."""

    weights: dict[str, Tensor]
    bits: float
    seconds: tuple[float, float] | None = None


def coarse(tune: FineTune, scheme: str, quality: float, work: Path) -> Stored:
    """Return the weights of a coarse version of a store that has the base."""
    with TemporaryDirectory(dir=work) as place, ckstore.open(place, create=True) as store:
        store.ingest({"model": dict(tune.base)}, run="r", step=0, hot=0)
        state = {"model": dict(tune.last)}
        began = time.process_time()
        report = store.ingest(state, run="r", step=1, hot=0, policy=Policy("coarse", scheme, quality=quality))
        stored = time.process_time()
        restored: Any = store["r@1"].state_dict()
        seconds = stored - began, time.process_time() - stored
    return Stored(restored["model"], 8.0 * report.version.stored_bytes, seconds)


def rows(tune: FineTune, work: Path, seeds: int) -> Iterator[tuple[str, Stored]]:
    """Yield the name and the result of each way."""
    for quality in (1.5, 4.0):
        yield f"lattices, `--quality` {quality:g}", coarse(tune, "lattice", quality, work)
    for kept in (0.5, 0.2):
        for seed in range(seeds):
            yield f"UltraDelta, {kept:.0%} kept, seed {seed}", Stored(*ultra_delta(tune, kept, seed))
    for quality in (1.0, 1.5, 2.0, 2.8, 4.0):
        yield f"factors, `--quality` {quality:g}", coarse(tune, "factors", quality, work)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tools/bench/directions", description=__doc__)
    parser.add_argument("--tier", choices=runs.TIERS, default="small")
    parser.add_argument("--run", type=Path, help="a trained fine-tune of the tier, in place of a new one")
    parser.add_argument("--seeds", type=int, default=1, help="of UltraDelta")
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.work) as name:
        work = Path(name)
        paths = sorted(given.run.glob("step*.pt")) if given.run else runs.train("finetune", work, tier=given.tier)
        settings = runs.text_settings("finetune", given.tier)
        first, last = load(paths[0]), load(paths[-1])
        language = Language(settings, models.prose(), held_out_prose(settings, first["rng"], _WINDOWS))
        tune = FineTune(first["model"], last["model"])
        before, reached = language.loss(tune.base), language.loss(tune.last)
        print("| weights | ratio | lost of the gain | CPU s/GB stored, restored |\n| --- | ---: | ---: | ---: |")
        for way, found in rows(tune, work, given.seeds):
            lost = (language.loss(found.weights) - reached) / (before - reached)
            took = (
                "" if found.seconds is None else ", ".join(f"{one / (4e-9 * tune.count):.1f}" for one in found.seconds)
            )
            print(f"| {way} | {32 * tune.count / found.bits:.1f}x | {lost:+.2%} | {took} |", flush=True)


if __name__ == "__main__":
    main()
