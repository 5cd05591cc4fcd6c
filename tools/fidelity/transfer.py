"""Transfer learning: a pretrained model is compressed once, and fine-tuned after a restore."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from tools import models, runs
from tools.fidelity import archives
from tools.fidelity.archives import EXACT, Setting
from tools.fidelity.baselines import BASELINES
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import State, weights_only
from tools.fidelity.whole import SEARCHED, WINDOWS, archive_of, judge, prose_language
from tools.training import language_step

#: Steps of the fine-tune, and those between two evaluations.
STEPS, EVERY = 100, 25


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for every scheme: size of the pretrained GPT's weights, and loss on prose during fine-tuning."""
    ways = [EXACT, SEARCHED, archives.DEFAULT, Setting("lc", archives.DEFAULT_QUALITY), *map(Setting, BASELINES)]
    for setting in ways:
        found.row("transfer", str(setting), partial(_row, bench, setting))


def _row(bench: Bench, setting: Setting) -> dict[str, Any]:
    paths = bench.run("gpt")
    (path,) = weights_only(paths[-1:], bench.kept / "weights" / "gpt")
    degradation = judge(bench, "gpt", paths)
    with bench.scratch() as scratch:
        archive = archive_of(setting, scratch / "store", degradation)
        before = archive.nbytes()
        archive.add(path)
        nbytes = archive.nbytes() - before
        restored = archive.restore(0)
        archive.remove()
    lost = degradation(path, restored)
    losses = _finetuned(bench, restored)
    bench.report(f"{setting}: {path.stat().st_size / nbytes:.1f}x, lost {lost:+.2%}, prose {losses}")
    return {"scheme": str(setting), "bytes": path.stat().st_size, "nbytes": nbytes, "lost": lost, "losses": losses}


def _finetuned(bench: Bench, state: State) -> list[float]:
    """Return the loss on held-out prose before, during and after the fine-tune of `tools/train` from these weights."""
    settings = runs.text_settings("finetune", bench.name)
    language = prose_language(bench, bench.run("finetune"), WINDOWS)
    text = models.prose()
    model = settings.model()
    model.load_state_dict(copy.deepcopy(state["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(4)
    losses = [language.loss(model.state_dict())]
    for step in range(1, STEPS + 1):
        language_step(model, optimizer, text, settings, generator, settings.rate)
        if step % EVERY == 0:
            losses.append(language.loss(model.state_dict()))
    return losses
