"""Tuning: finds the most aggressive setting of a scheme within a tolerance of an evaluation of the model."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import StatisticsError, linear_regression
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from ckstore.codecs.scheme import QUALITIES
from ckstore.codecs.schemes import LATTICE, scheme_of
from ckstore.errors import UsageError
from ckstore.lineage.search import Cube, dynaquant_cube, ladder
from ckstore.policy import Policy
from ckstore.reading.checkout import checkout

if TYPE_CHECKING:
    from ckstore.objects.documents import VersionDocument
    from ckstore.reading.stored_version import StoredVersion
from ckstore.runtime.arguments import FLAG, FLOAT, FUNCTION, NUMBER, WHOLE, plain_fields
from ckstore.scanning.scanned import ScannedFile, ScannedVersion

#: Binary logarithm of the growth of a loss from one quality to the next: it rises by the square of the step.
_GROWTH = 1.0

#: Default tolerance, as a fraction of the original's evaluation: Inshrinkerator's for a checkpoint.
TOLERANCE = 0.05

#: Weight of the size of a version that is pruned by sensitivity. Gradients are noisy: other elements are pruned in
#: each version. Magnitude prunes the same elements again, which saves bytes from the next version on.
_NOISE = 1.25

#: Bytes of each copied block.
_BLOCK = 4 << 20

Evaluate = Callable[[Path], float]


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the coarsest setting of a scheme that an evaluation of the model tolerates.

    If no setting is good enough, the version is stored exactly.

    Attributes
    ----------
    evaluate
        Function from the path of a checkpoint (a file, or a directory if one was ingested) to the loss, or with
        `maximise` the accuracy.
    max_degradation
        Largest tolerated loss, as a fraction of the original's evaluation.
    max_rework
        Instead of `max_degradation`: the steps of training that the loss may be worth, by the fall of the loss that the
        run's last versions have as a metric. Without one that falls, the version is stored exactly.
    maximise
        Whether a higher evaluation is better.
    jobs
        Number of concurrent evaluations, each in its own thread; the result is the same.

    Raises
    ------
    UsageError
        `jobs` is below 1, a limit is negative or not finite, or `max_rework` is combined with `maximise`.

    Examples
    --------
    >>> search = Search(evaluate=lambda path: 2.5, max_degradation=0.01)
    >>> store.ingest({"weight": np.random.randn(300, 300)}, policy="coarse", search=search).version.fidelity
    'coarse'
    """

    evaluate: Evaluate
    max_degradation: float = TOLERANCE
    maximise: bool = False
    jobs: int = 1
    max_rework: float | None = None

    def __post_init__(self) -> None:
        plain_fields(self, evaluate=FUNCTION, max_degradation=NUMBER, maximise=FLAG, jobs=WHOLE, max_rework=FLOAT)
        if self.jobs < 1:
            raise UsageError(f"`jobs` must be 1 or more, not {self.jobs}.")
        for name in ("max_degradation", "max_rework"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"`{name}` must be 0 or more, not {value}.")
        if self.max_rework is not None and self.maximise:
            raise UsageError("`max_rework` follows the fall of a loss; leave `maximise` out.")

    def has_tolerance(self, fall: float | None) -> bool:
        """Return whether the tolerance is known: `max_rework` follows the fall of a loss."""
        return self.max_rework is None or fall is not None

    def tolerance(self, reference: float, fall: float | None) -> float:
        """Return the tolerated degradation: `max_degradation`, or `max_rework` steps with a `fall` of the loss each."""
        if self.max_rework is None or fall is None:
            return self.max_degradation
        return self.max_rework * fall / (abs(reference) or 1.0)

    def _value(self, path: Path) -> float:
        result = self.evaluate(path)
        try:
            return float(result)
        except (TypeError, ValueError) as error:
            raise UsageError(f"The evaluation returned {result!r}; it must return one number.") from error

    def reference(self, scanned: ScannedVersion) -> float:
        """Return the evaluation of the original; raise `UsageError` unless it is a finite number."""
        with TemporaryDirectory(prefix="ckstore-") as scratch:
            value = self._value(_written(scanned, Path(scratch)))
        if not math.isfinite(value):
            raise UsageError(f"The evaluation of the original returned {value}; it must be a finite number.")
        return value

    def degradation(self, path: Path, reference: float) -> float:
        """Return the loss of quality of a checkpoint as a fraction of `reference`; infinity for NaN."""
        value = self._value(path)
        worse = reference - value if self.maximise else value - reference
        return worse / (abs(reference) or 1.0) if math.isfinite(value) else math.inf


