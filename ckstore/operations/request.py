"""What is asked for of a version to be ingested, checked before anything is read."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.encoding.budget import BUDGET
from ckstore.errors import UsageError
from ckstore.formats.torch.state_dict import OnUnknown
from ckstore.operations.naming import DEFAULT_RUN, check_run, check_run_is_no_tag, policy_of
from ckstore.operations.tuning import TOLERANCE, Tuning
from ckstore.policy import Fidelity, Policy, Retention, Scheme
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.schema import DEPTH, plain_object


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """What a caller may say of a version, as it was said; `Store.ingest` has what each means."""

    run: str | None = None
    step: int | None = None
    parent: str | int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    replace: bool = False
    verify: bool = False
    force: bool = False
    budget: float | None = None
    fidelity: Fidelity | None = None
    scheme: Scheme | None = None
    quality: float | None = None
    max_abs_error: float | None = None
    max_rel_error: float | None = None
    max_degradation: float | None = None
    evaluate: Callable[[Path], float] | None = None
    maximise: bool = False
    gradients: Mapping[str, Any] = field(default_factory=dict)
    jobs: int = 1
    on_unknown: OnUnknown = "raise"
    hot: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a version is to be: integers and metrics as plain values whatever they were given as.

    Attributes
    ----------
    parent
        The version that it is stored after.
    source
        Where it comes from, as text; empty for a state dict.
    tuning
        Searches the setting of the policy's scheme.
    force
        Damaged files are stored as opaque bytes.
    heals
        It takes the place, tags included, of a damaged version of the same content.
    """

    run: str
    step: int | None = None
    parent: VersionRow | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    replace: bool = False
    verify: bool = False
    budget: float = BUDGET
    policy: Policy = field(default_factory=Policy)
    tuning: Tuning | None = None
    gradients: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    force: bool = False
    heals: bool = False

    @property
    def is_hot(self) -> bool:
        """Whether the version is stored raw at first: not where evaluations or gradients decide how it is encoded."""
        return self.policy.kept_hot > 0 and self.tuning is None and not self.gradients


def request_of(catalog: Catalog, options: IngestOptions) -> Request:
    """What follows from options, but for what only the source tells: its name, and the step where none was given.

    Raises
    ------
    UsageError
        Something cannot be told apart or kept.
    """
    budget = BUDGET if options.budget is None else options.budget
    if not budget >= 1:
        raise UsageError(f"The restore budget must be 1 or more, not {budget}.")
    run = DEFAULT_RUN if options.run is None else options.run
    said = policy_of(catalog, run)
    asked = Policy.asked(
        options.fidelity, options.scheme, options.quality, options.max_abs_error, options.max_rel_error
    )
    # Whoever asks for one coarse version wants few bytes, and at once.
    kept = 0 if asked is not None and asked.is_coarse else said.hot
    # What becomes of older versions is the run's, and not this version's.
    policy = replace(asked or said, hot=kept if options.hot is None else options.hot, retention=Retention())
    tuning = _tuning(policy, options)
    check_run(run)
    check_run_is_no_tag(catalog, run)
    return Request(
        run=run,
        step=checked_step(options.step),
        metrics=plain_metrics(options.metrics),
        replace=options.replace,
        verify=options.verify,
        budget=budget,
        policy=policy if tuning is None else replace(policy, fidelity="coarse"),
        tuning=tuning,
        gradients=flat_gradients(options.gradients),
        force=options.force,
    )


def flat_gradients(gradients: Mapping[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    """Gradients by path as flat float32 arrays; raises `UsageError` for what is not an array of numbers."""
    flat = {}
    for path, gradient in gradients.items():
        values = gradient.detach().float().cpu().numpy() if hasattr(gradient, "detach") else gradient
        try:
            flat[path] = np.ascontiguousarray(values, np.float32).reshape(-1)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"The gradient of {path} is not an array of numbers; give a tensor of its shape."
            ) from error
    return flat


def checked_step(step: Any) -> int | None:
    """A step as a plain integer; raises `UsageError` for what is none of at most 64 bits."""
    if step is None:
        return None
    try:
        number = operator.index(step)
        fits = not isinstance(step, bool) and -(2**63) <= number < 2**63
    except TypeError:
        fits = False
    if not fits:
        raise UsageError(f"A step must be an integer of at most 64 bits, not {step}.")
    return int(number)


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as they will be read back: what JSON has; NumPy's scalars as plain ones, NaN and infinities as text.

    Raises
    ------
    UsageError
        They are something else.
    """

    def item(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is not a plain value")

    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(metrics), default=item), parse_constant=str)
        plain_object([kept])
    except RecursionError:
        raise UsageError(f"Metrics must not be nested more than {DEPTH} levels deep.") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"Metrics must be plain numbers and strings ({error}).") from error
    return kept


def _tuning(policy: Policy, options: IngestOptions) -> Tuning | None:
    if options.evaluate is None:
        if options.max_degradation is None and options.jobs == 1:
            return None
        if options.max_degradation is None:
            raise UsageError(
                "Jobs are evaluations that run at once; give an evaluation, as with --eval, or leave them."
            )
        raise UsageError("A tolerated degradation needs an evaluation that measures it; give one, as with --eval.")
    if policy.is_bounded:
        raise UsageError("Give an error bound or a tolerated degradation, not both.")
    tolerance = TOLERANCE if options.max_degradation is None else options.max_degradation
    return Tuning(options.evaluate, tolerance, options.maximise, options.jobs)
