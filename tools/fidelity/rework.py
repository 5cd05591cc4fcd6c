"""Rework: steps until training is back at the loss of the checkpoint that it was restored from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tools.fidelity.archives import DEFAULT, StoreArchive
from tools.fidelity.evaluation import evenly, mean
from tools.fidelity.partial import RunningCheckpoint, share_of
from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load

#: The share of the parameters that partial checkpoints hold in Chen et al.'s evaluation.
_TENTH = 0.1


@dataclass(frozen=True)
class Rework:
    """How a way to checkpoint comes back.

    Attributes
    ----------
    name
        Of the way.
    ratio
        Bytes of a whole checkpoint over those of a later one kept so.
    steps
        Until the loss is back, mean over versions and seeds.
    worst
        Of any version and seed; `most` where one was not back by then.
    most
        Where counting ended.
    at_once
        Rise of the evaluation loss right after the restore, as a part of it, mean over the versions.
    """

    name: str
    ratio: float
    steps: float
    worst: int
    most: int
    at_once: float


def measure(bench: Bench) -> list[Rework]:
    """The default, and SCAR and TOPN with as many bytes and with a tenth of the parameters, on the GPT."""
    paths = bench.run("gpt")
    tier = bench.tier
    points = evenly(len(paths), tier.points)
    language = gpt_language(bench)
    first = load(paths[0])

    def judge(name: str, nbytes: float, restored: Iterator[State]) -> Rework:
        """`restored` gives every version as it comes back; `nbytes` is what a later one takes."""
        counts, rises = [], []
        for index, state in enumerate(restored):
            if index not in points:
                continue
            exact = load(paths[index])
            goal = exact["model"]
            counts += [
                language.rework(state, exact["step"], goal, seed=seed, most=tier.rework) for seed in range(tier.seeds)
            ]
            rises.append(language.loss(state["model"]) / language.loss(goal) - 1)
        return Rework(name, paths[0].stat().st_size / nbytes, mean(counts), max(counts), tier.rework, mean(rises))

    with bench.scratch() as scratch:
        archive = StoreArchive(scratch / "store", DEFAULT)
        sizes = []
        for path in paths:
            before = archive.nbytes()
            archive.add(path)
            sizes.append(archive.nbytes() - before)
        later = mean(sizes[1:])
        found = [judge(str(DEFAULT), later, (archive.restore(index) for index in range(len(paths))))]
    ways: list[tuple[str, Callable[[RunningCheckpoint, State, float], int], bool]] = [
        ("SCAR", RunningCheckpoint.scar, False),
        ("TOPN", RunningCheckpoint.topn, True),
    ]
    for name, save, places in ways:
        for share in (share_of(later, first, places=places), _TENTH):
            nbytes = save(RunningCheckpoint(load(paths[0])), load(paths[1]), share)
            running = _running(bench, partial(save, share=share))
            found.append(judge(f"{name} {share:.1%}", nbytes, running))
    return found


def _running(bench: Bench, save: Callable[[RunningCheckpoint, State], int]) -> Iterator[State]:
    first, *others = bench.run("gpt")
    checkpoint = RunningCheckpoint(load(first))
    yield checkpoint.state
    for path in others:
        save(checkpoint, load(path))
        yield checkpoint.state
