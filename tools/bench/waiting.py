"""Measures how long saves wait: a loop that saves a small state every 50 ms, next to one busy core.

The same loop runs first without anything to encode: the duration of its saves is that of the write itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

import ckstore
from ckstore.retention.encoder import BackgroundEncoder

#: Seconds between two saves.
_PAUSE = 0.05


@dataclass(frozen=True)
class Waits:
    """Milliseconds of each save, those of them inside `BackgroundEncoder.wait`, and the hot versions at the end."""

    saves: list[float]
    pressed: list[float]
    hot: int

    def __str__(self) -> str:
        took, pressed = np.array(self.saves), np.array(self.pressed)
        ranks = ", ".join(f"{rank} % {np.percentile(took, rank):.1f}" for rank in (50, 99, 99.9))
        return (
            f"{len(took)} saves: mean {took.mean():.1f} ms, {ranks}, peak {took.max():.1f}; of it for the limit:"
            f" mean {pressed.mean():.3f}, peak {pressed.max():.1f}; {self.hot} hot at the end"
        )

    def beyond(self, usual: float) -> str:
        """Return mean and peak of the saves beyond their usual milliseconds."""
        took = np.array(self.saves) - usual
        return f"mean {took.mean():.1f} ms, peak {took.max():.1f} ms"


def saves(path: Path, seconds: float, hot: int | None) -> Waits:
    """Save into a new store for some seconds."""
    random = np.random.default_rng(0)
    state = {f"layer{number}": random.standard_normal((32, 64), np.float32) for number in range(4)}
    took: list[float] = []
    pressed: list[float] = []
    wait = BackgroundEncoder.wait

    def timed(encoder: BackgroundEncoder, run: str) -> None:
        begun = time.perf_counter()
        wait(encoder, run)
        pressed.append(1e3 * (time.perf_counter() - begun))

    with ckstore.init(path) as store, mock.patch.object(BackgroundEncoder, "wait", timed):
        store.ingest(state, run="run", step=0, hot=hot)  # Imports.
        pressed.clear()
        end = time.perf_counter() + seconds
        while (due := time.perf_counter() + _PAUSE) < end:
            for values in state.values():
                values += random.standard_normal(values.shape, np.float32) * np.float32(1e-3)
            begun = time.perf_counter()
            store.ingest(state, run="run", step=len(took) + 1, hot=hot)
            took.append(1e3 * (time.perf_counter() - begun))
            time.sleep(max(0.0, due - time.perf_counter()))
        return Waits(took, pressed, len(store._catalog.hot()))


def main(given: Sequence[str] | None = None) -> None:
    """Print both loops, and the difference."""
    parser = argparse.ArgumentParser(prog="tools/bench/waits", description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=600, help="duration of the loop (default 600)")
    parser.add_argument("--work", type=Path, help="directory for the stores (default: the system's)")
    arguments = parser.parse_args(given)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with tempfile.TemporaryDirectory(dir=arguments.work) as directory:
            # Few versions, since all of them stay hot.
            alone = saves(Path(directory) / "alone", min(arguments.seconds, 10), hot=1_000_000)
            print(f"Nothing to encode: {alone}")
            found = saves(Path(directory) / "store", arguments.seconds, hot=None)
            print(f"Defaults: {found}")
    finally:
        busy.kill()
        busy.wait()
    usual = float(np.median(alone.saves))
    print(f"Beyond the write ({usual:.1f} ms): {found.beyond(usual)}; with nothing to encode {alone.beyond(usual)}")


if __name__ == "__main__":
    main()
