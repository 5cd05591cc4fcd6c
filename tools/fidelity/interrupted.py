"""A run of SGD with evenly spaced failures, each restored from a version kept with a scheme."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ckstore import GradientAccumulator
from tools import models
from tools.fidelity import archives
from tools.fidelity.archives import EXACT, Setting
from tools.fidelity.baselines import BASELINES
from tools.fidelity.evaluation import Digits
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, load, save
from tools.fidelity.whole import SEARCHED, archive_of
from tools.training import ImageSettings

#: Evenly spaced failures of a run.
COUNTS = (0, 10, 20)

#: Runs with different initial weights and batches.
SEEDS = 3

#: Small enough for a run with every scheme, number of failures and seed.
SETTINGS = ImageSettings((32, 64, 128), 1, epochs=40)


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for every scheme, number of failures and seed: accuracy and loss at the end."""
    ways = [EXACT, archives.DEFAULT, Setting("lc", archives.DEFAULT_QUALITY), *map(Setting, BASELINES), SEARCHED]
    for seed in range(SEEDS):
        for setting in ways:
            for count in COUNTS[:1] if setting == EXACT else COUNTS[1:]:
                name = f"{setting}, {count}, seed {seed}"
                found.row("interrupted", name, partial(_row, bench, setting, count, seed))


def _row(bench: Bench, setting: Setting, count: int, seed: int) -> dict[str, Any]:
    with bench.scratch() as scratch:
        accuracy, loss, added = _run(bench, setting, count, seed, scratch)
    bench.report(f"{setting}: {count} failures: accuracy {accuracy:.4f}, loss {loss:.4f}")
    return {
        "scheme": str(setting), "count": count, "seed": seed, "accuracy": accuracy, "loss": loss, "added": added,
        "after": sorted(_failures(count)),
    }  # fmt: skip


def _failures(count: int) -> set[int]:
    """Return the epochs after which training fails."""
    return {round(number * SETTINGS.epochs / (count + 1)) for number in range(1, count + 1)}


def _run(bench: Bench, setting: Setting, count: int, seed: int, scratch: Path) -> tuple[float, float, list[int]]:
    """Return accuracy and loss after all epochs, and bytes of each version; training resumes from it after failures."""
    settings, digits = SETTINGS, Digits(SETTINGS)
    failures = _failures(count)
    images, classes = models.digits()
    train = len(images) - models.HELD_OUT_DIGITS
    batches = train // settings.batch
    (scratch / "gradients").mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.CNN(settings.widths, settings.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate, momentum=0.9, weight_decay=5e-4)
    accumulator = GradientAccumulator({"model": model}, every=batches)
    generator = torch.Generator().manual_seed(100 + seed)

    def degradation(path: Path, state: State) -> float:
        reference = digits.judge(load(path)["model"])[0]
        return (reference - digits.judge(state["model"])[0]) / reference

    added: list[int] = []
    archive = None if setting == EXACT else archive_of(setting, scratch / "store", degradation, scratch / "gradients")
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(train, generator=generator)
        model.train()
        for index in range(batches):
            chosen = order[index * settings.batch : (index + 1) * settings.batch]
            progress = (epoch - 1 + index / batches) / settings.epochs
            optimizer.param_groups[0]["lr"] = settings.rate * 0.5 * (1 + math.cos(math.pi * progress))
            torch.autograd.backward(functional.cross_entropy(model(images[chosen]), classes[chosen]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            accumulator.after_backward((epoch - 1) * batches + index + 1)
            optimizer.step()
            accumulator.before_clearing()
            optimizer.zero_grad()
        if archive is not None:
            path = scratch / f"epoch{epoch:02d}.pt"
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
            torch.save(accumulator.gradients(), scratch / "gradients" / path.name)
            before = archive.nbytes()
            archive.add(path)
            added.append(archive.nbytes() - before)
            if epoch in failures:
                state = archive.restore(epoch - 1)
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
    if archive is not None:
        archive.remove()
    return *digits.judge(model.state_dict()), added
