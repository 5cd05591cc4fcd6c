"""`ckstore diff`: compare two versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.output import json_option, print_json, print_line, print_table
from ckstore.cli.verb import VersionName, open_store, option, verb, version_of

if TYPE_CHECKING:
    from ckstore.reading.comparison import DiffReport, TensorChange

#: Lines of the summary by subtree.
_SUMMARY = 10


@verb(
    ("ckstore diff gpt@0 gpt@400", "list added, removed and changed tensors"),
    ("ckstore diff 3 4 'model/*' --values", "measure how far values moved"),
    exit_codes=[13],
)
@click.argument("before", type=VersionName())
@click.argument("after", type=VersionName())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@option("--values", "Decode changed tensors; print the largest and root mean square difference of floats.")
@json_option
@click.pass_context
def command(ctx: click.Context, before: str, after: str, globs: tuple[str, ...], values: bool, as_json: bool) -> None:
    """Count and list the tensors that differ between two versions.

    A tensor is added, removed, or has another dtype, shape or values in version AFTER. GLOB selects paths as in
    `ckstore ls`. Values are compared by stored ids; tensors that share an object with others, as small tensors do, are
    decoded. The comparison is bit for bit: 0.0 and -0.0 differ, and a NaN equals itself.
    """
    with open_store(ctx) as store:
        left, right = version_of(store, before), version_of(store, after)
        report = store.diff(left, right, globs, values=values)
        dropped = {version.number: version.dropped for version in (left, right)}
    if as_json:
        print_json([_object(change, values) for change in report.changes])
        return
    counts = {kind: report.count(kind) for kind in ("added", "removed", "shape", "values")}
    named = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    same = report.compared - len(report.changes)
    print_line(f"{named or 'no difference'}; {same} of {report.compared} tensors are the same.")
    if not globs and len(report.changes) > _SUMMARY:
        _print_subtrees(report)
    if report.changes:
        headings = ["change", "dtype", "shape", *(["max abs", "rms"] if values else []), "path"]
        print_table(headings, [_cells(change, values) for change in report.changes], (3, 4) if values else ())
    for number, paths in dropped.items():
        if report.changes and paths:
            print_line(f"ckstore: Version {number} has dropped {', '.join(paths)}.", err=True)


def _print_subtrees(report: DiffReport) -> None:
    """Print the numbers of changes in the deepest subtrees that fit in a summary."""
    depth, groups = 1, Counter(change.path.split("/")[0] for change in report.changes)
    while depth < _SUMMARY:
        finer = Counter("/".join(change.path.split("/")[: depth + 1]) for change in report.changes)
        if len(finer) > _SUMMARY:
            break
        depth, groups = depth + 1, finer
    for path, count in groups.most_common(_SUMMARY):
        print_line(f"  {count:>5}  {path}")


def _object(change: TensorChange, values: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"path": change.path, "change": change.change}
    for name, form in (("before", change.before), ("after", change.after)):
        if form is not None:
            found[name] = {"dtype": form.dtype, "shape": list(form.shape)}
    if values and change.change == "values":
        found |= {"max_abs": change.max_abs, "rms": change.rms}
    return found


def _cells(change: TensorChange, values: bool) -> list[object]:
    forms = [form for form in (change.before, change.after) if form is not None]
    cells: list[object] = [change.change, _both(form.dtype for form in forms)]
    cells.append(_both("x".join(map(str, form.shape)) or "()" for form in forms))
    if values:
        cells += [None if value is None else f"{value:.6g}" for value in (change.max_abs, change.rms)]
    return [*cells, change.path]


def _both(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(texts))
