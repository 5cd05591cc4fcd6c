"""Options of several verbs: the fidelity of versions, and the selection of versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ckstore.cli.verb import RunName, VersionName
from ckstore.errors import UsageError
from ckstore.policy import FIDELITIES, QUALITY, SCHEMES, Fidelity, Policy, Scheme

Function = Callable[..., Any]

_POLICY = (
    click.option(
        "--fidelity",
        type=click.Choice(FIDELITIES),
        help="Store bit-exactly (lossless), or quantise floats (lossy).  [default: see `ckstore policy`]",
    ),
    click.option(
        "--scheme", type=click.Choice(SCHEMES), help="Quantisation scheme of coarse versions.  [default: lattice]"
    ),
    click.option(
        "--quality",
        metavar="Q",
        type=float,
        help=f"Coarse: step size relative to the change by training; smaller is finer.  [default: {QUALITY:g}]",
    ),
    click.option("--max-abs-error", metavar="X", type=float, help="Coarse: largest error of an element."),
    click.option(
        "--max-rel-error",
        metavar="X",
        type=float,
        help="Coarse: largest error of an element, as a fraction of the tensor's root mean square.",
    ),
)

_SELECTION = (
    click.argument("versions", metavar="[VERSION]...", nargs=-1, type=VersionName()),
    click.option("--run", metavar="RUN", type=RunName(), help="Select all versions of this run."),
    click.option(
        "--keep-last",
        metavar="N",
        type=click.IntRange(min=1),
        help="Keep the last N of the selected versions.",
    ),
    click.option(
        "--keep-every",
        metavar="STEPS",
        type=click.IntRange(min=1),
        help="Keep the first selected version of each STEPS steps: for 100, of steps 0 to 99, 100 to 199, and so on.",
    ),
    click.option("--keep-tagged", is_flag=True, help="Keep the selected versions that are tagged."),
)


def policy_of(
    fidelity: Fidelity | None,
    scheme: Scheme | None,
    quality: float | None,
    max_abs_error: float | None,
    max_rel_error: float | None,
) -> Policy | None:
    """Return the policy of the options of fidelity: coarse if one of them is for coarse versions; None without any.

    Raises
    ------
    UsageError
        Exact versions are requested with an option for coarse ones.
    """
    lossy = [value for value in (scheme, quality, max_abs_error, max_rel_error) if value is not None]
    if fidelity is None and not lossy:
        return None
    if fidelity == "exact" and lossy:
        raise UsageError("Schemes, qualities and error bounds are for coarse versions; leave --fidelity exact out.")
    return Policy(
        fidelity or "coarse", scheme or "lattice", QUALITY if quality is None else quality,
        max_abs_error, max_rel_error,
    )  # fmt: skip


def policy_options(function: Function) -> Function:
    """Add the options of fidelity, under the names of the parameters of `policy_of`."""
    return _with(function, _POLICY)


def selection_options(function: Function) -> Function:
    """Add the argument and options of a selection, under the names of the parameters of `select_versions`."""
    return _with(function, _SELECTION)


def _with(function: Function, options: tuple[Callable[[Function], Function], ...]) -> Function:
    for option in reversed(options):
        function = option(function)
    return function
