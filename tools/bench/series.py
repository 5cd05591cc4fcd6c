"""The series of checkpoints that benchmarks run on: runs trained here and real ones from public repositories."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools import runs

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Series:
    """Checkpoints of one training run.

    Attributes
    ----------
    name
        What tables call it.
    versions
        A file or a directory each, oldest first.
    """

    name: str
    versions: tuple[Path, ...]

    def files(self, index: int) -> dict[str, Path]:
        """Files of a version, by a name that is the same in every version; "" where the version is one file."""
        path = self.versions[index]
        if path.is_file():
            return {"": path}
        return {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}

    @property
    def nbytes(self) -> int:
        """Bytes of all versions."""
        return sum(file.stat().st_size for i in range(len(self.versions)) for file in self.files(i).values())


#: Public series: the pattern of their versions in the data's directory.
PUBLIC = {
    "willmore_pinn": "willmore_pinn/*.pt",
    "opt_lora": "opt_lora/checkpoint-*",
    "vdsr": "vdsr/*.pth",
    "espcn": "espcn/*.pth",
    "trades_sgd/model": "trades_sgd/model-*",
    "trades_sgd/opt": "trades_sgd/opt-*",
    "lightning_a": "lightning_a/*.ckpt",
}

#: Runs trained here that figures are given for.
TRAINED = ("gpt", "cnn", "bf16", "frozen")


def find(
    names: list[str], data: Path | None, work: Path, *, tier: str = "small", report: Callable[[str], None] = print
) -> list[Series]:
    """Series by name; trains what is not trained yet.

    Parameters
    ----------
    names
        Members of `TRAINED` or `PUBLIC`; empty for all of them.
    data
        Directory of the public series; None for `$CKSTORE_TEST_DATA` or else `../shared/data`. Where there is none,
        public series are left out and `report` says so.
    work
        Directory that keeps the trained runs.
    tier
        Of the trained runs.
    report
        Called with a line on what happens.

    Returns
    -------
    list of Series
        In the order of `TRAINED` and `PUBLIC`.
    """
    data = data or Path(os.environ.get("CKSTORE_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    found = []
    for name in TRAINED:
        if not names or name in names:
            paths = runs.train(
                name, work / "runs" / tier, tier=tier, report=lambda line, name=name: report(f"{name} {line}")
            )
            found.append(Series(name, tuple(paths)))
    for name, pattern in PUBLIC.items():
        if not names or name in names:
            paths = sorted(data.glob(pattern), key=_number)
            if paths:
                found.append(Series(name, tuple(paths)))
            else:
                report(f"{name} left out: no {pattern} in {data}")
    return found


def _number(path: Path) -> tuple[float, str]:
    """Sort key: the last number in the name; names without one ("last.ckpt") come last."""
    numbers = re.findall(r"\d+", path.stem)
    return (float(numbers[-1]) if numbers else float("inf"), path.name)
