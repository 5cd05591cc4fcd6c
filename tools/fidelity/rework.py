"""Rework: steps until training is back at the loss of the restored checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.fidelity.archives import DEFAULT, DEFAULT_QUALITY, Archive, Setting, StoreArchive
from tools.fidelity.baselines import BASELINES, BaselineArchive
from tools.fidelity.evaluation import evenly, mean
from tools.fidelity.excp import ExcpArchive
from tools.fidelity.found import Found
from tools.fidelity.partial import RunningCheckpoint, share_of
from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, weights_only
from tools.fidelity.whole import SEARCHED, TOLERANCE, SearchedArchive
from tools.fidelity.whole import judge as judge_of

#: Partial checkpoints: the function that writes one, and whether it writes the places of the elements.
_PARTIAL: list[tuple[str, Callable[[RunningCheckpoint, State, float], int], bool]] = [
    ("SCAR", RunningCheckpoint.scar, False),
    ("TOPN", RunningCheckpoint.topn, True),
]

#: Of `compare`: the stretch's first version, its restored versions, seeds, and the limit of counts.
_FIRST, _COMPARED, _SEEDS, _MOST = 4, (5, 10), 3, 40

#: The share of the parameters in partial checkpoints of Chen et al.'s evaluation.
_TENTH = 0.1


@dataclass(frozen=True)
class Rework:
    """The recovery with a way to checkpoint.

    Attributes
    ----------
    name
        Of the way.
    ratio
        Bytes of a whole checkpoint over those of a later one kept this way.
    steps
        Until the loss is back, mean over versions and seeds.
    worst
        Of any version and seed; `most` if one was not back by then.
    most
        The limit of counts.
    at_once
        Relative rise of the evaluation loss right after the restore, mean over the versions.
    """

    name: str
    ratio: float
    steps: float
    worst: int
    most: int
    at_once: float


def measure(bench: Bench) -> list[Rework]:
    """Measure the default, and SCAR and TOPN with as many bytes and with a tenth of the parameters, on the GPT."""
    paths = bench.run("gpt")
    tier = bench.tier
    points = evenly(len(paths), tier.points)
    language = gpt_language(bench)
    first = load(paths[0])

    def judge(name: str, nbytes: float, restored: Iterator[State]) -> Rework:
        """Judge a way by `restored`, which yields every restored version; `nbytes` is the size of a later one."""
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
    for name, save, places in _PARTIAL:
        for share in (share_of(later, first, places=places), _TENTH):
            nbytes = save(RunningCheckpoint(load(paths[0])), load(paths[1]), share)
            running = _running(bench, partial(save, share=share))
            found.append(judge(f"{name} {share:.1%}", nbytes, running))
    return found


def compare(bench: Bench, found: Found) -> None:
    """Measure a row for every scheme, SCAR and TOPN, on a stretch of the GPT: steps until its loss is back."""
    paths = bench.run("gpt")[_FIRST:]
    language = gpt_language(bench)
    degradation = judge_of(bench, "gpt", paths)
    first = load(paths[0])

    def row(make: Callable[[Path], Iterator[tuple[State, int]]], of: Path = paths[0]) -> dict[str, Any]:
        """Return a row; `of` is a file of the kept part."""
        counts, rises, sizes = [], [], []
        with bench.scratch() as scratch:
            for path, (state, nbytes) in zip(paths[: max(_COMPARED) + 1], make(scratch / "store"), strict=False):
                sizes.append(nbytes)
                if len(sizes) - 1 in _COMPARED:
                    exact = load(path)
                    restored = exact | {"model": state["model"]} | {"optimizer": state["optimizer"]}
                    counts += [
                        language.rework(restored, exact["step"], exact["model"], seed=seed, most=_MOST)
                        for seed in range(_SEEDS)
                    ]
                    rises.append(language.loss(state["model"]) / language.loss(exact["model"]) - 1)
        later = mean(sizes[1:])
        bench.report(f"{mean(counts):.2f} steps, {later:,.0f} bytes a later version")
        return {"counts": counts, "rises": rises, "later": later, "most": _MOST, "bytes": of.stat().st_size}

    def kept(make: Callable[[Path], Archive]) -> Callable[[Path], Iterator[tuple[State, int]]]:
        def versions(directory: Path) -> Iterator[tuple[State, int]]:
            archive = make(directory)
            for index, path in enumerate(paths):
                before = archive.nbytes()
                archive.add(path)
                yield archive.restore(index), archive.nbytes() - before

        return versions

    ways = {
        str(setting): kept(lambda directory, setting=setting: StoreArchive(directory, setting))  # type: ignore[misc]
        for setting in (DEFAULT, Setting("lc", DEFAULT_QUALITY), Setting("dynaquant", DEFAULT_QUALITY))
    }
    for name, make in ways.items():
        found.row("rework", name, partial(row, make))
    lc = next(row["later"] for row in found.rows("rework") if row["name"].startswith("lc"))
    for name, save, places in _PARTIAL:
        for size, share in (("a tenth", _TENTH), ("LC's bytes", share_of(lc, first, places=places))):
            found.row("rework", f"{name}, {size}", partial(row, partial(_partial, paths, save, share)))
    (weights,) = weights_only(paths[:1], bench.kept / "weights" / "gpt")
    for name in BASELINES:
        make = kept(lambda directory, name=name: BaselineArchive(name, degradation, TOLERANCE))  # type: ignore[misc]
        found.row("rework", name, partial(row, make, weights))
    found.row("rework", str(SEARCHED), partial(row, kept(lambda directory: SearchedArchive(directory, degradation))))
    found.row("rework", "excp", partial(row, kept(ExcpArchive)))


def _partial(
    paths: list[Path], save: Callable[[RunningCheckpoint, State, float], int], share: float, directory: Path
) -> Iterator[tuple[State, int]]:
    checkpoint = RunningCheckpoint(load(paths[0]))
    yield checkpoint.state, paths[0].stat().st_size
    for path in paths[1:]:
        nbytes = save(checkpoint, load(path), share)
        yield checkpoint.state, nbytes


def _running(bench: Bench, save: Callable[[RunningCheckpoint, State], int]) -> Iterator[State]:
    first, *others = bench.run("gpt")
    checkpoint = RunningCheckpoint(load(first))
    yield checkpoint.state
    for path in others:
        save(checkpoint, load(path))
        yield checkpoint.state
