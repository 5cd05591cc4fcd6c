"""`ckstore diff`: compare two versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.output import json_option, percent_text, print_json, print_line, print_table
from ckstore.cli.verb import VersionName, open_store, option, verb, version_of
from ckstore.runtime.provenance import CONFIG, MADE

if TYPE_CHECKING:
    from ckstore.reading.comparison import Sort, TensorChange
    from ckstore.version import Version

#: Lines of the summary by subtree.
_SUMMARY = 10

#: Share of changed elements below which their number is shown.
_FEW = 0.001

#: Characters of the longest bar.
_BAR = 10


@verb(
    ("ckstore diff gpt@0 gpt@400", "list added, removed and changed tensors, the largest drift first"),
    ("ckstore diff 3 4 'model/*' --sort share", "sort by the share of changed elements"),
    exit_codes=[13],
)
@click.argument("before", type=VersionName())
@click.argument("after", type=VersionName())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@option(
    "--sort",
    "Order of tensors with other values.",
    type=click.Choice(["drift", "path", "share", "rms"]),
    default="drift",
    show_default=True,
)
@json_option
@click.pass_context
def command(ctx: click.Context, before: str, after: str, globs: tuple[str, ...], sort: Sort, as_json: bool) -> None:
    """List the tensors that differ between two versions: structure first, then values.

    The comparison is bit for bit: 0.0 and -0.0 differ, and a NaN equals itself. GLOB selects paths as in `ckstore ls`.
    Renamed tensors are compared under their names in AFTER, and a line says so.

    CHANGED is the share of elements that differ; DRIFT the norm of the difference, relative to the norm before, with a
    bar relative to the largest; COSINE that of the angle between both. Infinities and NaNs are counted, and left out of
    these numbers. Tensors of one element, mostly counters and schedules, come last. Without GLOBs, differences between
    the configurations and origins of the versions come first.
    """
    from ckstore.reading.renames import renamed_text

    with open_store(ctx) as store:
        left, right = version_of(store, before), version_of(store, after)
        report = store.diff(left, right, globs, sort=sort)
        dropped = {version.number: version.dropped for version in (left, right)}
        origins = [_origin(version) for version in (left, right)]
    if as_json:
        print_json([_object(change) for change in report.changes])
        return
    counts = {kind: report.count(kind) for kind in ("added", "removed", "shape", "dtype", "values")}
    named = ", ".join(f"{count} {'changed' if kind == 'values' else kind}" for kind, count in counts.items() if count)
    print_line(f"{named or 'no difference'}; {len(report.changes)} of {report.compared} tensors differ.")
    if report.renames:
        print_line(f"{renamed_text({former: path for path, former in report.renames.items()})}.")
    if not globs:
        _print_origins(*origins)
    if not globs and len(report.changes) > _SUMMARY:
        _print_subtrees(report.changes)
    structure = [change for change in report.changes if change.change != "values"]
    if structure:
        print_table(["change", "dtype", "shape", "path"], map(_structure_cells, structure))
    _print_values([change for change in report.changes if change.change == "values"])
    for number, paths in dropped.items():
        if report.changes and paths:
            print_line(f"ckstore: Version {number} has dropped {', '.join(paths)}.", err=True)


def _origin(version: Version) -> dict[str, Any]:
    """Return the configuration and the origin of a version by path."""
    from ckstore.table import flat

    return flat(dict(version.config), CONFIG) | flat(dict(version.made), MADE)


def _print_origins(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print the values of the configuration and the origin that differ."""
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            values = ("-" if value is None else value for value in (before.get(name), after.get(name)))
            print_line(f"  {name}  {' -> '.join(map(str, values))}")


def _print_subtrees(changes: Sequence[TensorChange]) -> None:
    """Print the numbers of changes in the deepest subtrees that fit in a summary."""
    depth, groups = 1, Counter(change.path.split("/")[0] for change in changes)
    while depth < _SUMMARY:
        finer = Counter("/".join(change.path.split("/")[: depth + 1]) for change in changes)
        if len(finer) > _SUMMARY:
            break
        depth, groups = depth + 1, finer
    for path, count in groups.most_common(_SUMMARY):
        print_line(f"  {count:>5}  {path}")


def _print_values(changes: Sequence[TensorChange]) -> None:
    """Print the tensors with other values, and name the ones with infinities or NaNs."""
    if not changes:
        return
    drifts = [change.drift for change in changes if change.drift is not None and not change.is_scalar]
    most = max((drift for drift in drifts if drift < float("inf")), default=0.0)
    rows = []
    for change in changes:
        drift = 0.0 if change.drift is None or change.drift != change.drift else min(change.drift, most)
        bar = "█" * round(_BAR * drift / most) if most and not change.is_scalar else ""
        numbers = [None if value is None else f"{value:.4g}" for value in (change.rms, change.max_abs)]
        cosine = None if change.cosine is None else f"{change.cosine:.6f}"
        shown = None if change.drift is None else f"{change.drift:.4g}"
        rows.append([_share_text(change), shown, bar or "▏", cosine, *numbers, change.path])
    print_table(["changed", "drift", "", "cosine", "rms", "max abs", "path"], rows, (0, 1, 3, 4, 5))
    for change in changes:
        if change.nonfinite is not None and any(change.nonfinite):
            print_line("{} has {} infinities and NaNs before, {} after.".format(change.path, *change.nonfinite))


def _share_text(change: TensorChange) -> str:
    """Return the share of changed elements; their number, if they are few of many."""
    share, elements = change.share or 0.0, prod(change.after.shape) if change.after is not None else 0
    return f"{share * elements:,.0f} of {elements:,}" if share < _FEW else percent_text(share)


def _object(change: TensorChange) -> dict[str, Any]:
    return {name: value for name, value in asdict(change).items() if value is not None or change.change == "values"}


def _structure_cells(change: TensorChange) -> list[object]:
    forms = [form for form in (change.before, change.after) if form is not None]
    shapes = ("x".join(map(str, form.shape)) or "()" for form in forms)
    return [change.change, _both(form.dtype for form in forms), _both(shapes), change.path]


def _both(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))
