"""What all rows of the speed benchmark share: how large and how often, checkpoints and stores."""

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
        Where everything is read and written; its file system is what is measured.
    megabytes, versions
        Size of a synthetic checkpoint in MB (10^6 bytes), and how many versions the run has at most.
    repeat
        Rounds of what does not need a version of its own each.
    chosen
        The series; None for a synthetic one.
    report
        Called with a line on what happens.
    """

    work: Path
    megabytes: int = 300
    versions: int = 9
    repeat: int = 9
    chosen: Series | None = None
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    _series: dict[tuple[int, int], list[Path]] = field(default_factory=dict)

    def series(self) -> list[Path]:
        """The versions of the series, oldest first."""
        if self.chosen is not None:
            return list(self.chosen.versions[: self.versions])
        return self.synthetic(self.megabytes, self.versions)

    def synthetic(self, megabytes: int, versions: int) -> list[Path]:
        """Synthetic checkpoints of one run, written when they are first asked for."""
        key = megabytes, versions
        if key not in self._series:
            self.report(f"writing {versions} checkpoints of {megabytes} MB")
            directory = self.work / f"series-{megabytes}-{versions}"
            directory.mkdir()
            self._series[key] = write_versions(directory, megabytes, versions)
        return self._series[key]

    def store(self, fidelity: Fidelity = "exact", *, hot: int = 0) -> Path:
        """A store that holds the whole series as one run, so many of its latest versions as they are."""
        root = self.work / f"store-{fidelity}-{hot}"
        if not root.exists():
            self.report(f"filling a store, {fidelity}")
            with ckstore.init(root) as store:
                for path in self.series():
                    store.ingest(path, run="run", hot=hot, policy=fidelity)
        return root


def deepest(root: Path) -> int:
    """Number of the version with the longest chain in a store, the latest one of several."""
    with ckstore.open(root, "r") as store:
        return max(store.versions(), key=lambda row: (row.depth, row.number)).number
