"""Options that several verbs have: how faithful versions are to be, and which of those that are named are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ckstore.cli.verb import RunName, VersionName
from ckstore.policy import FIDELITIES, QUALITY, SCHEMES

Function = Callable[..., Any]

_POLICY = (
    click.option(
        "--fidelity",
        type=click.Choice(FIDELITIES),
        help="Exact: every bit comes back. Coarse: floats are quantised.  [default: see `ckstore policy`]",
    ),
    click.option("--scheme", type=click.Choice(SCHEMES), help="How coarse versions are quantised.  [default: lattice]"),
    click.option(
        "--quality",
        metavar="Q",
        type=float,
        help=f"Coarse: steps in units of what training moved; smaller is finer.  [default: {QUALITY:g}]",
    ),
    click.option("--max-abs-error", metavar="X", type=float, help="Coarse: no element differs by more than X."),
    click.option(
        "--max-rel-error",
        metavar="X",
        type=float,
        help="Coarse: by no more than X times its tensor's root mean square.",
    ),
)

_SELECTION = (
    click.argument("versions", metavar="[VERSION]...", nargs=-1, type=VersionName()),
    click.option("--run", metavar="RUN", type=RunName(), help="All versions of this run."),
    click.option(
        "--keep-last",
        metavar="N",
        type=click.IntRange(min=1),
        help="Keep the last N of the named versions as they are.",
    ),
    click.option(
        "--keep-every",
        metavar="STEPS",
        type=click.IntRange(min=1),
        help="Keep the first of the named versions in every STEPS steps as it is.",
    ),
    click.option("--keep-tagged", is_flag=True, help="Keep the named versions that have a tag as they are."),
)


def policy_options(function: Function) -> Function:
    """Add the options that `Policy.asked` takes, under the names of its parameters."""
    return _with(function, _POLICY)


def selection_options(function: Function) -> Function:
    """Add the argument and options that `select_versions` takes, under the names of its parameters."""
    return _with(function, _SELECTION)


def _with(function: Function, options: tuple[Callable[[Function], Function], ...]) -> Function:
    for option in reversed(options):
        function = option(function)
    return function
