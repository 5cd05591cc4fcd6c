"""The GPT's training with failures: after each one it resumes from the last version kept with a scheme."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.fidelity import archives
from tools.fidelity.archives import Setting
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, save
from tools.fidelity.whole import SEARCHED, WINDOWS, archive_of, gpt_language

#: Failures of a run, and seeds of their steps.
COUNTS, SEEDS = (10, 20), 3


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for every scheme, number of failures and seed: the rise of the final loss."""
    quality = archives.DEFAULT_QUALITY
    for seed in range(SEEDS):
        for setting in (archives.DEFAULT, Setting("lc", quality), Setting("dynaquant", quality), SEARCHED):
            for count in COUNTS:
                found.row("failures", f"{setting}, {count}, seed {seed}", partial(row, bench, setting, count, seed))


def row(bench: Bench, setting: Setting, count: int, seed: int) -> dict[str, Any]:
    """Train with failures after random steps; exact versions lead to the run without them, bit for bit."""
    paths = bench.run("gpt")
    language = gpt_language(bench, WINDOWS)
    settings = language.settings
    failures = sorted(random.Random(seed).sample(range(settings.every, settings.steps), count))
    done = {int(path.stem.removeprefix("step")): path for path in paths}

    def degradation(path: Path, state: State) -> float:
        return language.loss(state["model"]) / language.loss(load(path)["model"]) - 1

    with bench.scratch() as scratch:
        archive = archive_of(setting, scratch / "store", degradation)
        kept = 0
        for failure, until in zip(failures, [*failures[1:], settings.steps], strict=True):
            for step in sorted(step for step in done if kept < step <= failure):
                archive.add(done[step])
                kept = step
            state = archive.restore(kept // settings.every - 1)
            batches = torch.Generator()
            batches.set_state(state["rng"])
            model, optimizer, going = language.go_on(state, kept, batches)
            for step in range(kept + 1, until + 1):
                loss = going()
                if step % settings.every == 0:
                    done[step] = scratch / f"step{step:05d}.pt"
                    trained = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    save(state | trained | {"loss": loss, "rng": batches.get_state()}, done[step])
        archive.remove()
        rise = language.loss(model.state_dict()) / language.loss(load(paths[-1])["model"]) - 1
    bench.report(f"{setting}: {count} failures: {rise:+.2%}")
    return {"scheme": str(setting), "count": count, "seed": seed, "failures": failures, "rise": rise}
