"""Finds the most aggressive setting of a scheme under which an evaluation of the model stays within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ckstore.errors import UsageError
from ckstore.lineage.search import Cube, dynaquant_cube, ladder
from ckstore.policy import Policy
from ckstore.reading.checkout import checkout

if TYPE_CHECKING:
    from ckstore.objects.documents import VersionDocument
    from ckstore.reading.stored_version import StoredVersion
    from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Qualities that are tried: half an octave apart, because steps are powers of two.
QUALITIES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0, 11.2, 16.0)

#: The qualities that stand for 4 bits to 1 bit of LC-Checkpoint.
LC_QUALITIES = (0.5, 1.5, 2.5, 3.5)

#: The part of what the evaluation says that is tolerated by default: Inshrinkerator's of a checkpoint.
TOLERANCE = 0.05

#: Bytes that are copied at once.
_BLOCK = 4 << 20

Evaluate = Callable[[Path], float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a user tolerates, and how it is measured.

    Attributes
    ----------
    evaluate
        Given the path of a checkpoint (a file, or a directory where one was ingested), says how good the model is: a
        loss, or with `maximise` an accuracy.
    tolerance
        By how much, as a part of what it says of the original, the result may be worse.
    maximise
        More is better.
    """

    evaluate: Evaluate
    tolerance: float
    maximise: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise UsageError(f"The degradation must be 0 or more, not {self.tolerance}.")

    def _value(self, path: Path) -> float:
        said = self.evaluate(path)
        try:
            return float(said)
        except (TypeError, ValueError) as error:
            raise UsageError(f"The evaluation gave {said!r}; let it return one number.") from error

    def reference(self, scanned: ScannedVersion) -> float:
        """What the evaluation says of the original.

        Raises
        ------
        UsageError
            It is no finite number.
        """
        with TemporaryDirectory(prefix="ckstore-") as scratch:
            value = self._value(_written(scanned, Path(scratch)))
        if not math.isfinite(value):
            raise UsageError(f"The evaluation of the original says {value}; it must be a finite number.")
        return value

    def degradation(self, version: StoredVersion, reference: float) -> float:
        """By how much a version is worse than the original, as a part of `reference`; infinite for NaN."""
        with TemporaryDirectory(prefix="ckstore-") as scratch:
            target = Path(scratch) / (
                version.document.files[0].path if not version.document.is_directory else "version"
            )
            checkout(version, target)
            value = self._value(target)
        worse = reference - value if self.maximise else value - reference
        return worse / (abs(reference) or 1.0) if math.isfinite(value) else math.inf


def search_space(policy: Policy, *, known: bool = True) -> Cube[Policy]:
    """The settings of a policy's scheme, from the gentlest to the most aggressive one.

    `known` says that there are sensitivities to prune by.
    """
    if policy.scheme == "dynaquant":
        cube = dynaquant_cube() if known else dynaquant_cube(("magnitude",))
        return Cube(cube.axes, lambda *values: replace(policy, settings=cube.build(*values)))
    qualities = LC_QUALITIES if policy.scheme == "lc" else QUALITIES
    return ladder([replace(policy, quality=quality) for quality in qualities])


def last_choice(document: VersionDocument | None, policy: Policy, cube: Cube[Policy]) -> Policy | None:
    """The setting that a search came to for the parent version; None where there was none."""
    if document is None or document.coarse is None or document.coarse.scheme != policy.scheme:
        return None
    said = document.coarse.parameters
    for candidate in cube.settings.values():
        if "degradation" in said and all(said.get(name) == value for name, value in candidate.parameters().items()):
            return candidate
    return None


def _written(scanned: ScannedVersion, scratch: Path) -> Path:
    """The files of a version as they are, below a directory."""
    if not scanned.is_directory:
        target = scratch / Path(scanned.files[0].path).name
        _copy(scanned.files[0], target)
        return target
    root = scratch / "version"
    for path, _ in scanned.directories:
        (root / path).mkdir(parents=True, exist_ok=True)
    for file in scanned.files:
        target = root / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(file, target)
    for path, points_to in scanned.links:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(points_to)
    return root


def _copy(file: ScannedFile, target: Path) -> None:
    with target.open("wb") as out:
        for start in range(0, file.layout.size, _BLOCK):
            out.write(file.source.pread(start, min(_BLOCK, file.layout.size - start)))
