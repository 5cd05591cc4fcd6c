"""Compares states of many small tensors with torch's own files: CPU microseconds for each tensor.

Rounds take turns; the median counts. The state is in memory, and the store and the files are in one directory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

import ckstore

#: Operations on a state, and the one of torch that each is compared with.
_PEERS = {
    "torch.save": "torch.save", "ingest, hot": "torch.save", "ingest": "torch.save", "torch.load": "torch.load",
    "state_dict": "torch.load",
}  # fmt: skip


def state(tensors: int, elements: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a state of many float32 tensors, each with its own storage."""
    values = torch.randn(tensors, elements, generator=torch.Generator().manual_seed(seed))
    return {f"layers.{number // 4}.block.{number % 4}.weight": values[number].clone() for number in range(tensors)}


def measured(place: Path, tensors: int, elements: int, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of each operation; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in _PEERS}

    def take(name: str, operation: Callable[[], object]) -> None:
        before = time.process_time()
        operation()
        found[name].append(time.process_time() - before)

    file = place / "state.pt"
    with ckstore.init(place / "store") as store:
        for step in range(rounds + 1):
            given = state(tensors, elements, step)
            take("torch.save", lambda: torch.save(given, file))  # noqa: B023
            take("ingest, hot", lambda: store.ingest(given, run="hot", step=step, hot=rounds + 1))  # noqa: B023
            take("ingest", lambda: store.ingest(given, run="encoded", step=step, hot=0))  # noqa: B023
            take("torch.load", lambda: torch.load(file))
            take("state_dict", lambda: store[f"encoded@{step}"].state_dict())  # noqa: B023
    return {name: median(spent[1:]) for name, spent in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tools/bench/tensors", description=__doc__)
    parser.add_argument("--tensors", type=int, default=200_000)
    parser.add_argument("--elements", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=chosen.work) as directory:
        found = measured(Path(directory), chosen.tensors, chosen.elements, chosen.rounds)
    print("| | CPU us a tensor | of torch's |\n| --- | ---: | ---: |")
    for name, peer in _PEERS.items():
        print(f"| {name} | {found[name] / chosen.tensors * 1e6:.1f} | {found[name] / found[peer]:.2f} |")


if __name__ == "__main__":
    main()
