"""One fine-tune against its base: the ratio of its weights, and the lost part of its gain in loss.

*Directions*: each matrix of changes is a product of two matrices of integers, from its singular vectors. A direction is
kept if it is worth its bits. Steps are such that all elements err alike, times the eighth root of the second moments of
their rows and columns. A common scale makes up for lost directions. *UltraDelta*, after Wang et al., arXiv 2505.13563:
changes are dropped at random, more of them in layers of small variance, scaled to their sum of sizes, and have four
bits. Bits of both are entropies, without tables; those of *lattices* are the bytes of a version of a store.
"""

from __future__ import annotations

import argparse
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

#: A direction is kept if its energy is this multiple of that of a step for each of its coefficients.
_WORTH = 0.1

#: The power of the moments by which steps are shaped, and the largest factor.
_POWER, _REACH = 1 / 8, 4.0

#: Bits of a direction's scale and counts, and of a row's or column's exponent.
_HEAD, _EXPONENT = 24, 2.5

#: The step of vectors, as a part of that of matrices.
_FINER = 1 / 8


@dataclass(frozen=True)
class FineTune:
    """The weights before and after, and the second moments of the matrices."""

    base: Weights
    last: Weights
    moments: Mapping[str, Matrix]

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


def shape_of(moments: Matrix, mean: float) -> Matrix:
    """Return the factors of elements by the moments of their rows and columns, half octaves each."""
    own = moments.mean() or 1.0
    axes = [
        2 ** (np.rint(2 * np.log2(np.clip((moments.mean(axis) / own + 1e-6) ** _POWER, 1 / _REACH, _REACH))) / 2)
        for axis in (1, 0)
    ]
    shape: Matrix = np.outer(*axes) * float((own / mean) ** _POWER)
    return shape


def directions(tune: FineTune, size: float, scale: float) -> tuple[dict[str, Tensor], float]:
    """Return the weights that directions with a step of `size` mean changes restore, and the bits."""
    found, bits = vectors(tune)
    step = size * tune.unit()
    mean = float(np.mean([moments.mean() for moments in tune.moments.values()]))
    for name in tune.matrices:
        change = tune.change(name)
        shape = shape_of(tune.moments[name], mean)
        left, scales, right = np.linalg.svd(change * shape, full_matrices=False)
        kept = int((scales**2 > _WORTH * step**2 * sum(change.shape)).sum())
        left, scales, right = left[:, :kept], scales[:kept, None], right[:kept]
        finer = step / 2 ** np.rint(np.log2(scales))
        first, second = np.rint(left * scales.T / step), np.rint(right / finer)
        bits += sum(map(entropy, (*first.T, *second))) + _HEAD * kept + _EXPONENT * sum(change.shape)
        found[name] = (first * step) @ (second * finer) * (scale / shape)
    return tune.changed(found), bits


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


def lattices(tune: FineTune, quality: float, work: Path) -> tuple[dict[str, Tensor], float]:
    """Return the weights of a coarse version of a store that has the base, and the bits of the version."""
    with TemporaryDirectory(dir=work) as place, ckstore.open(place, create=True) as store:
        store.ingest({"model": dict(tune.base)}, run="r", step=0, hot=0)
        state = {"model": dict(tune.last)}
        report = store.ingest(state, run="r", step=1, hot=0, policy=Policy("coarse", quality=quality))
        restored: Any = store["r@1"].state_dict()
    return restored["model"], 8.0 * report.version.stored_bytes


def rows(tune: FineTune, work: Path, seeds: int) -> Iterator[tuple[str, dict[str, Tensor], float]]:
    """Yield the name, restored weights and bits of each way."""
    for quality in (1.5, 4.0):
        yield f"lattices, `--quality` {quality:g}", *lattices(tune, quality, work)
    for kept in (0.5, 0.2):
        for seed in range(seeds):
            yield f"UltraDelta, {kept:.0%} kept, seed {seed}", *ultra_delta(tune, kept, seed)
    for size, scale in ((0.7, 1.0), (1.0, 1.0), (1.0, 1.03), (1.1, 1.05), (1.4, 1.05)):
        yield f"directions, S = {size:g}, scale {scale:g}", *directions(tune, size, scale)


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
        names = [own for own, _ in settings.model().named_parameters()]
        moments = {
            own: last["optimizer"]["state"][place]["exp_avg_sq"].double().numpy() for place, own in enumerate(names)
        }
        tune = FineTune(first["model"], last["model"], moments)
        before, reached = language.loss(tune.base), language.loss(tune.last)
        print("| weights | ratio | lost of the gain |\n| --- | ---: | ---: |")
        for way, weights, bits in rows(tune, work, given.seeds):
            lost = (language.loss(weights) - reached) / (before - reached)
            print(f"| {way} | {32 * tune.count / bits:.1f}x | {lost:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
