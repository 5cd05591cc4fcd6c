"""The sizes of a whole run by every scheme, and the losses of its versions: the figures of `docs/schemes.md`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckstore.policy import QUALITY, Policy
from ckstore.writing.tuning import Search
from tools import models, runs
from tools.fidelity import archives
from tools.fidelity.archives import Archive, Setting, StoreArchive
from tools.fidelity.baselines import BASELINES, BaselineArchive
from tools.fidelity.evaluation import Digits, Language, held_out_prose, held_out_sources, rework
from tools.fidelity.excp import ExcpArchive
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, weights_only

#: The tolerated loss of each version in a search: Inshrinkerator's default.
TOLERANCE = 0.05

SEARCHED = Setting("dynaquant, searched")

#: Windows of text that judge a version, and searches.
WINDOWS = 128

#: The relative degradation of weights against the checkpoint's.
Degradation = Callable[[Path, State], float]


class SearchedArchive(StoreArchive):
    """A store whose versions have the setting of a search for each.

    Parameters
    ----------
    directory
        Of the store.
    degradation
        The degradation that the search limits.
    gradients
        Directory of files with the gradients of each checkpoint, under the same names; if available.
    """

    def __init__(self, directory: Path, degradation: Degradation, gradients: Path | None = None) -> None:
        super().__init__(directory, Setting("dynaquant"))
        self.setting = SEARCHED
        self._degradation = degradation
        self._gradients = gradients

    def add(self, path: Path) -> bool:
        """Ingest a file with a search."""

        def evaluate(candidate: Path) -> float:
            return 1 + self._degradation(path, load(candidate))

        gradients = None if self._gradients is None else torch.load(self._gradients / path.name, weights_only=True)
        return self.store.ingest(
            path,
            run="run",
            hot=0,
            gradients=gradients,
            policy=Policy("coarse", scheme="dynaquant"),
            search=Search(evaluate, TOLERANCE),
        ).version.base


def measure(bench: Bench, found: Found, run: str) -> None:
    """Measure a row for every way to keep the weights of a run, and the whole checkpoints of a run."""
    paths = bench.run(run)
    degradation, worth = judge(bench, run, paths)
    files = {"weights": weights_only(paths, bench.kept / "weights" / run), "whole": paths}

    existing = paths[0].parent / "gradients"
    gradients = existing if existing.exists() else None

    def row(part: str, setting: Setting) -> dict[str, Any]:
        lost: list[float] = []

        def seen(index: int, state: State) -> None:
            lost.append(degradation(files[part][index], state))

        with bench.scratch() as scratch:
            archive = archive_of(setting, scratch / "store", degradation, gradients)
            stored = archives.measure(archive, files[part], seen)
            kinds = archive.kinds() if isinstance(archive, StoreArchive) else {}
            archive.remove()
        bench.report(
            f"{stored.ratio:.1f}x, peak {stored.original / len(paths) / max(1, min(stored.added)):.0f}x, "
            f"lost {max(lost):+.2%} at most, {statistics.mean(lost):+.2%} on average"
        )
        return {
            "run": run, "part": part, "scheme": str(archive.setting), "original": stored.original,
            "total": stored.total, "added": stored.added, "lost": lost, "rework": worth(lost), "kinds": kinds,
        }  # fmt: skip

    both = (Setting("lc", QUALITY), archives.DEFAULT, Setting("dynaquant", QUALITY), SEARCHED)
    ways = {
        "weights": [*both, Setting("lc", 2.5), *map(Setting, BASELINES)],  # 2 bits
        "whole": [*both, ExcpArchive.setting],
    }
    for part, settings in ways.items():
        for setting in settings:
            found.row(run, f"{part}, {setting}", partial(row, part, setting))


def judge(bench: Bench, run: str, paths: list[Path]) -> tuple[Degradation, Callable[[list[float]], float | None]]:
    """Return the degradation of weights against a checkpoint's: by accuracy of digits, else by the loss of text.

    Also return a function from those of all versions to their rework; None for digits, which have reached a plateau.
    """
    exact = {path.name: path for path in paths}
    if run == "cnn":
        settings = runs.image_settings(bench.name)
        digits = Digits(settings)

        def by_accuracy(path: Path, state: State) -> float:
            reference = digits.accuracy(load(exact[path.name])["model"])
            return (reference - digits.accuracy(state["model"])) / reference

        return by_accuracy, lambda lost: None
    language = gpt_language(bench, WINDOWS) if run == "gpt" else prose_language(bench, paths, WINDOWS)

    def by_loss(path: Path, state: State) -> float:
        return language.loss(state["model"]) / language.loss(load(exact[path.name])["model"]) - 1

    def worth(lost: list[float]) -> float | None:
        losses = [language.loss(load(path)["model"]) for path in paths]
        nats = {index: each * losses[index] for index, each in enumerate(lost)}
        return rework(nats, losses, [load(path)["step"] for path in paths])

    return by_loss, worth


def gpt_language(bench: Bench, windows: int) -> Language:
    """Return the judge of the GPT's states by that many held-out windows."""
    settings = runs.text_settings("gpt", bench.name)
    return Language(settings, torch.cat(models.sources()), held_out_sources(settings, windows))


def prose_language(bench: Bench, paths: list[Path], windows: int) -> Language:
    """Return the judge of the fine-tune's states by up to that many held-out windows."""
    settings = runs.text_settings("finetune", bench.name)
    held_out = held_out_prose(settings, load(paths[0])["rng"], windows)
    return Language(settings, held_out.flatten(), held_out)


def archive_of(setting: Setting, directory: Path, degradation: Degradation, gradients: Path | None = None) -> Archive:
    """Return an archive of a setting; `directory` is of its store or files, and the rest is for searches."""
    if setting == ExcpArchive.setting:
        return ExcpArchive(directory)
    if setting == SEARCHED:
        return SearchedArchive(directory, degradation, gradients)
    if setting.scheme in BASELINES:
        return BaselineArchive(setting.scheme, degradation, TOLERANCE)
    return StoreArchive(directory, setting)
