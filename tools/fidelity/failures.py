"""A run with failures: after each one training resumes from the last coarse version."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools import runs
from tools.fidelity.archives import DEFAULT, Setting, StoreArchive
from tools.fidelity.evaluation import Language, mean_loss
from tools.fidelity.rows import gpt_language
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, digest, load, save

#: Steps between two evaluations after a restore.
_LOOK = 5


@dataclass(frozen=True)
class Failure:
    """One failure.

    Attributes
    ----------
    step
        The last completed step.
    restored
        The step of the version that training resumed from.
    spike
        Largest rise of the evaluation loss in the first steps after the restore, relative to the loss of the run
        without interruptions at the same steps.
    own_spike
        The same relative to this run, resumed from the checkpoint itself.
    """

    step: int
    restored: int
    spike: float
    own_spike: float


@dataclass(frozen=True)
class Interrupted:
    """A run with failures.

    Attributes
    ----------
    failures
        In order.
    rise
        Rise of the final evaluation loss relative to the uninterrupted run's.
    """

    failures: list[Failure]
    rise: float


def measure(bench: Bench, setting: Setting = DEFAULT) -> Interrupted:
    """Train the GPT with evenly spaced failures, checkpointing into a store."""
    paths = bench.run("gpt")
    settings: Any = runs.settings("gpt", bench.name)
    language = gpt_language(bench)
    uninterrupted = {int(path.stem.removeprefix("step")): path for path in paths}
    count = bench.tier.failures
    steps = [round(number * settings.steps / (count + 1)) for number in range(1, count + 1)]
    segments = Segments(bench.kept / "segments", language)
    found = []
    done = dict(uninterrupted)
    with bench.scratch() as scratch:
        archive = StoreArchive(scratch / "store", setting)
        kept: list[int] = []
        for failure, until in zip(steps, [*steps[1:], settings.steps], strict=True):
            for step in sorted(done):
                if step <= failure and step not in kept:
                    archive.add(done[step])
                    kept.append(step)
            restored = archive.restore(len(kept) - 1)
            segment = segments.train(restored, kept[-1], until, bench.tier.steps)
            own, never = (
                course(language, load(files[kept[-1]]), kept[-1], bench.tier.steps) for files in (done, uninterrupted)
            )
            spikes = [max(loss / before[step] - 1 for step, loss in segment.losses.items()) for before in (never, own)]
            found.append(Failure(failure, kept[-1], *spikes))
            bench.report(f"failure after step {failure}: {found[-1]}")
            done = {step: path for step, path in done.items() if step <= failure} | segment.checkpoints
        final = language.loss(load(done[settings.steps])["model"])
    segments.forget_others()
    return Interrupted(found, final / language.loss(load(paths[-1])["model"]) - 1)


def course(language: Language, state: State, step: int, steps: int) -> dict[int, float]:
    """Return evaluation loss by step of a run resumed from a state, with the batches of its checkpoint's generator."""

    def compute() -> dict[str, float]:
        losses = {}
        batches = torch.Generator()
        batches.set_state(state["rng"])
        model, _, going = language.go_on(state, step, batches)
        for done in range(step + 1, min(step + steps, language.settings.steps) + 1):
            going()
            if (done - step) % _LOOK == 0:
                losses[str(done)] = mean_loss(model, language.held_out)
        return losses

    found = language.results.remember(
        compute, figure="course", **language.key, state=digest(state), step=step, steps=steps
    )
    return {int(done): loss for done, loss in found.items()}


@dataclass(frozen=True)
class Segment:
    """The training between two failures.

    Attributes
    ----------
    losses
        Evaluation loss by step, in the first steps.
    checkpoints
        Files by step, with that of the last step of the run.
    """

    losses: dict[int, float]
    checkpoints: dict[int, Path]


class Segments:
    """Segments in a directory, each named by its first state, so that none is trained twice.

    Parameters
    ----------
    directory
        Created if absent.
    language
        Trains and judges.
    """

    def __init__(self, directory: Path, language: Language) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.language = language
        self.used: set[str] = set()

    def train(self, state: State, step: int, until: int, watched: int) -> Segment:
        """Train from a state after `step` through step `until`; the first `watched` steps are judged."""
        name = f"{step}-{until}-{digest(state)[:16]}"
        self.used.add(name)
        target = self.directory / name
        if not target.exists():
            scratch = Path(tempfile.mkdtemp(dir=self.directory))
            self._train(state, step, until, scratch)
            losses = course(self.language, state, step, min(watched, until - step))
            (scratch / "losses.json").write_text(json.dumps(losses))
            scratch.rename(target)
        losses = {int(done): loss for done, loss in json.loads((target / "losses.json").read_text()).items()}
        return Segment(losses, {int(p.stem.removeprefix("step")): p for p in target.glob("step*.pt")})

    def _train(self, state: State, step: int, until: int, out: Path) -> None:
        settings = self.language.settings
        batches = torch.Generator()
        batches.set_state(state["rng"])
        model, optimizer, going = self.language.go_on(state, step, batches)
        for done in range(step + 1, until + 1):
            loss = going()
            if done % settings.every == 0:
                whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done, "loss": loss}
                save(state | whole | {"rng": batches.get_state()}, out / f"step{done:05d}.pt")

    def forget_others(self) -> None:
        """Remove the segments that were not requested."""
        for path in self.directory.iterdir():
            if path.name not in self.used:
                shutil.rmtree(path)
