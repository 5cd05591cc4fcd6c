"""Measures matrices in the eigenbasis of their decoded history: bits and losses beside those of today's lattice.

    python -m tools.fidelity.rotation --tier small --work .cache

trains missing runs, measures missing rows and prints the table. No store holds these versions; its entropy coder codes
them. Only matrices in blocks are coarse, their weights or first moments; the rest is exact.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ckstore.codecs.integers import encode_integers
from ckstore.encoding.coarse import FIRST_MOMENT, SLACK
from ckstore.encoding.common_step import ALPHA, FIRST, FLOOR
from ckstore.encoding.sensitivity import POWER
from tools import models, runs
from tools.bench import speed_figures
from tools.fidelity.evaluation import Language, evenly, held_out_prose
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import Parameter, State, load, parameters
from tools.fidelity.whole import WINDOWS, gpt_language
from tools.training import ImageSettings

#: First parts of the names of tensors outside blocks.
_OUTER = ("wte", "wpe", "lm_head", "stem", "fc")

#: First versions of a run, judged ones, seeds and steps of resumed training.
_VERSIONS, _POINTS, _SEEDS, _STEPS = 16, 3, 2, 20

#: Octaves that sensitivities differ by, as in `ckstore.encoding.sensitivity`.
_REACH = 2.0

#: The part of the past in covariances of changes, changes before the first basis, and main directions.
_PAST, _WARM, _MAIN = 0.7, 2, 16

#: Groups of elements: octaves of variance below and above the mean, and places of the base in its cell.
_BELOW, _ABOVE, _PLACES = 3, 7, 4


class Scheme(NamedTuple):
    """The sides that are turned, and the number of versions with the same basis.

    If it `lags`, changes are rounded in place of values: values near the last decoded ones stay there.
    """

    left: bool = False
    right: bool = False
    refresh: int = 1
    lags: bool = False


SCHEMES = {
    "lattice": Scheme(),
    "right": Scheme(right=True),
    "both": Scheme(left=True, right=True),
    "both, every fourth": Scheme(left=True, right=True, refresh=4),
    "both, kept": Scheme(left=True, right=True, refresh=_VERSIONS),
    "right, lagging": Scheme(right=True, lags=True),
    "both, lagging": Scheme(left=True, right=True, lags=True),
}

#: Octaves of rows and columns of each weight.
Shapes = list[tuple[Tensor, Tensor]]

_RUNS = ("gpt", "finetune", "cnn")

#: Schemes, qualities and coarse parts of the rows.
_ROWS = [
    ("lattice", 1.5, "weights"), ("both, lagging", 1.5, "weights"), ("lattice", 2.8, "weights"),
    ("both, every fourth", 1.5, "weights"), ("both, kept", 1.5, "weights"), ("right", 1.5, "weights"),
    ("both", 1.5, "weights"), ("right, lagging", 1.5, "weights"),
    ("lattice", 1.5, "moments"), ("right", 2.8, "moments"), ("right", 1.5, "moments"), ("lattice", 0.75, "moments"),
]  # fmt: skip


class Coder:
    """Codes the versions of a weight, in the form of `matrices`, as a decoder could follow.

    Its covariances are means of those of decoded changes in steps, by rows and by columns; their traces are 1.
    """

    def __init__(self, scheme: Scheme, like: Tensor) -> None:
        self.scheme = scheme
        self.decoded, self.steps = torch.zeros_like(like), torch.ones(())
        self.covariances: list[Tensor] = []
        self._exponents: list[Tensor] = []
        self._bases: list[Tensor | None] = [None, None]
        self._groups: Tensor | None = None
        self._seen = -1

    def add(self, weight: Tensor, octaves: tuple[Tensor, Tensor]) -> int:
        """Code the next version, with steps of rows and columns, and return its bytes."""
        before = self._exponents or [torch.full((), math.inf)] * 2
        self._exponents = [
            torch.where((asked - old).abs() < SLACK, old, asked.round())
            for asked, old in zip(octaves, before, strict=True)
        ]
        self.steps = torch.exp2(self._exponents[0] + self._exponents[1])
        if self._seen >= _WARM and (self._seen - _WARM) % self.scheme.refresh == 0:
            self._turn()
        nbytes, change = self._coded((weight - self.decoded) / self.steps, self.decoded / self.steps)
        self.decoded = self.decoded + change * self.steps
        self._seen += 1
        if self._seen > 0:
            found = [(change @ change.mT).sum(0), (change.mT @ change).sum(0)]
            found = [each / each.trace().clamp_min(1e-30) for each in found]
            old = self.covariances or found
            self.covariances = [_PAST * mean + (1 - _PAST) * each for mean, each in zip(old, found, strict=True)]
        return nbytes

    def moment(self, moment: Tensor, quality: float) -> tuple[int, Tensor]:
        """Return bytes and decoded values of a first moment, with today's steps in the weight's last basis."""
        sizes = torch.log2(moment.abs().clamp_min(1e-30))
        level = FIRST_MOMENT + math.log2(quality) - sizes.mean()
        steps = torch.exp2((level + sizes.mean((0, 2), keepdim=True) + sizes.mean(1, keepdim=True)).round())
        nbytes, decoded = self._coded(moment / steps, torch.zeros(moment.shape))
        return nbytes, decoded * steps

    def shares(self, change: Tensor) -> list[float]:
        """Return the parts of a change's square in its own main directions of rows, and in its history's."""
        change = change / self.steps
        own = torch.linalg.eigvalsh((change.mT @ change).sum(0))[-_MAIN:].sum()
        main = torch.linalg.eigh(self.covariances[1])[1][:, -_MAIN:]
        return [float(each / change.square().sum()) for each in (own, (change @ main).square().sum())]

    def _coded(self, change: Tensor, base: Tensor) -> tuple[int, Tensor]:
        """Return bytes and decoded change, all in steps; elements are grouped by the base's place in a new cell."""
        offset, groups = torch.zeros(change.shape), self._groups
        if groups is not None:
            if not self.scheme.lags:
                offset = self._turned(base) - self._turned(base).round()
            groups = groups * _PLACES + (offset.abs() * 2 * _PLACES).clamp(max=_PLACES - 1).to(torch.uint8)
        integers = (self._turned(change) + offset).round()
        coded = torch.where(offset < 0, -integers, integers).to(torch.int32)
        nbytes = len(encode_integers(coded.flatten().numpy(), None if groups is None else groups.flatten().numpy()))
        return nbytes, self._turned(integers - offset, back=True)

    def _turned(self, values: Tensor, *, back: bool = False) -> Tensor:
        left, right = (each if each is None or not back else each.mT for each in self._bases)
        values = values if left is None else left.mT @ values
        return values if right is None else values @ right

    def _turn(self) -> None:
        """Take the eigenbasis of the covariances, and group elements by their variances."""
        octaves = []
        for side, is_turned in enumerate(self.scheme[:2]):
            variances, vectors = self.covariances[side].diagonal(), None
            if is_turned:
                variances, vectors = torch.linalg.eigh(self.covariances[side])
            self._bases[side] = vectors
            octaves.append(torch.log2((variances / variances.mean()).clamp_min(2.0**-_BELOW)))
        if any(self.scheme[:2]):
            groups = (octaves[0][:, None] + octaves[1]).round().clamp(-_BELOW, _ABOVE) + _BELOW
            self._groups = groups.to(torch.uint8).expand(self.decoded.shape)


