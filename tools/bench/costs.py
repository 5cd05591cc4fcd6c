"""Measures checkouts of every version of every series, and fits the weights of `ckstore.lineage.cost` to them."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

import ckstore
from ckstore.lineage.cost import Work, cost
from ckstore.objects.restore_cost import restore_work
from tools.bench import series as catalogue


def measure(series: catalogue.Series, scratch: Path, repeat: int) -> Iterator[tuple[int, Work, Work, float]]:
    """(number, work, work if stored in full, median seconds) of the checkout of every version, interleaved."""
    root, out = scratch / "store", scratch / "out"
    with ckstore.init(root) as store:
        for step, path in enumerate(series.versions):
            store.ingest(path, run="run", step=step)
    numbers = [row.number for row in ckstore.open(root, "r").versions()]
    times: dict[int, list[float]] = {number: [] for number in numbers}
    works: dict[int, tuple[Work, Work]] = {}
    for number in numbers:
        with ckstore.open(root, "r") as store:
            version = store[number]
            works[number] = restore_work(store.repository.reader, set(version.document.objects), version.layout.files)
    for _ in range(repeat + 1):
        for number in numbers:
            with ckstore.open(root, "r") as store:
                begin = time.perf_counter()
                store[number].checkout(out, force=True)
                times[number].append(time.perf_counter() - begin)
    for number in numbers:
        yield number, *works[number], float(np.median(times[number][1:]))


def fit(works: list[Work], seconds: list[float]) -> list[float]:
    """Weights that are not negative and make the relative errors smallest."""
    design = np.array(works, np.float64) / np.array(seconds)[:, None] / 1e9
    return [float(weight) for weight in nnls(design, np.ones(len(works)))[0]]


def main() -> None:
    """Print a row a version, and the fitted weights."""
    parser = argparse.ArgumentParser(prog="tools/bench/cost", description=__doc__)
    parser.add_argument("--series", action="append", default=[])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=catalogue.REPOSITORY / ".cache")
    parser.add_argument("--tier", default="small")
    parser.add_argument("--repeat", type=int, default=5)
    chosen = parser.parse_args()
    works, seconds = [], []
    print("| series | version | measured ms | predicted ms | measured factor | predicted factor |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for series in catalogue.find(chosen.series, chosen.data, chosen.work, tier=chosen.tier):
        with tempfile.TemporaryDirectory(dir=chosen.work) as scratch:
            rows = list(measure(series, Path(scratch), chosen.repeat))
        first = rows[0][3]
        for number, work, full, taken in rows:
            works.append(work)
            seconds.append(taken)
            print(
                f"| {series.name} | {number} | {taken * 1e3:.1f} | {cost(work) / 1e6:.1f} |"
                f" {taken / first:.2f} | {cost(work) / cost(full):.2f} |"
            )
    print(
        "\nfitted weights:", dict(zip(Work._fields, (round(weight, 3) for weight in fit(works, seconds)), strict=True))
    )


if __name__ == "__main__":
    main()
