"""The figures of runs kept with schemes: one row per run and setting."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import runs
from tools.fidelity import archives
from tools.fidelity.archives import EXACT, Archive, RoundedArchive, Setting, StoreArchive, Stored
from tools.fidelity.evaluation import Digits, Language, evenly, held_out_prose, held_out_sources, mean
from tools.fidelity.excp import REVISION, ExcpArchive
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, digest, load, weights_only

#: Figures by name, of one restored version.
Figures = dict[str, float]

#: Returns the figures of a restored version, given its index; none for a version that is not evaluated.
Judge = Callable[[int, State], Figures]


@dataclass
class Row:
    """A run kept in one way.

    Attributes
    ----------
    run
        The run and its part: `gpt`, `weights`, `cnn`, `finetune`, `finetune weights` or `bf16`.
    stored
        Its sizes and times.
    exact
        The sizes and times of the exact run, measured in turns with the default and right before the others; None for
        baselines.
    figures
        By name, one per evaluated version. `at once`, `resumed` and `loss` are the relative rise of the evaluation
        loss; `accuracy lost` is in parts of 1; `gain lost` is the lost part of a fine-tune's gain in evaluation loss.
    """

    run: str
    stored: Stored
    exact: Stored | None
    figures: dict[str, list[float]] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        """How it is kept."""
        return self.stored.setting

    def mean(self, figure: str) -> float:
        """Return the mean over the evaluated versions."""
        return mean(self.figures[figure])

    def worst(self, figure: str) -> float:
        """Return the largest value of the evaluated versions."""
        return max(self.figures[figure])

    def to_json(self) -> dict[str, Any]:
        """Return the row as containers of plain values."""
        stored = self.stored
        return {
            "run": self.run, "scheme": self.setting.scheme, "quality": self.setting.quality,
            "original": stored.original, "total": stored.total, "ratio": stored.ratio,
            "delta_ratio": stored.delta_ratio, "added": stored.added, "bases": stored.bases, "ledger": stored.ledger,
            "ingest": vars(stored.ingest), "restore": vars(stored.restore),
            "figures": self.figures,
        }  # fmt: skip


def gpt(bench: Bench) -> Iterable[Row]:
    """Measure the GPT's whole checkpoints: weights and both moments."""
    paths = bench.run("gpt")
    judge = _resuming(bench, paths)
    yield from _rows(bench, "gpt", paths, judge)
    yield _alone("gpt", RoundedArchive(), paths, judge)


def weights(bench: Bench) -> Iterable[Row]:
    """Measure the GPT's weights alone; training resumes with the exact moments."""
    paths = bench.run("gpt")
    kept = weights_only(paths, bench.kept / "weights" / "gpt")
    yield from _rows(bench, "weights", kept, _resuming(bench, paths))


def cnn(bench: Bench) -> Iterable[Row]:
    """Measure the weights of a CNN after each epoch of SGD with momentum."""
    paths = weights_only(bench.run("cnn"), bench.kept / "weights" / "cnn")
    settings: Any = runs.settings("cnn", bench.name)
    digits = Digits(settings, bench.results)

    def judge(index: int, state: State) -> Figures:
        accuracy, loss = digits.judge(state["model"])
        exact_accuracy, exact_loss = digits.judge(load(paths[index])["model"])
        return {"accuracy lost": exact_accuracy - accuracy, "loss": loss / exact_loss - 1}

    yield from _rows(bench, "cnn", paths, judge)


def finetune(bench: Bench) -> Iterable[Row]:
    """Measure a fine-tune of the GPT on prose, at every version: with moments, and weights alone."""
    paths = bench.run("finetune")
    settings: Any = runs.settings("finetune", bench.name)
    before = load(paths[0])
    held_out = held_out_prose(settings, before["rng"], bench.tier.windows)
    language = Language(settings, held_out.flatten(), held_out, bench.results)
    start = language.loss(before["model"])

    def judge(index: int, state: State) -> Figures:
        if index == 0:
            return {}
        reached = language.loss(load(paths[index])["model"])
        return {"gain lost": (language.loss(state["model"]) - reached) / (start - reached)}

    yield from _rows(bench, "finetune", paths, judge)
    yield from _rows(bench, "finetune weights", weights_only(paths, bench.kept / "weights" / "finetune"), judge)


