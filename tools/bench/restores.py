"""Restore cost of a large checkpoint with Adam's moments: measured and foretold, one row, throughput."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ckstore
from ckstore.reading.checkout import checkout
from tools.bench.series import REPOSITORY

#: Width of the model; the embedding is the largest tensor and has more than ten chunks.
WIDTH = 512
WORDS = 6144


def write_versions(directory: Path, megabytes: int, count: int) -> list[Path]:
    """Checkpoints of a transformer whose weights walk at random while its moments forget, by `torch.save`.

    The weights move by about 8 % of their size between two versions, as those of the GPT run in its middle do.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {"wte.weight": torch.Size((WORDS, WIDTH))}
    layer = 0
    while 12 * sum(shape.numel() for shape in shapes.values()) < megabytes * 1_000_000:
        shapes[f"h.{layer}.attn.weight"] = torch.Size((3 * WIDTH, WIDTH))
        shapes[f"h.{layer}.up.weight"] = torch.Size((4 * WIDTH, WIDTH))
        shapes[f"h.{layer}.down.weight"] = torch.Size((WIDTH, 4 * WIDTH))
        shapes[f"h.{layer}.norm.weight"] = torch.Size((WIDTH,))
        layer += 1
    model = {name: noise(shape) * 0.02 for name, shape in shapes.items()}
    first = {name: noise(shape) * 1e-4 for name, shape in shapes.items()}
    scale = {}
    for name, shape in shapes.items():
        scale[name] = torch.rand((shape[0], *([1] * (len(shape) - 1))), generator=generator) * 1e-8
    second = {name: (noise(shape) ** 2 + 0.1) * scale[name] for name, shape in shapes.items()}
    paths = []
    for step in range(count):
        state = {
            number: {"step": torch.tensor(float(step)), "exp_avg": first[name], "exp_avg_sq": second[name]}
            for number, name in enumerate(shapes)
        }
        paths.append(directory / f"step{step:03d}.pt")
        torch.save({"model": model, "optimizer": {"state": state}, "step": step}, paths[-1])
        model = {name: value + noise(value.shape) * 0.0016 for name, value in model.items()}
        first = {name: noise(value.shape) * 1e-4 for name, value in first.items()}
        second = {name: 0.8 * old + 0.2 * noise(old.shape) ** 2 * scale[name] for name, old in second.items()}
    return paths


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def save_durably(state: Any, path: Path) -> None:
    """`torch.save`, and `fsync`."""
    torch.save(state, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="tools/bench/restore", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=250)
    parser.add_argument("--versions", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".cache")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=chosen.work) as scratch:
        measure(Path(scratch), chosen.megabytes, chosen.versions, chosen.repeat)


def measure(scratch: Path, megabytes: int, versions: int, repeat: int) -> None:
    """Ingest the versions, then time what a user waits for."""
    paths = write_versions(scratch, megabytes, versions)
    size = paths[0].stat().st_size
    root, alone, out = scratch / "store", scratch / "alone", scratch / "out.pt"
    ingests, saves = [], []
    with ckstore.init(root) as store:
        for path in paths:
            ingests.append(timed(lambda path=path: store.ingest(path, run="run")))
            state = torch.load(path, weights_only=True)
            saves.append(timed(lambda state=state: save_durably(state, out)))
            out.unlink()
        deepest = max(store.versions(), key=lambda row: (row.depth, row.number))
    with ckstore.init(alone) as store:
        store.ingest(paths[deepest.number - 1], run="run")

    def restore(place: Path, spec: int) -> None:
        with ckstore.open(place, "r") as store:
            checkout(store[spec], out, force=True)

    deep, full, loads = [], [], []
    for _ in range(repeat):
        deep.append(timed(lambda: restore(root, deepest.number)))
        full.append(timed(lambda: restore(alone, 1)))
        loads.append(timed(lambda: torch.load(paths[deepest.number - 1], weights_only=True)))
    rows = []
    with ckstore.open(root, "r") as store:
        version = store[deepest.number]
        tensor = version["model/wte.weight"]
        for number in range(5 * repeat):
            store.reader.cache.clear()
            rows.append(timed(lambda number=number: tensor[(number * 173) % WORDS]))
    factor = statistics.median(one / other for one, other in zip(deep, full, strict=True))
    whole, row = statistics.median(deep), statistics.median(rows)
    written, saved = statistics.median(ingests[1:]), statistics.median(saves)
    print(f"checkpoint of {size:,} bytes, {versions} versions, {os.cpu_count()} cores; medians")
    print("| what | figure |")
    print("| --- | ---: |")
    print(f"| ingest of a delta version | {size / written / 1e9:.2f} GB/s |")
    print(f"| torch.save and fsync, same run | {size / saved / 1e9:.2f} GB/s |")
    print(f"| checkout of the deepest version (depth {deepest.depth}) | {size / whole / 1e9:.2f} GB/s |")
    print(f"| checkout of the same version stored in full | {size / statistics.median(full) / 1e9:.2f} GB/s |")
    print(f"| torch.load, same run | {size / statistics.median(loads) / 1e9:.2f} GB/s |")
    print(f"| restore factor measured / foretold | {factor:.2f} / {deepest.cost:.2f} |")
    print(f"| one row of the largest tensor of the deepest version, no chunk cached | {row * 1e3:.1f} ms |")
    print(f"| the same against its whole checkout | {100 * row / whole:.2f} % |")


if __name__ == "__main__":
    main()
