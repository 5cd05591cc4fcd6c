"""The cost of compression: the two steps of Inshrinkerator's quantiser, and a version relative to training steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import torch

from ckstore.codecs.schemes.dynaquant import DynaQuantSettings, RankStatistics, Treatment, level_codebook
from ckstore.objects.units import SMALL
from tools.fidelity import archives
from tools.fidelity.archives import Setting, StoreArchive
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench
from tools.fidelity.states import load
from tools.fidelity.whole import WINDOWS, gpt_language

#: Levels of the clustering, as in Agrawal et al..
_LEVELS = 32

#: Elements that scikit-learn clusters: all would take minutes.
_SAMPLE = 1 << 20

#: Repetitions; the fastest counts.
_TIMES = 5

#: Versions that are stored during training, and the steps between them.
_VERSIONS, _EVERY = 3, 10


def measure(bench: Bench, found: Found) -> None:
    """Measure a row for the quantiser's steps, and one for each scheme."""
    found.row("costs", "quantiser", partial(_quantiser, bench))
    for setting in (archives.DEFAULT, Setting("lc", archives.DEFAULT_QUALITY), Setting("dynaquant", 1.5)):
        found.row("costs", f"{setting}", partial(_saving, bench, setting))


def _quantiser(bench: Bench) -> dict[str, Any]:
    """Return the seconds of one core for all large tensors of the GPT's last version in one."""
    from sklearn.cluster import KMeans

    model = load(bench.run("gpt")[-1])["model"].values()
    values = np.concatenate([weight.numpy().reshape(-1) for weight in model if weight.numel() >= SMALL])
    settings = DynaQuantSettings(_LEVELS)
    ranks = RankStatistics()
    ranks.add(values, None)
    split = ranks.split(settings, known=False)

    def partition() -> None:
        own = RankStatistics()
        own.add(values, None)
        own.split(settings, known=False)

    def cluster() -> None:
        level_codebook(values, Treatment(split, _LEVELS, None))

    sample = np.random.default_rng(0).choice(values, _SAMPLE, replace=False)[:, None]
    seconds = {
        "partition": _fastest(partition),
        "quantiles": _fastest(lambda: np.quantile(np.abs(values), (settings.prune, 1 - settings.protect))),
        "clustering": _fastest(cluster),
        "scikit-learn": _fastest(lambda: KMeans(_LEVELS, n_init=1, random_state=0).fit(sample), times=1),
    }
    return {"elements": values.size, "sample": _SAMPLE, "levels": _LEVELS, "seconds": seconds}


def _fastest(run: Callable[[], object], times: int = _TIMES) -> float:
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def _saving(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Return processor seconds of a step of the GPT, of a version, and of steps while versions are stored."""
    paths = bench.run("gpt")[-_VERSIONS - 1 :]
    language = gpt_language(bench, WINDOWS)
    state = load(paths[0])
    _, _, step = language.go_on(state, state["step"], torch.Generator().manual_seed(0))
    steps = _VERSIONS * _EVERY

    def train(during: Callable[[int], None]) -> tuple[float, float]:
        wall, processors = time.perf_counter(), time.process_time()
        for number in range(steps):
            during(number)
            step()
        return time.perf_counter() - wall, time.process_time() - processors

    step()
    alone = train(lambda number: None)
    threads: list[Thread] = []
    with bench.scratch() as scratch:
        archive = StoreArchive(scratch / "store", setting)
        archive.add(paths[0])

        def save(number: int) -> None:
            """Store a version, after waiting for the one before."""
            if number % _EVERY == 0:
                for thread in threads:
                    thread.join()
                threads.append(Thread(target=archive.add, args=(paths[1 + number // _EVERY],)))
                threads[-1].start()

        during = train(save)
        for thread in threads:
            thread.join()
        archive.remove()
    bench.report(f"{setting}: {alone} alone, {during} with versions")
    return {"scheme": str(setting), "steps": steps, "versions": _VERSIONS, "alone": alone, "during": during}