def bf16(bench: Bench) -> Iterable[Row]:
    """Measure the GPT's weights as bfloat16."""
    paths = bench.run("bf16")
    language = gpt_language(bench)
    points = evenly(len(paths), bench.tier.points)

    def judge(index: int, state: State) -> Figures:
        if index not in points:
            return {}
        return {"at once": language.loss(state["model"]) / language.loss(load(paths[index])["model"]) - 1}

    yield from _rows(bench, "bf16", paths, judge)


def excp(bench: Bench) -> Iterable[Row]:
    """Measure the GPT's checkpoints with ExCP."""
    paths = bench.run("gpt")
    made_of = digest([REVISION, paths[0].with_name("run.json").read_text()])[:16]
    yield _alone("gpt", ExcpArchive(bench.kept / "excp" / made_of), paths, _resuming(bench, paths))


def gpt_language(bench: Bench, windows: int | None = None) -> Language:
    """Return the judge of the GPT's states, by the tier's number of windows unless another is given."""
    import torch

    from tools import models

    settings: Any = runs.settings("gpt", bench.name)
    return Language(
        settings, torch.cat(models.sources()), held_out_sources(settings, windows or bench.tier.windows), bench.results
    )


def _resuming(bench: Bench, paths: list[Path]) -> Judge:
    """Return a judge of versions of the GPT, at once and after resuming, against their exact states."""
    language = gpt_language(bench)
    tier = bench.tier
    points = evenly(len(paths), tier.points)

    def judge(index: int, state: State) -> Figures:
        if index not in points:
            return {}
        exact = load(paths[index])
        restored = state if "optimizer" in state else exact | {"model": state["model"]}
        rises = []
        for seed in range(tier.seeds):
            losses = [language.resumed(each, exact["step"], seed=seed, steps=tier.steps) for each in (restored, exact)]
            rises.append(losses[0] / losses[1] - 1)
        at_once = language.loss(restored["model"]) / language.loss(exact["model"]) - 1
        return {"at once": at_once, "resumed": mean(rises)}

    return judge


def _rows(bench: Bench, run: str, paths: list[Path], judge: Judge) -> Iterable[Row]:
    """Yield the run kept exactly and with the default in turns, then with every other setting."""
    first, *others = bench.settings
    with bench.scratch() as scratch:
        # Compilation at the first call is not measured.
        _measure(_stores(scratch, [EXACT, first]), paths[:2], lambda index, state: {})
        (exact, kept), figures = _measure(_stores(scratch, [EXACT, first]), paths, judge)
        yield Row(run, exact, exact, figures[0])
        yield Row(run, kept, exact, figures[1])
        for setting in others:
            (kept,), figures = _measure(_stores(scratch, [setting]), paths, judge)
            yield Row(run, kept, exact, figures[0])


def _alone(run: str, archive: Archive, paths: list[Path], judge: Judge) -> Row:
    """Return the row of a baseline without times: it may reuse earlier files."""
    (stored,), (figures,) = _measure([archive], paths, judge)
    return Row(run, stored, None, figures)


def _stores(scratch: Path, settings: list[Setting]) -> list[Archive]:
    return [StoreArchive(Path(tempfile.mkdtemp(dir=scratch)) / "store", setting) for setting in settings]


def _measure(kept: list[Archive], paths: list[Path], judge: Judge) -> tuple[list[Stored], list[dict[str, list[float]]]]:
    """Return the sizes of archives, and the figures of their restored versions."""
    figures: list[dict[str, list[float]]] = [{} for _ in kept]

    def seen(number: int, index: int, state: State) -> None:
        if kept[number].setting == EXACT and digest(state) != digest(load(paths[index])):
            raise AssertionError(f"{paths[index]} is not restored exactly")
        for figure, value in judge(index, state).items():
            figures[number].setdefault(figure, []).append(value)

    stored = archives.measure(kept, paths, seen)
    for archive in kept:
        archive.remove()
    return stored, figures
