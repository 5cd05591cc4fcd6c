"""Measures the cost of `Store.saver` for a training: stalls, time until durable, slower steps, memory."""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ckstore
from ckstore.policy import Policy
from ckstore.saving import process, saver
from ckstore.saving.saver import Saver

#: Training steps in a row, alternately without and with saves.
BLOCK = 12

MB = 1_000_000


def state_of(megabytes: int) -> dict[str, Any]:
    """Return weights and AdamW's moments of layers of 1024 x 1024 with their biases, and a counter for each."""
    generator = torch.Generator().manual_seed(0)
    model: dict[str, torch.Tensor] = {}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    layers = max(1, round(megabytes * MB / (3 * 4 * (1024 * 1024 + 1024))))
    for layer in range(layers):
        for name, shape in (("weight", (1024, 1024)), ("bias", (1024,))):
            weight = torch.randn(shape, generator=generator)
            model[f"layers.{layer}.{name}"] = weight
            moments[len(moments)] = {
                "step": torch.tensor(0.0), "exp_avg": weight * 1e-3, "exp_avg_sq": weight.square() * 1e-6
            }  # fmt: skip
    return {"model": model, "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3}]}}


def train(state: dict[str, Any]) -> None:
    """Change every value."""
    for weight in state["model"].values():
        weight.mul_(1.001)
    for moments in state["optimizer"]["state"].values():
        for moment in moments.values():
            moment.mul_(1.001).add_(1e-9)


class Times:
    """Seconds, and CPU seconds of this process, of repetitions of one action."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def add(self, work: Callable[[], Any]) -> Any:
        """Do it once more."""
        begun, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.seconds.append(time.perf_counter() - begun)
        self.cpu.append(time.process_time() - cpu)
        return result

    @property
    def p50(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The largest of fewer than a hundred."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * 0.99))]


def cpu_of(number: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_of(opened: Saver) -> int:
    while opened._process is None:
        time.sleep(0.01)
    return opened._process.pid


class Peak:
    """Tracks a process's own memory, in bytes."""

    def __init__(self, number: int) -> None:
        self.anonymous = 0
        self._status = Path(f"/proc/{number}/status")
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            for line in lines:
                if line.startswith("RssAnon:"):
                    self.anonymous = max(self.anonymous, int(line.split()[1]) << 10)


def save_with_torch(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def saving(directory: Path, nice: int, *, compacts: bool, nbytes: int = 0) -> Iterator[tuple[ckstore.Store, Saver]]:
    """Open a saver with its own store; without `compacts` every version stays unencoded."""
    saver.Settings = functools.partial(process.Settings, nice=nice)  # type: ignore[assignment, misc]
    with ckstore.init(directory / f"store{time.monotonic_ns()}") as store:
        store.set_policy(replace(Policy(), hot=1 if compacts else 1_000_000))
        with store.saver("run", nbytes=nbytes) as opened:
            yield store, opened


def stalls(directory: Path, megabytes: int, saves: int, nice: int) -> None:
    state = state_of(megabytes)
    size = sum(tensor.nbytes for tensor in state["model"].values()) * 3
    with saving(directory, nice, compacts=False, nbytes=size + size // 50) as (store, opened):
        number = process_of(opened)
        peak = Peak(number)
        file, stall, durable = Times(), Times(), Times()
        opened.save({"step": -1}).result()
        spent = cpu_of(number)
        for step in range(saves):
            train(state)
            file.add(functools.partial(save_with_torch, state, directory / "state.pt"))

            def store_state(step: int = step) -> None:
                future = stall.add(lambda: opened.save({**state, "step": step}))
                future.result()

            durable.add(store_state)
            store.forget([row.number for row in store.versions()[:-1]])
            store.gc(grace=0)
        spent = (cpu_of(number) - spent) / saves
        staged = sum(area.nbytes for area in opened._areas)
    print(
        f"{megabytes:5d} MB  torch.save + fsync {file.p50:6.3f} s p50 {file.p99:6.3f} s p99\n"
        f"          stall {stall.p50 * 1e3:8.1f} ms p50 {stall.p99 * 1e3:8.1f} ms p99, "
        f"{stall.p50 / file.p50:.3f} and {stall.p99 / file.p99:.3f} of torch.save\n"
        f"          durable {durable.p50:6.3f} s p50 {durable.p99:6.3f} s p99, "
        f"{durable.p50 / file.p50:.2f} and {durable.p99 / file.p99:.2f} of torch.save\n"
        f"          CPU: torch.save {statistics.median(file.cpu):.3f} s, stall {statistics.median(stall.cpu):.3f} s, "
        f"saver's process {spent:.3f} s a save\n"
        f"          memory: state {size / MB:.0f} MB, staged {staged / MB:.0f} MB, "
        f"saver's process {peak.anonymous / MB:.0f} MB of its own",
        flush=True,
    )


def steps(directory: Path, megabytes: int, nice: int, seconds: float, *, compacts: bool) -> None:
    """Measure training steps on one thread, alternately without and with a pending save."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 512)
    state = state_of(megabytes)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    for _ in range(5):
        step()
    alone, during = Times(), Times()
    slower: list[float] = []
    durable: list[float] = []
    with saving(directory, nice, compacts=compacts, nbytes=megabytes * MB * 21 // 20) as (store, opened):
        opened.save({"step": -1}).result()
        until = time.monotonic() + seconds
        number = 0
        while time.monotonic() < until:
            before = len(alone.seconds)
            for _ in range(BLOCK):
                alone.add(step)
            reference = statistics.median(alone.seconds[before:])
            before = len(during.seconds)
            train(state)
            begun = time.perf_counter()
            future = opened.save({**state, "step": number})
            while not future.done():
                during.add(step)
            durable.append(time.perf_counter() - begun)
            number += 1
            if len(during.seconds) - before > 2:
                slower.append(statistics.median(during.seconds[before:]) / reference)
            if not compacts:
                store.forget([row.number for row in store.versions()[:-1]])
                store.gc(grace=0)
    print(
        f"nice {nice:2d}{', compacting' if compacts else ''}: steps {alone.p50 * 1e3:.1f} ms, during a save "
        f"{during.p50 * 1e3:.1f} ms; slower by {statistics.median(slower) - 1:.1%}, the median of {len(slower)} turns, "
        f"in CPU time by {statistics.median(during.cpu) / statistics.median(alone.cpu) - 1:.1%}; "
        f"durable after {statistics.median(durable):.2f} s, at most {max(durable):.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", default="60,300,1000")
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--nice", default=str(process.NICE))
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the training, for each niceness")
    parser.add_argument("--work", type=Path, help="directory for stores and files; by default a temporary one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.work, prefix="ckstore-bench-") as name:
        directory = Path(name)
        nices = [int(nice) for nice in asked.nice.split(",")]
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for megabytes in filter(None, asked.megabytes.split(",")):
            stalls(directory, int(megabytes), asked.saves, nices[0])
        if asked.seconds:
            for nice in nices:
                steps(directory, 300, nice, asked.seconds, compacts=False)
            steps(directory, 60, nices[0], asked.seconds, compacts=True)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
