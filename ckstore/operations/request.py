"""What is asked for of a version to be ingested, checked before anything is read."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.encoding.budget import BUDGET
from ckstore.errors import UsageError
from ckstore.operations.tuning import Tuning
from ckstore.policy import Policy
from ckstore.storage.catalog import VersionRow


def check_request(run: str, step: int | None, metrics: dict[str, Any]) -> None:
    """Raise `UsageError` for what cannot be told apart or kept, before anything is read."""
    if not run.isprintable() or run != run.strip() or "@" in run:
        raise UsageError(
            f"{run!r} cannot name a run: it has an @, blanks at its ends or what cannot be printed; choose another."
        )
    if step is not None:
        try:
            fits = not isinstance(step, bool) and -(2**63) <= operator.index(step) < 2**63
        except TypeError:
            fits = False
        if not fits:
            raise UsageError(f"{step} cannot be a step; give an integer of at most 64 bits.")
    try:
        plain(metrics)
    except (TypeError, ValueError) as error:
        raise UsageError(f"The metrics cannot be kept ({error}); give plain numbers and strings.") from error


def flat_gradients(gradients: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Gradients by path as flat float32 arrays; raises `UsageError` for what is no array of numbers."""
    flat = {}
    for path, gradient in gradients.items():
        values = gradient.detach().float().cpu().numpy() if hasattr(gradient, "detach") else gradient
        try:
            flat[path] = np.ascontiguousarray(values, np.float32).reshape(-1)
        except (TypeError, ValueError) as error:
            raise UsageError(f"The gradient of {path} is no array of numbers; give a tensor of its shape.") from error
    return flat


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics as they will be read back: what JSON has, NumPy's scalars as plain ones."""

    def item(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is no plain value")

    kept: dict[str, Any] = json.loads(json.dumps(metrics, default=item))
    return kept


@dataclass(slots=True)
class Request:
    """What the user said of the version to be, integers and metrics as plain values whatever they were given as.

    `tuning` searches the setting of the policy's scheme. `force` stores damaged files as opaque bytes. `heals` says
    that it takes the place, tags included, of a damaged version of the same content.
    """

    run: str
    step: int | None
    parent: VersionRow | None
    metrics: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    replace: bool = False
    verify: bool = False
    budget: float = BUDGET
    policy: Policy = field(default_factory=Policy)
    tuning: Tuning | None = None
    gradients: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    force: bool = False
    heals: bool = False

    def __post_init__(self) -> None:
        if self.step is not None:
            self.step = int(operator.index(self.step))
        self.metrics = plain(self.metrics)
