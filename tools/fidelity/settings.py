"""The tiers of the bench, and the settings of one pass."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import runs
from tools.fidelity.archives import DEFAULT, Setting
from tools.fidelity.results import Results


@dataclass(frozen=True)
class Tier:
    """The number of evaluations.

    Attributes
    ----------
    points
        Evenly spaced versions from which training resumes.
    seeds
        Seeds of batches, each resumed with.
    steps
        Steps of resumed training.
    windows
        Held-out windows.
    failures
        Evenly spaced failures of one run.
    rework
        Steps after which a restored state counts as not recovered.
    qualities
        The qualities of each scheme.
    """

    points: int
    seeds: int
    steps: int
    windows: int
    failures: int
    rework: int
    qualities: tuple[float, ...]


_WHOLE = Tier(points=3, seeds=3, steps=20, windows=256, failures=10, rework=40, qualities=(1.0, 2.0, 3.0, 4.0))

TIERS = {
    "tiny": Tier(points=2, seeds=1, steps=5, windows=32, failures=2, rework=6, qualities=(2.0,)),
    "small": _WHOLE,
    "full": _WHOLE,
}


def threads(tier: str) -> int:
    """Return the threads of torch: one for tiny steps, else the number of processors."""
    return 1 if tier == "tiny" else os.cpu_count() or 1


@dataclass(frozen=True)
class Bench:
    """One pass.

    Attributes
    ----------
    name
        Of the tier.
    work
        Directory that keeps trained runs, figures and scratch files.
    schemes, qualities
        The settings of the versions: all pairs, and the default.
    report
        Called with a line on progress.
    """

    name: str
    work: Path
    schemes: tuple[str, ...]
    qualities: tuple[float, ...]
    report: Callable[[str], None]

    @property
    def tier(self) -> Tier:
        """The number of evaluations."""
        return TIERS[self.name]

    @property
    def kept(self) -> Path:
        """The directory of this tier's figures and files."""
        return self.work / "fidelity" / self.name

    @property
    def results(self) -> Results:
        """The existing figures."""
        return Results(self.kept / "results", self.report)

    @property
    def settings(self) -> list[Setting]:
        """The default, and every scheme at every quality."""
        wanted = [Setting(scheme, quality) for scheme in self.schemes for quality in self.qualities]
        return [DEFAULT, *(setting for setting in wanted if setting != DEFAULT)]

    def run(self, name: str) -> list[Path]:
        """Return checkpoints of a trained run; train a missing one."""
        return runs.train(
            name, self.work / "runs" / self.name, tier=self.name, report=lambda line: self.report(f"{name} {line}")
        )

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Return a directory that is removed afterwards."""
        self.kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.kept, prefix="scratch-") as name:
            yield Path(name)
