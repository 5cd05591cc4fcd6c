"""Measures how long saves in the background block a training on a CPU, the first save included.

usage: python -m tools.bench.stalls [--megabytes 58,271] [--saves N] [--repeat N] [--only NAME,...]

Contenders take turns, each run in a process of its own: weights and AdamW's moments in float32, saved as its README
says. The next save begins when the last is durable. A contender that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import ckstore

#: Starts a save, and returns a function that waits until it is durable.
Save = Callable[[int], Callable[[], Any]]

_WIDTH = 512


@contextmanager
def _ckstore(work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Save]:
    with ckstore.init(work / "store") as store, store.saver("run") as saver:
        yield lambda step: saver.save(_state(model, optimizer), step=step).result


@contextmanager
def _prepared(work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Save]:
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    with ckstore.init(work / "store") as store, store.saver("run", nbytes=nbytes) as saver:
        yield lambda step: saver.save(_state(model, optimizer), step=step).result


@contextmanager
def _moonclip(work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Save]:
    from moonclip import CheckpointManager

    manager = CheckpointManager(str(work / "checkpoints"))

    def save(step: int) -> Callable[[], Any]:
        manager.save(step=step, model=model, optimizer=optimizer)
        flush: Callable[[], Any] = manager.flush
        return flush

    yield save


@contextmanager
def _torch(work: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Save]:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    def save(step: int) -> Callable[[], Any]:
        future: Any = async_save(_state(model, optimizer), checkpoint_id=str(work / str(step)), no_dist=True)
        wait: Callable[[], Any] = future.result
        return wait

    yield save


CONTENDERS = {"ckstore": _ckstore, "ckstore with nbytes": _prepared, "moonclip": _moonclip, "torch async_save": _torch}


def main() -> None:
    """Print a row for each contender and size: seconds of the first and of later saves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", default="58,271")
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--run", nargs=2, metavar=("NAME", "MEGABYTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(_run(options.run[0], int(options.run[1]), options.saves)))
        return
    print("| contender | MB | first save | later saves | all, over ckstore's |\n| --- | ---: | ---: | ---: | ---: |")
    for megabytes in options.megabytes.split(","):
        names = options.only.split(",")
        found: dict[str, list[list[float]]] = {name: [] for name in names}
        for turn in range(options.repeat):
            for name in names[:: 1 if turn % 2 else -1]:
                command = [sys.executable, "-m", "tools.bench.stalls", "--saves", str(options.saves)]
                done = subprocess.run(
                    [*command, "--run", name, megabytes], check=False, stdout=subprocess.PIPE, text=True
                )
                if done.returncode == 0:
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
        ours = median(map(sum, found["ckstore"])) if found.get("ckstore") else float("nan")
        for name, runs in found.items():
            if runs:
                first, later = [run[0] for run in runs], [stall for run in runs for stall in run[1:]]
                ratio = median(map(sum, runs)) / ours
                print(f"| {name} | {megabytes} | {_range(first)} | {_range(later)} | {ratio:.2f} |", flush=True)


def _run(name: str, megabytes: int, saves: int) -> list[float]:
    """Return the seconds that each save of a new run blocks."""
    torch.set_num_threads(1)
    layers = max(1, round(megabytes * 1e6 / (12 * _WIDTH**2)))
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    work = Path(tempfile.mkdtemp(prefix="ckstore-"))
    stalls = []
    try:
        with CONTENDERS[name](work, model, optimizer) as save:
            for step in range(1, saves + 1):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                begun = time.perf_counter()
                wait = save(step)
                stalls.append(time.perf_counter() - begun)
                wait()
    finally:
        shutil.rmtree(work)
    return stalls


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _range(seconds: list[float]) -> str:
    return f"{1000 * median(seconds):.0f} ({1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}) ms"


if __name__ == "__main__":
    main()
