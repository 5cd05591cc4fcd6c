"""Rework: steps until training is back at the loss of the restored checkpoint."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tools.fidelity.archives import DEFAULT, DEFAULT_QUALITY, Setting
from tools.fidelity.baselines import BASELINES
from tools.fidelity.excp import ExcpArchive
from tools.fidelity.found import Found
from tools.fidelity.partial import RunningCheckpoint, share_of
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, weights_only
from tools.fidelity.whole import SEARCHED, archive_of, gpt_language, judge

#: Partial checkpoints: the function that writes one, and whether it writes the places of the elements.
_PARTIAL: list[tuple[str, Callable[[RunningCheckpoint, State, float], int], bool]] = [
    ("SCAR", RunningCheckpoint.scar, False),
    ("TOPN", RunningCheckpoint.topn, True),
]

#: The stretch's first version, its restored versions, seeds, and the limit of counts.
_FIRST, _COMPARED, _SEEDS, _MOST = 4, (5, 10), 3, 40

#: Held-out windows.
_WINDOWS = 256

#: The share of the parameters in partial checkpoints of Chen et al.'s evaluation.
_TENTH = 0.1


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for every scheme, SCAR and TOPN, on a stretch of the GPT: steps until its loss is back."""
    paths = bench.run("gpt")[_FIRST:]
    language = gpt_language(bench, _WINDOWS)
    degradation = judge(bench, "gpt", paths)
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
        later = statistics.mean(sizes[1:])
        bench.report(f"{statistics.mean(counts):.2f} steps, {later:,.0f} bytes a later version")
        return {"counts": counts, "rises": rises, "later": later, "most": _MOST, "bytes": of.stat().st_size}

    def by(setting: Setting) -> Callable[[Path], Iterator[tuple[State, int]]]:
        def versions(directory: Path) -> Iterator[tuple[State, int]]:
            archive = archive_of(setting, directory, degradation)
            for index, path in enumerate(paths):
                before = archive.nbytes()
                archive.add(path)
                yield archive.restore(index), archive.nbytes() - before

        return versions

    for setting in (DEFAULT, Setting("lc", DEFAULT_QUALITY), Setting("dynaquant", DEFAULT_QUALITY), SEARCHED):
        found.row("rework", str(setting), partial(row, by(setting)))
    lc = next(row["later"] for row in found.rows("rework") if row["name"].startswith("lc"))
    for name, save, places in _PARTIAL:
        for size, share in (("a tenth", _TENTH), ("LC's bytes", share_of(lc, first, places=places))):
            found.row("rework", f"{name}, {size}", partial(row, partial(_partial, paths, save, share)))
    (weights,) = weights_only(paths[:1], bench.kept / "weights" / "gpt")
    for name in BASELINES:
        found.row("rework", name, partial(row, by(Setting(name)), weights))
    found.row("rework", "excp", partial(row, by(ExcpArchive.setting)))


def _partial(
    paths: list[Path], save: Callable[[RunningCheckpoint, State, float], int], share: float, directory: Path
) -> Iterator[tuple[State, int]]:
    checkpoint = RunningCheckpoint(load(paths[0]))
    yield checkpoint.state, paths[0].stat().st_size
    for path in paths[1:]:
        nbytes = save(checkpoint, load(path), share)
        yield checkpoint.state, nbytes
