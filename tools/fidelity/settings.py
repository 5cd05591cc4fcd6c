"""The settings of one pass of the bench."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import runs


@dataclass(frozen=True)
class Bench:
    """One pass.

    Attributes
    ----------
    name
        Of the tier of the trained runs.
    work
        Directory that keeps trained runs, figures and scratch files.
    report
        Called with a line on progress.
    """

    name: str
    work: Path
    report: Callable[[str], None]

    @property
    def kept(self) -> Path:
        """The directory of this tier's figures and files."""
        return self.work / "fidelity" / self.name

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