def matrices(values: Tensor) -> Tensor:
    """Return a weight as (matrices, rows, columns): a convolution has a matrix for each place of its kernel."""
    return values.permute(2, 3, 0, 1).flatten(0, 1) if values.ndim == 4 else values[None]


def _fill(weight: Tensor, found: Tensor) -> None:
    """Write matrices into the weight that they are of."""
    weight.copy_(found.unflatten(0, weight.shape[2:]).permute(2, 3, 0, 1) if weight.ndim == 4 else found[0])


def _inner(state: State) -> list[Parameter]:
    return [each for each in parameters(state) if each.weight.ndim > 1 and each.name.split(".")[0] not in _OUTER]


def _sensitivities(found: list[Parameter]) -> Shapes:
    """Return octaves of rows and columns as `ckstore.encoding.sensitivity` does."""
    is_second = all("exp_avg_sq" in each.moments for each in found)
    name, power = ("exp_avg_sq", POWER) if is_second else ("momentum_buffer", POWER / 2)
    moments = [matrices(each.moments.get(name, torch.ones_like(each.weight))) for each in found]
    squares = moments if is_second else [each.square() for each in moments]
    overall = torch.cat([each.flatten() for each in squares]).mean()

    def octaves(means: Tensor, reference: Tensor) -> Tensor:
        return (power * torch.log2(means.clamp_min(1e-30) / reference)).clamp(-_REACH, _REACH)

    return [
        (octaves(each.mean((0, 2))[:, None], mean) + octaves(mean, overall), octaves(each.mean(1, keepdim=True), mean))
        for each, mean in ((each, each.mean()) for each in squares)
    ]


def versions(
    paths: list[Path], scheme: Scheme, quality: float, part: str
) -> Iterator[tuple[float, State, list[list[float]]]]:
    """Code the versions of a run; return bits an element, the state with a coarse part, and `Coder.shares` at last."""
    coders: list[Coder] = []
    first: list[Tensor] = []
    before: list[Tensor] = []
    for path in paths:
        state = load(path)
        found = _inner(state)
        weights = [matrices(each.weight).clone() for each in found]
        shapes = _sensitivities(found)
        coders = coders or [Coder(scheme, weight) for weight in weights]
        shares = []
        if path == paths[-1]:
            shares = [coder.shares(weight - old) for coder, weight, old in zip(coders, weights, before, strict=True)]
        level = math.log2(quality * _step(weights, before, first, shapes))
        total = 0
        for each, coder, weight, (rows, cols) in zip(found, coders, weights, shapes, strict=True):
            nbytes = coder.add(weight, (level + rows, cols))
            if part == "weights":
                total += nbytes
                _fill(each.weight, coder.decoded)
                continue
            for name in {"exp_avg", "momentum_buffer"} & each.moments.keys():
                nbytes, decoded = coder.moment(matrices(each.moments[name]), quality)
                total += nbytes
                _fill(each.moments[name], decoded)
        first, before = first or weights, weights
        yield 8 * total / sum(each.numel() for each in weights), state, shares


