"""Coarse versions by ckstore's own lattices: ratios, and the loss after training resumes from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tools.fidelity import archives
from tools.fidelity.archives import DEFAULT_QUALITY, Setting, StoreArchive
from tools.fidelity.evaluation import evenly, rework
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, weights_only
from tools.fidelity.whole import gpt_language, prose_language

#: Runs, their parts and qualities: the rows of the table. The moments are *dropped*: training resumes without any.
CHOSEN = [
    ("gpt", "all", DEFAULT_QUALITY), ("gpt", "all", 2.8), ("gpt", "all", 5.0), ("gpt", "all", 10.0),
    ("gpt", "weights", 2.0), ("gpt", "weights", 2.8),
    ("gpt", "dropped", DEFAULT_QUALITY),
    ("finetune", "all", DEFAULT_QUALITY), ("finetune", "weights", DEFAULT_QUALITY),
]  # fmt: skip

#: Evenly spaced versions of the GPT, seeds and steps of resumed training, and held-out windows.
_POINTS, _SEEDS, _STEPS, _WINDOWS = 3, 3, 20, 256


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for each run, part and quality: sizes, rises of the evaluation loss, and their worth in steps."""
    judges = {"gpt": _resumed, "finetune": _gain_lost}
    for run in judges:
        judge = judges[run](bench)
        for part, quality in ((part, quality) for name, part, quality in CHOSEN if name == run):
            found.row("coarse", f"{run}, {part}, {quality:g}", partial(_row, bench, run, part, quality, judge))


def _row(bench: Bench, run: str, part: str, quality: float, judge: _Judge) -> dict[str, Any]:
    paths = bench.run(run)
    files = paths if part == "all" else weights_only(paths, bench.kept / "weights" / run)
    rises: list[float] = []
    nats: dict[int, float] = {}

    def seen(index: int, state: State) -> None:
        if part == "dropped":
            state |= {"optimizer": load(paths[index])["optimizer"] | {"state": {}}}
        if index in judge.points:
            rise, nats[index] = judge.rise(index, state)
            rises.append(rise)

    with bench.scratch() as scratch:
        archive = StoreArchive(scratch / "store", Setting("lattice", quality))
        stored = archives.measure(archive, files, seen)
        archive.remove()
    worth = rework(nats, judge.losses(), [load(path)["step"] for path in paths])
    bench.report(f"{stored.ratio:.1f}x, {statistics.mean(rises):+.3%}, worst version {max(rises):+.3%}, {worth} steps")
    return {
        "run": run, "part": part, "quality": quality, "ratio": stored.ratio, "later": stored.delta_ratio,
        "rises": rises, "rework": worth,
    }  # fmt: skip


@dataclass(frozen=True)
class _Judge:
    """Judges versions of a run.

    Attributes
    ----------
    points
        Numbers of the versions that are judged.
    rise
        Function from the number and the restored state of a version to its rise, and that in nats per byte.
    losses
        Function that returns the losses of all exact versions.
    """

    points: Sequence[int]
    rise: Callable[[int, State], tuple[float, float]]
    losses: Callable[[], list[float]]


def _resumed(bench: Bench) -> _Judge:
    """Return a judge of versions of the GPT: the rise of the loss after resuming, against their exact states."""
    paths = bench.run("gpt")
    language = gpt_language(bench, _WINDOWS)
    points = evenly(len(paths), _POINTS)

    def rise(index: int, state: State) -> tuple[float, float]:
        exact = load(paths[index])
        restored = state if "optimizer" in state else exact | {"model": state["model"]}
        losses = [
            [language.resumed(each, exact["step"], seed=seed, steps=_STEPS) for each in (restored, exact)]
            for seed in range(_SEEDS)
        ]
        nats = statistics.mean(coarse - same for coarse, same in losses)
        return statistics.mean(coarse / same - 1 for coarse, same in losses), nats

    return _Judge(points, rise, lambda: [language.loss(load(path)["model"]) for path in paths])


def _gain_lost(bench: Bench) -> _Judge:
    """Return a judge of versions of the fine-tune: the lost part of their gain in evaluation loss."""
    paths = bench.run("finetune")
    language = prose_language(bench, paths, _WINDOWS)
    start = language.loss(load(paths[0])["model"])

    def rise(index: int, state: State) -> tuple[float, float]:
        reached = language.loss(load(paths[index])["model"])
        nats = language.loss(state["model"]) - reached
        return nats / (start - reached), nats

    return _Judge(range(1, len(paths)), rise, lambda: [language.loss(load(path)["model"]) for path in paths])
