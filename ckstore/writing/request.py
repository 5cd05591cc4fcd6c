"""Requests: the options of an ingest, and their checks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckstore.commit.going_back import marks_of
from ckstore.commit.naming import DEFAULT_RUN, check_run, check_run_is_no_tag, policy_of
from ckstore.encoding.budget import BUDGET, checked_budget
from ckstore.errors import UsageError
from ckstore.formats.torch.live_state import LiveState, OnUnknown
from ckstore.policy import Fidelity, Policy, Retention
from ckstore.runtime.arguments import plain_fields, shown
from ckstore.runtime.provenance import CONFIG, HIDDEN, LARGEST, plain_config
from ckstore.steps import plain_number, step_of_value
from ckstore.storage.catalog import Catalog, VersionRow
from ckstore.storage.schema import DEPTH, Plain, check
from ckstore.writing.gradients import Gradients
from ckstore.writing.tuning import Search

#: The parent that is searched among all versions.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """The keywords of `Store.ingest`, for `Store.ingest_many`.

    Examples
    --------
    >>> IngestOptions(run="gpt", step=100).max_restore_cost
    """

    run: str | None = None
    step: int | None = None
    parent: str | int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    replace: bool = False
    verify: bool = False
    force: bool = False
    max_restore_cost: float | None = None
    policy: Policy | Fidelity | None = None
    search: Search | None = None
    gradients: Mapping[str, Any] | LiveState | str | os.PathLike[str] | None = None
    on_unknown: OnUnknown = "raise"
    hot: int | None = None
    allow_empty: bool = False
    config: Any = None

    def __post_init__(self) -> None:
        # The run and the step have rules of their own.
        plain_fields(self, run=None, metrics=None)
        if self.config is not None:
            object.__setattr__(self, "config", checked_config(self.config))

    @property
    def asked(self) -> Policy | None:
        """The policy that the caller gave; None for the run's."""
        return Policy(self.policy) if isinstance(self.policy, str) else self.policy


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request for an ingest, with plain integers and metrics.

    `parent` is the row of the version before this one; `source` is empty for a state dict. `read` are the metrics from
    the files: value and path of the file, by name. With `force`, damaged files are stored as opaque bytes. `heals`
    tells whether the version replaces a damaged one of the same content, tags included; `goes_back`, whether the
    parent is not the tip of the run. `bands` are those of the values (`objects/likeness.py`).
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
    search: Search | None = None
    gradients: Gradients | None = None
    read: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    force: bool = False
    heals: bool = False
    goes_back: bool = False
    bands: tuple[int, ...] = ()

    @property
    def is_hot(self) -> bool:
        """Whether the version is stored raw first: not if evaluations or gradients decide its encoding."""
        return self.policy.kept_hot > 0 and self.search is None and not self.gradients


def named_parent(catalog: Catalog, spec: str | int | None, run: str, step: int | None) -> VersionRow | None:
    """Return the named parent; by default the run's version below the step, or else its last one.

    None if there is none, or for `auto`.
    """
    if spec is None:
        latest = catalog.latest(run)
        if latest is None or step is None or latest.step in (None, step):
            return latest
        return catalog.below(run, step) or latest
    return None if spec == AUTO else catalog.resolve(spec)


def request_of(catalog: Catalog, options: IngestOptions) -> Request:
    """Check options and build a request, without gradients; the source adds its name and, if missing, the step.

    Raise `UsageError` for invalid ones.
    """
    if not isinstance(options.policy, Policy | str | None):
        raise UsageError(f"policy takes a ckstore.Policy, `exact` or `coarse`, not {shown(options.policy)}.")
    if not isinstance(options.search, Search | None):
        raise UsageError(f"search takes a ckstore.Search, not {shown(options.search)}.")
    run = DEFAULT_RUN if options.run is None else options.run
    current = policy_of(catalog, run)
    asked = options.asked
    # A caller that asks for one coarse version wants few bytes immediately.
    kept = current.hot if asked is None or asked.hot is None else asked.hot
    if asked is not None and asked.hot is None and asked.is_coarse:
        kept = 0
    # Retention is a property of the run.
    policy = replace(asked or current, hot=kept if options.hot is None else options.hot, retention=Retention())
    if options.search is not None:
        if asked is not None and not asked.is_coarse:
            raise UsageError("A search finds a coarse setting; leave the exact policy out.")
        if asked is not None and asked.is_bounded:
            raise UsageError("Give an error bound or a search, not both.")
        policy = replace(policy, fidelity="coarse", max_abs_error=None, max_rel_error=None)
    check_run(run)
    check_run_is_no_tag(catalog, run)
    return Request(
        run=run,
        step=checked_step(options.step),
        metrics=plain_metrics(
            checked_metrics(options.metrics) | ({} if options.config is None else {CONFIG: options.config})
        ),
        replace=options.replace,
        verify=options.verify,
        budget=BUDGET if options.max_restore_cost is None else checked_budget(options.max_restore_cost),
        policy=policy,
        search=options.search,
        force=options.force,
    )


def checked_step(step: Any) -> int | None:
    """Return a step as a plain integer; raise `UsageError` unless it is an integer of at most 64 bits."""
    if step is None:
        return None
    number = step_of_value(step)
    if number is None:
        raise UsageError(f"A step must be an integer of at most 64 bits, not {shown(step)}.")
    return number


def checked_config(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values; raise `UsageError` for one that is too large or no mapping."""
    try:
        plain = plain_config(config)
        check({CONFIG: plain}, Plain)
    except TypeError as error:
        raise UsageError(f"`config` takes a mapping, a namespace or a dataclass, not {shown(config)}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`config` cannot be stored ({error}); give plain values in few levels.") from error
    size = len(json.dumps(plain))
    if size > LARGEST:
        raise UsageError(
            f"The configuration has {size:,} bytes as JSON; give the settings that matter, up to {LARGEST:,}."
        )
    return plain


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metrics of the user; raise `UsageError` for a name that has another meaning."""
    for name in HIDDEN:
        if name in (metrics or {}):
            raise UsageError(f"A metric cannot be called {name}, as a version has that besides; choose another name.")
    return dict(metrics or {})


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as plain JSON values, NaN and infinities as text.

    NumPy scalars, and arrays and tensors without axes, are their numbers. Raise `UsageError` for any other value.
    """
    if isinstance(metrics, dict) and not metrics:
        return {}

    def item(value: Any) -> Any:
        if (number := plain_number(value)) is not value:
            return number
        raise TypeError(f"{type(value).__name__} is not a plain value")

    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(metrics), default=item), parse_constant=str)
        check(kept, Plain)
    except RecursionError:
        raise UsageError(f"Metrics must not be nested more than {DEPTH} levels deep.") from None
    except (TypeError, ValueError) as error:
        reason = "an integer has thousands of digits" if "integer string conversion" in str(error) else error
        raise UsageError(f"Metrics must be plain numbers and strings ({reason}).") from error
    return kept


def existing_of(catalog: Catalog, request: Request) -> VersionRow | None:
    """Return the version at the run and step; a superseded one if the run goes back to it or its descendants."""
    if request.step is None:
        return None
    if request.goes_back and request.parent is not None:
        for row in marks_of(catalog, request.run, request.parent.number).present:
            if row.step == request.step:
                return row
    return catalog.at_step(request.run, request.step)
