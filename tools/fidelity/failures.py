"""A short GPT's training with failures: after each one it resumes from the last version kept with a scheme."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tools import models, training
from tools.fidelity import archives
from tools.fidelity.archives import EXACT, Setting
from tools.fidelity.evaluation import Language, held_out_sources
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, save
from tools.fidelity.whole import SEARCHED, WINDOWS, archive_of
from tools.training import TextSettings

#: Small and steep: its loss falls until its end, and a run with failures takes half a minute of one core.
SETTINGS = TextSettings(width=256, layers=2, heads=4, context=32, batch=4, steps=200, every=10, rate=3e-4)

#: Failures of a run; seeds of the initial weights and of the failures' steps.
COUNTS, SEEDS = (10, 20), 3

#: The part of a version that a restore takes; the rest of the state is exact.
Part = Callable[[State, State], State]

PARTS: dict[str, Part] = {
    "all": lambda exact, restored: restored,
    "weights": lambda exact, restored: exact | {"model": restored["model"]},
    "moments": lambda exact, restored: restored | {"model": exact["model"]},
}

_QUALITY = archives.DEFAULT_QUALITY

#: Schemes and parts of the rows.
WAYS = [
    (EXACT, "all"), (archives.DEFAULT, "all"), *((Setting("lc", _QUALITY), part) for part in PARTS),
    (Setting("dynaquant", _QUALITY), "all"), (SEARCHED, "all"),
]  # fmt: skip


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for every scheme, part, number of failures and seed: the rise of the final loss."""
    with bench.scratch() as scratch:
        run = functools.cache(partial(trained, scratch))
        for seed in range(SEEDS):
            for setting, part in WAYS:
                for count in COUNTS:
                    name = f"{setting}, {part}, {count}, seed {seed}"
                    found.row("failures", name, partial(row, bench, run, setting, part, count, seed))


def trained(directory: Path, seed: int) -> list[Path]:
    """Train the run without failures from the initial weights of a seed; return its checkpoints."""
    out = directory / f"run-{seed}"
    out.mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        training.gpt(SETTINGS, out, lambda line: None)
    return sorted(out.iterdir())


def row(
    bench: Bench, run: Callable[[int], list[Path]], setting: Setting, part: str, count: int, seed: int
) -> dict[str, Any]:
    """Train with failures after random steps; exact versions lead to the run without them, bit for bit."""
    paths = run(seed)
    language = Language(SETTINGS, torch.cat(models.sources()), held_out_sources(SETTINGS, WINDOWS))
    failures = sorted(random.Random(seed).sample(range(SETTINGS.every, SETTINGS.steps), count))
    done = {int(path.stem.removeprefix("step")): path for path in paths}

    def degradation(path: Path, state: State) -> float:
        return language.loss(state["model"]) / language.loss(load(path)["model"]) - 1

    with bench.scratch() as scratch:
        archive = archive_of(setting, scratch / "store", degradation)
        kept, sizes = 0, [archive.nbytes()]
        for failure, until in zip(failures, [*failures[1:], SETTINGS.steps], strict=True):
            for step in sorted(step for step in done if kept < step <= failure):
                archive.add(done[step])
                sizes.append(archive.nbytes())
                kept = step
            state = PARTS[part](load(done[kept]), archive.restore(kept // SETTINGS.every - 1))
            batches = torch.Generator()
            batches.set_state(state["rng"])
            model, optimizer, going = language.go_on(state, kept, batches)
            for step in range(kept + 1, until + 1):
                loss = going()
                if step % SETTINGS.every == 0:
                    done[step] = scratch / f"step{step:05d}.pt"
                    now = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    save(state | now | {"loss": loss, "rng": batches.get_state()}, done[step])
        archive.remove()
        rise = language.loss(model.state_dict()) / language.loss(load(paths[-1])["model"]) - 1
    bench.report(f"{setting}, {part}: {count} failures: {rise:+.2%}")
    return {
        "scheme": str(setting), "part": part, "count": count, "seed": seed, "failures": failures, "rise": rise,
        "file": paths[-1].stat().st_size, "added": [after - before for before, after in pairwise(sizes)],
    }  # fmt: skip
