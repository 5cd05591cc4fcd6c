"""Settings shared by all rows of the speed benchmark: sizes and repetitions, checkpoints and stores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ckstore
from ckstore.policy import Fidelity
from tools.bench.series import Series, write_versions


@dataclass
class Bench:
    """One run of the benchmark.

    Attributes
    ----------
    work
        The directory of all reads and writes; its file system is measured.
    megabytes, versions
        Size of a synthetic checkpoint in MB (10^6 bytes), and the maximal number of versions of the run.
    repeat
        Rounds of operations that do not each need a version.
    chosen
        The series; None for a synthetic one.
    report
        Called with a line on progress.
    """

    work: Path
    megabytes: int = 300
    versions: int = 9
    repeat: int = 9
    chosen: Series | None = None
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    _series: dict[tuple[int, int], list[Path]] = field(default_factory=dict)

    def series(self) -> list[Path]:
        """Return the versions of the series, oldest first."""
        if self.chosen is not None:
            return list(self.chosen.versions[: self.versions])
        return self.synthetic(self.megabytes, self.versions)

    def synthetic(self, megabytes: int, versions: int) -> list[Path]:
        """Return synthetic checkpoints of one run, written at the first request."""
        key = megabytes, versions
        if key not in self._series:
            self.report(f"writing {versions} checkpoints of {megabytes} MB")
            directory = self.work / f"series-{megabytes}-{versions}"
            directory.mkdir()
            self._series[key] = write_versions(directory, megabytes, versions)
        return self._series[key]

    def store(self, fidelity: Fidelity = "exact", *, hot: int = 0) -> Path:
        """Return a store of the whole series as one run, with `hot` of its latest versions unencoded."""
        root = self.work / f"store-{fidelity}-{hot}"
        if not root.exists():
            self.report(f"filling a store, {fidelity}")
            with ckstore.init(root) as store:
                for path in self.series():
                    store.ingest(path, run="run", hot=hot, policy=fidelity)
        return root


def deepest(root: Path) -> int:
    """Return the number of the version with the longest chain in a store, the latest one of several."""
    with ckstore.open(root, "r") as store:
        return max(store.versions(), key=lambda row: (row.depth, row.number)).number
