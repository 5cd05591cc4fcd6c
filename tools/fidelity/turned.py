"""Weights that are rounded in turned axes: bits an element, the loss after resuming, and the price of turning.

The axes of a matrix, or of each block of its rows and columns, are eigenvectors of the changes that a decoder has seen;
values, not changes, are rounded in them, with steps that are shaped by the first moment in the turned axes. Bits are
entropies with the contexts of coarse versions, without tables; the bits of the axes, paid once, are a column.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tools import models, runs
from tools.fidelity.evaluation import Language, held_out_sources
from tools.fidelity.states import State, load

Matrix = npt.NDArray[np.float64]

#: Checkpoints whose changes give the axes, and steps of resumed training.
_HISTORY, _STEPS, _WINDOWS = 4, 20, 256

#: Bits of a coefficient of the axes as they would be stored.
_COEFFICIENT_BITS = 16

#: Name, widths of the blocks of the left and right side (0: own axes), and steps in units of the weights' change.
ROWS: list[tuple[str, int, int, tuple[float, ...]]] = [
    ("own axes", 0, 0, (4, 5, 6, 8)),
    ("both sides, whole", 4096, 4096, (5, 7)),
    ("right side, whole", 0, 4096, (5, 6)),
    ("right side, blocks of 128", 0, 128, (5, 6)),
    ("right side, blocks of 64", 0, 64, (5,)),
    ("both sides, blocks of 128", 128, 128, (5, 6)),
    ("both sides, blocks of 64", 64, 64, (5, 6, 7)),
]


@dataclass(frozen=True)
class _Run:
    """Checkpoints of the GPT, with the matrices of its blocks of at least 2^16 elements.

    Attributes
    ----------
    states
        From the first that gives the axes to the last, which is judged.
    names
        Of the matrices.
    change
        Root mean square of an element's change between two checkpoints.
    """

    states: list[State]
    names: list[str]
    change: float

    @classmethod
    def of(cls, paths: list[Path]) -> _Run:
        states = [load(path) for path in paths]
        model = states[-1]["model"]
        names = [
            name for name in model if name.startswith("h.") and model[name].ndim == 2 and model[name].numel() >= 1 << 16
        ]
        new = cls(states, names, 0.0)
        squares = [
            np.square(new.weight(later, name) - new.weight(later - 1, name)).mean()
            for later in range(_HISTORY, len(states))
            for name in names
        ]
        return cls(states, names, float(np.sqrt(np.mean(squares))))

    def weight(self, version: int, name: str) -> Matrix:
        return self.states[version]["model"][name].numpy().astype(np.float64)  # type: ignore[no-any-return]

    def moment(self, name: str, kind: str) -> Matrix:
        """Return a moment of a matrix in the version from which the axes hold."""
        state = self.states[_HISTORY - 1]
        number = list(state["model"]).index(name)
        return state["optimizer"]["state"][number][kind].numpy().astype(np.float64)  # type: ignore[no-any-return]


def _steps(sensitivity: Matrix, mean: float) -> Matrix:
    """Return steps shaped by rows and columns of a sensitivity to the power of -1/4, within a factor of 4 each."""
    sides = [np.clip(np.rint(-0.25 * np.log2(sensitivity.mean(axis) / mean + 1e-30)), -2, 2) for axis in (1, 0)]
    return np.asarray(2.0 ** (sides[0][:, None] + sides[1][None, :]))


def _pooled(sensitivities: dict[str, Matrix]) -> float:
    return float(np.exp(np.mean([np.log(each.mean()) for each in sensitivities.values()])))


def _axes(changes: list[Matrix], width: int) -> Matrix | None:
    """Return orthogonal axes of the rows of changes, in blocks; None for a width of 0."""
    if not width:
        return None
    length = len(changes[0])
    axes = np.zeros((length, length))
    for start in range(0, length, width):
        block = slice(start, start + width)
        covariance = sum(change[block] @ change[block].T for change in changes)
        axes[block, block] = np.linalg.eigh(covariance)[1][:, ::-1]
    return axes


@dataclass(frozen=True)
class _Turned:
    """A matrix in axes of its own."""

    left: Matrix | None
    right: Matrix | None

    def there(self, matrix: Matrix) -> Matrix:
        matrix = matrix if self.left is None else self.left.T @ matrix
        return matrix if self.right is None else matrix @ self.right

    def back(self, matrix: Matrix) -> Matrix:
        matrix = matrix if self.left is None else self.left @ matrix
        return matrix if self.right is None else matrix @ self.right.T


def _entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the bits of symbols with these counts, all together."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def _bits(change: Matrix, before: Matrix) -> float:
    """Return the bits of a change, with the change before it and the size of its rows and columns as contexts."""
    sizes = np.abs(before)
    expected = np.log2(sizes.mean(1, keepdims=True) * sizes.mean(0, keepdims=True) / (sizes.mean() + 1e-9) + 1e-6)
    bounds = np.quantile(expected.ravel()[::17], np.linspace(0, 1, 17)[1:-1])
    contexts = np.searchsorted(bounds, expected) * 5 + (np.clip(before, -2, 2) + 2).astype(int)
    symbols = np.clip(change, -40, 40).astype(int) + 40
    table = np.bincount((contexts * 81 + symbols).ravel(), minlength=80 * 81).reshape(-1, 81)
    return sum(_entropy(counts) for counts in table if counts.sum())


def _rounded(run: _Run, left: int, right: int, size: float) -> tuple[dict[str, torch.Tensor], float, float]:
    """Return the last version rounded in turned axes, the bits of an element, and those of the axes once."""
    plain = {name: run.moment(name, "exp_avg_sq") for name in run.names}
    pooled = _pooled(plain)
    turned: dict[str, _Turned] = {}
    sensitivity = dict(plain)
    coefficients = 0
    for name in run.names:
        step = 5 * run.change * _steps(plain[name], pooled)
        decoded = [np.rint(run.weight(version, name) / step) * step for version in range(_HISTORY)]
        changes = [later - earlier for earlier, later in itertools.pairwise(decoded)]
        turned[name] = _Turned(_axes(changes, left), _axes([change.T for change in changes], right))
        coefficients += sum(len(step) * min(left, len(step)) for step, left in ((step, left), (step.T, right)))
        if left or right:
            moment = run.moment(name, "exp_avg")
            unit = np.sqrt(np.square(moment).mean(1, keepdims=True)) * 0.5 + 1e-30
            sensitivity[name] = np.square(turned[name].there(np.rint(moment / unit) * unit))
    pooled = _pooled(sensitivity)
    weights: dict[str, torch.Tensor] = {}
    bits, elements = 0.0, 0
    for name in run.names:
        step = size * run.change * _steps(sensitivity[name], pooled)
        levels = [
            np.rint(turned[name].there(run.weight(version, name)) / step)
            for version in range(_HISTORY - 1, len(run.states))
        ]
        changes = [later - earlier for earlier, later in itertools.pairwise(levels)]
        bits += sum(_bits(change, before) for before, change in itertools.pairwise(changes))
        elements += step.size * (len(changes) - 1)
        weights[name] = torch.from_numpy(turned[name].back(levels[-1] * step).astype(np.float32))
    return weights, bits / elements, coefficients * _COEFFICIENT_BITS / (elements / (len(changes) - 1))


def _price(left: int, right: int, length: int = 1024) -> float:
    """Return the nanoseconds an element of turning a square matrix of float32 back by NumPy, the best of five."""
    matrix = np.random.default_rng(0).standard_normal((length, length), dtype=np.float32)

    def product(matrix: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.float32]:
        width = min(width, length)
        if not width:
            return matrix
        axes = np.random.default_rng(1).standard_normal((length // width, width, width), dtype=np.float32)
        turned: npt.NDArray[np.float32] = np.matmul(axes, matrix.reshape(length // width, width, length))
        return turned.reshape(length, length)

    best = np.inf
    for _ in range(5):
        start = time.perf_counter()
        product(product(matrix, left).T.copy() if right else product(matrix, left), right)
        best = min(best, time.perf_counter() - start)
    return best / matrix.size * 1e9 if left or right else 0.0


def _judge(run: _Run, tier: str, seeds: int) -> Callable[[dict[str, torch.Tensor]], list[float]]:
    settings = runs.text_settings("gpt", tier)
    language = Language(settings, torch.cat(models.sources()), held_out_sources(settings, _WINDOWS))
    exact = run.states[-1]

    def resumed(state: State) -> list[float]:
        return [language.resumed(state, exact["step"], seed=seed, steps=_STEPS) for seed in range(seeds)]

    def rises(weights: dict[str, torch.Tensor]) -> list[float]:
        coarse: dict[str, Any] = dict(exact) | {"model": dict(exact["model"]) | weights}
        return [rounded / same - 1 for rounded, same in zip(resumed(coarse), resumed(exact), strict=True)]

    return rises


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each form and step."""
    parser = argparse.ArgumentParser(prog="tools/bench/turned", description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=runs.TIERS, default="small", help="of the trained GPT")
    parser.add_argument("--run", type=Path, help="directory of its checkpoints, in place of a run in --work")
    parser.add_argument("--work", type=Path, default=Path(__file__).resolve().parents[2] / ".cache")
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    paths = sorted(chosen.run.glob("step*.pt")) if chosen.run else []
    run = _Run.of(paths or runs.train("gpt", chosen.work / "runs" / chosen.tier, tier=chosen.tier)[3:])
    rises = _judge(run, chosen.tier, chosen.seeds)
    print("| axes | S | bits | axes, once | rise after resuming | mean | ns an element |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for name, left, right, sizes in ROWS:
        for size in sizes if chosen.only in name else ():
            weights, bits, once = _rounded(run, left, right, size)
            rise = rises(weights)
            each = ", ".join(f"{value:+.2%}" for value in rise)
            price = f"{_price(left, right):.1f}" if left or right else "-"
            print(
                f"| {name} | {size:g} | {bits:.3f} | {once:.1f} | {each} | {statistics.mean(rise):+.3%} | {price} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