class Trials:
    """Trial versions under different settings, each written and evaluated once; several run at the same time.

    `reference` is the evaluation of the original. `written` writes the version under a policy into a directory and
    returns its path; one thread calls it.
    """

    def __init__(self, search: Search, reference: float, written: Callable[[Policy, Path], Path]) -> None:
        self._search = search
        self._reference = reference
        self._written = written
        self._begun: dict[Policy, Future[float]] = {}

    def __enter__(self) -> Self:
        self._scratch = TemporaryDirectory(prefix="ckstore-")
        self._pool = ThreadPoolExecutor(self._search.jobs, thread_name_prefix="ckstore-trial")
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._scratch.cleanup()

    def degradation(self, policy: Policy) -> float:
        """Return the loss of quality under a policy."""
        if policy in self._begun:
            return self._begun[policy].result()
        return self._evaluated(*self._write(policy))

    def schedule(self, policies: Sequence[Policy]) -> None:
        """Start evaluating likely next policies, up to `jobs` at a time; with one job, start none."""
        for policy in policies:
            running = sum(not trial.done() for trial in self._begun.values())
            if self._search.jobs == 1 or running == self._search.jobs:
                return
            if policy not in self._begun:
                self._begun[policy] = self._pool.submit(self._evaluated, *self._write(policy))

    def _write(self, policy: Policy) -> tuple[Path, Path]:
        place = Path(tempfile.mkdtemp(dir=self._scratch.name))
        return place, self._written(policy, place)

    def _evaluated(self, place: Path, path: Path) -> float:
        try:
            return self._search.degradation(path, self._reference)
        finally:
            shutil.rmtree(place)


def restored(version: StoredVersion, scratch: Path) -> Path:
    """Check out a version into a directory under its own name; return the path."""
    target = scratch / (version.document.files[0].path if not version.document.is_directory else "version")
    checkout(version, target)
    return target


def search_space(policy: Policy, *, known: bool = True) -> Cube[Policy]:
    """Return the settings of a policy's scheme, from the gentlest to the most aggressive.

    `known` tells whether sensitivities are known.
    """
    if policy.scheme == "dynaquant":
        cube = dynaquant_cube() if known else dynaquant_cube(("magnitude",))
        return Cube(cube.axes, lambda *values: replace(policy, settings=cube.build(*values)))
    if policy.scheme == LATTICE:
        return ladder([replace(policy, quality=quality) for quality in QUALITIES], _GROWTH)
    return ladder([replace(policy, quality=quality) for quality in scheme_of(policy.scheme).qualities])


def fall_of(before: Iterable[tuple[int, Mapping[str, Any]]]) -> float | None:
    """Return by how much a run's loss falls a step, from steps and metrics of its last versions; None unless it falls.

    A validation loss, which an evaluation resembles, comes before a training loss.
    """
    points = [
        (step, {name: value for name, value in metrics.items() if type(value) is float}) for step, metrics in before
    ]
    names = {name for _, metrics in points for name in metrics if name.endswith("loss")}
    for name in sorted(names, key=lambda name: (not re.search("val|eval|test", name), name)):
        found = [(step, metrics[name]) for step, metrics in points if math.isfinite(metrics.get(name, math.nan))]
        if len({step for step, _ in found}) > 1:
            with suppress(OverflowError, StatisticsError):  # Of huge losses or steps.
                slope = linear_regression(*zip(*found, strict=True)).slope
                return -slope if slope < 0 else None
    return None


def weight(policy: Policy, nbytes: int) -> float:
    """Return the weighted size of a version, for comparing settings."""
    by_sensitivity = policy.settings is not None and policy.settings.metric == "sensitivity"
    return nbytes * _NOISE if by_sensitivity else nbytes


def last_choice(document: VersionDocument | None, policy: Policy, cube: Cube[Policy]) -> Policy | None:
    """Return the setting that a search found for the parent version, or None."""
    if document is None or document.coarse is None or document.coarse.scheme != policy.scheme:
        return None
    stored = document.coarse.parameters
    for candidate in cube.settings.values():
        if "degradation" in stored and all(stored.get(name) == value for name, value in candidate.parameters().items()):
            return candidate
    return None


def _written(scanned: ScannedVersion, scratch: Path) -> Path:
    """Write the original files of a version into a directory; return the path."""
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