def _step(weights: list[Tensor], before: list[Tensor], first: list[Tensor], shapes: Shapes) -> float:
    """Return the common step at quality 1 as `ckstore.encoding.common_step` does."""

    def distance(others: list[Tensor]) -> float:
        total = sum(
            float(((weight - other) / torch.exp2(rows + cols)).square().sum())
            for weight, other, (rows, cols) in zip(weights, others, shapes, strict=True)
        )
        return math.sqrt(total / sum(weight.numel() for weight in weights))

    if not before:
        return FIRST * distance([torch.zeros(())] * len(weights))
    return max(ALPHA * distance(before), FLOOR * distance(first))


def _judge(bench: Bench, run: str) -> Callable[[State, int], float]:
    """Return the function of a state and a seed that returns the loss after resuming."""
    if run == "cnn":
        return partial(_digits, runs.image_settings(bench.name))
    language = gpt_language(bench, WINDOWS)
    if run == "finetune":
        settings = runs.text_settings(run, bench.name)
        held_out = held_out_prose(settings, load(bench.run(run)[0])["rng"], WINDOWS)
        language = Language(settings, models.prose(), held_out)
    return lambda state, seed: language.resumed(state, state["step"], seed=seed, steps=_STEPS)


def _digits(settings: ImageSettings, state: State, seed: int) -> float:
    """Return the cross entropy of unseen digits after resuming."""
    images, classes = models.digits()
    train = len(images) - models.HELD_OUT_DIGITS
    model = models.CNN(settings.widths, settings.blocks)
    model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate)
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    batches = torch.Generator().manual_seed(seed)
    for _ in range(_STEPS):
        chosen = torch.randint(train, (settings.batch,), generator=batches)
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(images[chosen]), classes[chosen]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return functional.cross_entropy(model(images[train:]), classes[train:]).item()


def measure(bench: Bench, found: Found, run: str) -> None:
    """Measure the rows of a run."""
    paths = bench.run(run)[:_VERSIONS]
    rarely = paths[(len(paths) - 1) % 2 :: 2]
    points = [rarely[place] for place in evenly(len(rarely), _POINTS)]
    judge = _judge(bench, run)
    found.row(run, "exact", lambda: {"losses": [judge(load(path), seed) for path in points for seed in range(_SEEDS)]})
    exact = next(row["losses"] for row in found.rows(run) if row["name"] == "exact")

    def row(scheme: str, quality: float, part: str, every: int) -> dict[str, Any]:
        chosen = paths if every == 1 else rarely
        bits: list[float] = []
        losses: list[float] = []
        shares: list[list[float]] = []
        for path, version in zip(chosen, versions(chosen, SCHEMES[scheme], quality, part), strict=True):
            bits.append(version[0])
            if path in points:
                losses += [judge(version[1], seed) for seed in range(_SEEDS)]
            shares = version[2]
        return {
            "run": run, "scheme": scheme, "quality": quality, "every": every, "part": part, "bits": bits,
            "rises": [loss / same - 1 for loss, same in zip(losses, exact, strict=True)], "shares": shares,
        }  # fmt: skip

    for every in (1, 2):
        for scheme, quality, part in _ROWS:
            found.row(run, f"{scheme}, {quality:g}, {every}, {part}", partial(row, scheme, quality, part, every))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of measured rows."""
    lines = [
        "| run, checkpoints | coarse | scheme, quality | bits | rise (worst) | main directions: own, history |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in sorted((row for row in rows if "bits" in row), key=lambda row: (row["run"], row["every"], row["part"])):
        own, history = (statistics.mean(share) for share in zip(*row["shares"], strict=True))
        rises = f"{statistics.mean(row['rises']):+.3%} ({max(row['rises']):+.3%})"
        lines.append(
            f"| {row['run']}, every {row['every']} | {row['part']} | {row['scheme']}, {row['quality']:g} "
            f"| {statistics.mean(row['bits'][1:]):.3f} | {rises} | {own:.2f}, {history:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure missing rows and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.fidelity.rotation", description=__doc__)
    parser.add_argument("--tier", choices=runs.TIERS, default="small", help="of the trained runs")
    parser.add_argument("--only", choices=_RUNS, action="append", help="a run")
    parser.add_argument("--work", type=Path, default=Path(".cache"), help="keeps trained runs and rows")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bench = Bench(chosen.tier, chosen.work, partial(print, file=sys.stderr, flush=True))
    machine = speed_figures.machine(chosen.work)
    found = Found(bench.kept / "rotation", machine=machine, again=False, report=bench.report)
    for run in chosen.only or _RUNS:
        measure(bench, found, run)
    print(table([row for run in chosen.only or _RUNS for row in found.rows(run)]))


if __name__ == "__main__":
    main()
