"""Measures the restore cost of every version of every series, and fits the weights of `ckstore.lineage.cost` to it.

Seconds are CPU seconds of state dicts, the least of several, in turn with those of the same checkpoint stored exactly
and in full, and of `torch.load`. `predicted` is the factor that `ckstore log` prints and a budget bounds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import nnls

import ckstore
from ckstore.encoding.budget import BUDGET
from ckstore.lineage.cost import Work, cost
from ckstore.objects.restore_cost import restore_work
from ckstore.policy import FIDELITIES, Fidelity
from tools.bench import series as catalogue

#: Minimal CPU seconds of repeated restores, and the maximal multiple of the requested number of restores.
_ENOUGH = 1.0
_OFTEN = 6


@dataclass(frozen=True)
class Row:
    """One version.

    Attributes
    ----------
    number
        Of the version.
    work, full
        Of restoring it, as stored and as if it were exact and in full.
    stored
        Bytes of the packs of all versions.
    seconds, full_seconds, torch_seconds
        Of its state dict, as stored and from a store where it is in full, and of `torch.load`; nan where that refuses.
    """

    number: int
    work: Work
    full: Work
    stored: int
    seconds: float
    full_seconds: float
    torch_seconds: float

    @property
    def predicted(self) -> float:
        """The factor that the store predicts."""
        return cost(self.work) / cost(self.full)

    @property
    def measured(self) -> float:
        """The measured factor."""
        return self.seconds / self.full_seconds


def ingest(
    series: catalogue.Series, root: Path, budget: float, *, in_full: bool = False, fidelity: Fidelity = "exact"
) -> None:
    """Store a series, each version in its own run if `in_full`."""
    with ckstore.init(root) as store:
        for step, path in enumerate(series.versions):
            run = f"run{step}" if in_full else "run"
            store.ingest(path, run=run, step=step, max_restore_cost=budget, policy=fidelity, hot=0)


def measure(
    series: catalogue.Series,
    scratch: Path,
    repeat: int,
    budget: float = BUDGET,
    fidelity: Fidelity = "exact",
    *,
    deepest: bool = False,
) -> Iterator[Row]:
    """Store a series below `scratch` under a budget, and measure each version, or the one of the highest factor.

    `scratch/full` is reused.
    """
    own, full = scratch / "store", scratch / "full"
    if not full.exists():
        ingest(series, full, budget, in_full=True)
    ingest(series, own, budget, fidelity=fidelity)
    stored = sum(path.stat().st_size for path in (own / "packs").iterdir())
    found = []
    for number in range(1, len(series.versions) + 1):
        with ckstore.open(own, "r") as store:
            version = store[number]
            works = restore_work(
                store._repository.reader, set(version._stored.document.objects), version._stored.layout.files
            )
        found.append((cost(works[0]) / cost(works[1]), number, works))
    for _, number, works in [max(found)] if deepest else found:
        loads = [partial(_state_dict, own, number), partial(_state_dict, full, number)]
        yield Row(number, *works, stored, *_least([*loads, partial(_torch_load, series.versions[number - 1])], repeat))
    shutil.rmtree(own)


def _state_dict(root: Path, number: int) -> None:
    with ckstore.open(root, "r") as store:
        store[number].state_dict()


def _torch_load(path: Path) -> None:
    torch.load(path, map_location="cpu", weights_only=True)


def _least(loads: list[Callable[[], None]], repeat: int) -> list[float]:
    """Return the least CPU seconds of some loads, nan for one that fails.

    They take turns, after a warm-up. The order alternates, because earlier work determines the available memory. Loads
    of a few milliseconds are repeated more often.
    """
    least = [float("inf")] * len(loads)
    for turn in range(_OFTEN * repeat + 1):
        if turn > repeat and np.nansum(least) * turn > _ENOUGH:
            break
        for index in range(len(loads)) if turn % 2 else reversed(range(len(loads))):
            begin = time.process_time()
            try:
                loads[index]()
            except Exception:  # torch.load refuses classes, and directories.
                least[index] = float("nan")
            taken = time.process_time() - begin
            least[index] = min(least[index], taken) if turn else least[index]
    return least


def fit(works: list[Work], seconds: list[float]) -> list[float]:
    """Return weights that are not negative and minimise the relative errors."""
    design = np.array(works, np.float64) / np.array(seconds)[:, None] / 1e9
    return [float(weight) for weight in nnls(design, np.ones(len(works)))[0]]


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each version, and the fitted weights."""
    parser = argparse.ArgumentParser(prog="tools/bench/cost", description=__doc__)
    parser.add_argument(
        "--series", action="append", default=[], help="repeatable: see tools.bench.series.find, or a directory of files"
    )
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=catalogue.REPOSITORY / ".cache")
    parser.add_argument("--tier", default="small")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--budget", type=float, action="append", default=[], help="repeatable")
    parser.add_argument("--deepest", action="store_true", help="measure only the version of the highest factor")
    parser.add_argument("--fidelity", choices=FIDELITIES, default="exact", help="of the stored versions")
    chosen = parser.parse_args(arguments)
    budgets = chosen.budget or [BUDGET]
    directories = [Path(name) for name in chosen.series if Path(name).is_dir()]
    names = [name for name in chosen.series if Path(name) not in directories]
    found = [catalogue.in_directory(directory) for directory in directories]
    if names or not directories:
        found += catalogue.find(names, chosen.data, chosen.work, tier=chosen.tier)
    if not found:
        parser.error(f"no series is named {', '.join(names)}")
    rows: list[Row] = []
    summary: list[tuple[object, ...]] = []
    _print_row("series", "budget", "version", "state dict, CPU ms", "model", "predicted", "measured")
    _print_row("---", *["---:"] * 6)
    for series in found:
        with tempfile.TemporaryDirectory(dir=chosen.work) as scratch:
            for budget in budgets:
                of_series: list[Row] = []
                for row in measure(
                    series, Path(scratch), chosen.repeat, budget, chosen.fidelity, deepest=chosen.deepest
                ):
                    of_series.append(row)
                    took = f"{row.seconds * 1e3:.1f}", f"{cost(row.work) / 1e6:.1f}"
                    factors = f"{row.predicted:.2f}", f"{row.measured:.2f}"
                    _print_row(series.name, f"{budget:g}", row.number, *took, *factors)
                rows += of_series
                summary.append((series.name, f"{budget:g}", *_summary(of_series)))
    print()
    _print_row(
        "series", "budget", "versions", "bytes", "predicted", "measured", "times torch.load", "measured / predicted"
    )
    _print_row("---", *["---:"] * 7)
    for cells in summary:
        _print_row(*cells)
    works = [work for row in rows for work in (row.work, row.full)]
    weights = fit(works, [seconds for row in rows for seconds in (row.seconds, row.full_seconds)])
    print("\nfitted weights:", dict(zip(Work._fields, (round(weight, 3) for weight in weights), strict=True)))


def _summary(rows: list[Row]) -> tuple[object, ...]:
    """Return the number of measured versions, bytes, the highest factors, and the errors of the predictions."""
    off = [row.measured / row.predicted for row in rows]
    highest = (
        max(row.predicted for row in rows),
        max(row.measured for row in rows),
        max(row.seconds / row.torch_seconds for row in rows),
    )
    return len(rows), f"{rows[0].stored:,}", *(f"{one:.2f}" for one in highest), f"{min(off):.2f} to {max(off):.2f}"


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
