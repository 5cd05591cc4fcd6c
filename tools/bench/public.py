"""Sizes of series of checkpoints that others trained: exact, and coarse at two qualities."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import ckstore
from ckstore.formats.paths import text_to_path
from ckstore.objects.roles import role_of
from ckstore.policy import QUALITY, Policy
from tools.bench.ours import size_of
from tools.bench.series import REPOSITORY
from tools.bench.speed_figures import table

#: The measured policies by name.
POLICIES = {
    "exact": Policy("exact"), f"coarse {QUALITY:g}": Policy("coarse"), "coarse 2.8": Policy("coarse", quality=2.8)
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One series under one policy.

    Attributes
    ----------
    series, policy
        Their names.
    sizes
        Bytes of each version's files.
    stored
        Bytes by which the store grew with each version.
    seconds
        CPU seconds of all ingests.
    deviation
        The largest relative deviation of a tensor of the last version that is no optimiser state; 0 of an exact one.
    """

    series: str
    policy: str
    sizes: list[int]
    stored: list[int]
    seconds: float
    deviation: float

    def cells(self) -> list[str]:
        """Return the row of the table."""
        later = statistics.median(size / stored for size, stored in zip(self.sizes[1:], self.stored[1:], strict=True))
        return [
            self.series, self.policy, str(len(self.sizes)), f"{sum(self.sizes):,}",
            f"{sum(self.sizes) / sum(self.stored):.2f}x", f"{later:.2f}x",
            f"{self.seconds / sum(self.sizes) * 1e9:.2f}", f"{self.deviation:.3f}",
        ]  # fmt: skip


def measure(directory: Path, work: Path, report: Callable[[str], None]) -> list[Row]:
    """Ingest the checkpoints of a directory under each policy, and check that the store restores them.

    Raises
    ------
    ValueError
        The directory does not hold two checkpoints or more.
    """
    rows = []
    for name, policy in POLICIES.items():
        with tempfile.TemporaryDirectory(dir=work, prefix="store-") as scratch, ckstore.init(Path(scratch)) as store:
            found = [item for item in store.plan([directory], recursive=True) if item.run and item.step is not None]
            planned = {item.step: item.path for item in sorted(found, key=lambda item: item.step or 0)}
            if len(planned) < 2:
                raise ValueError(f"{directory} has fewer than two checkpoints with a step.")
            sizes, stored, seconds = [], [size_of(Path(scratch))], time.process_time()
            for step, path in planned.items():
                taken = store.ingest(path, run=directory.name, step=step, policy=policy, hot=0)
                sizes.append(taken.version.original_bytes)
                stored.append(size_of(Path(scratch)))
                report(f"{path}, {name}: 1/{sizes[-1] / max(1, stored[-1] - stored[-2]):.1f}")
            seconds = time.process_time() - seconds
            if problems := store.verify().problems:
                raise AssertionError(problems[0])
            off = store[taken.version.number].deviations().items()
            deviation = max((item.relative for path, item in off if not role_of(text_to_path(path))), default=0.0)
            added = [after - before for before, after in pairwise(stored)]
            rows.append(Row(directory.name, name, sizes, added, seconds, deviation))
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Print the table of the series named on the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/public", description=__doc__)
    parser.add_argument("directory", nargs="+", type=Path, help="each holds the checkpoints of one run")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".cache", help="directory for stores")
    chosen = parser.parse_args(arguments)
    chosen.work.mkdir(parents=True, exist_ok=True)
    head = ["series", "policy", "versions", "original", "ratio", "later versions", "CPU s/GB", "deviation"]
    rows = []
    for directory in chosen.directory:
        rows += measure(directory, chosen.work, lambda line: print(line, file=sys.stderr))
    print(table(head, [row.cells() for row in rows], text=2))


if __name__ == "__main__":
    main()
