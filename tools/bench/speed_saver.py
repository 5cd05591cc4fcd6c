"""The cost of `Store.saver` for a training: stalls, time until a save is durable, slower steps."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

import ckstore
from ckstore.policy import Policy
from tools.bench.keepers import KEEPERS, SAVE, Source
from tools.bench.series import load
from tools.bench.speed_figures import Section, Spread
from tools.bench.speed_frame import Bench, Contender, race

#: Training steps in a row without a save.
_BLOCK = 12


def saver(bench: Bench) -> Section:
    """Measure saves against `torch.save`, and training steps with and without one, on one thread."""
    bench.report("saver")
    state, root = load(bench.series()[-1]), bench.work / "saved"
    source, packed = Source(root / "source", state), root / "packed"
    saves: list[Future[Any]] = []

    def change(number: int) -> None:
        """Change every value, once the last save is durable."""
        for future in saves:
            future.result()
        _multiply(state)

    with ckstore.init(root / "store") as store:
        store.set_policy(replace(Policy(), hot=1_000_000))
        with store.saver("run", nbytes=bench.series()[-1].stat().st_size * 21 // 20) as opened:

            def save(number: int) -> Future[Any]:
                saves.append(opened.save({"state": state, "number": len(saves)}))
                return saves[-1]

            save(0).result()
            timings = race(
                [
                    Contender(SAVE, lambda number: KEEPERS[0].store(source, packed), change),
                    Contender("`save` returns", save, change),
                    Contender("durable", lambda number: save(number).result(), change),
                ],
                range(bench.repeat),
                warm=False,
            )
            slower = _slower(bench.repeat, lambda: save(0))
    shutil.rmtree(root)
    rows = [["measurement", "figure", "part of torch.save"]]
    for name, found in timings.items():
        parts = [one.seconds / other.seconds for one, other in zip(found, timings[SAVE], strict=True)]
        rows.append([name, f"{Spread.of([one.seconds for one in found])} s", str(Spread.of(parts))])
    rows.append(["a training step during a save, over one without", f"{Spread.of(slower)} x", ""])
    return Section(
        "Saving from a separate process",
        "`Store.saver` against `torch.save` with `fsync` of the same state. Training steps run on one thread.",
        [rows],
    )


def _multiply(tree: Any) -> None:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            tree.mul_(1.001)
    elif isinstance(tree, dict):
        for value in tree.values():
            _multiply(value)


def _slower(turns: int, save: Callable[[], Future[Any]]) -> list[float]:
    """Return the time of training steps during a save over that of steps without one, turn by turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 512)

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begun

    step()
    found = []
    for _ in range(turns):
        alone = statistics.median(step() for _ in range(_BLOCK))
        future = save()
        during = [step()]
        while not future.done():
            during.append(step())
        found.append(statistics.median(during) / alone)
    torch.set_num_threads(threads)
    return found
