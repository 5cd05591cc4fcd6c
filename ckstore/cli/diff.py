"""`ckstore diff`: what changed between two versions."""

from __future__ import annotations

from typing import Any

import click

from ckstore.cli.output import json_option, print_json, print_line, print_table
from ckstore.cli.verb import VersionName, open_store, verb, version_of
from ckstore.errors import NotFoundError


@verb(
    ("ckstore diff gpt@0 gpt@400", "which tensors were added, removed, or changed"),
    ("ckstore diff 3 4 'model/*' --values", "and how far their values moved"),
    exit_codes=[13],
)
@click.argument("before", type=VersionName())
@click.argument("after", type=VersionName())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("--values", is_flag=True, help="Decode what changed: largest and root mean square difference of floats.")
@json_option
@click.pass_context
def command(ctx: click.Context, before: str, after: str, globs: tuple[str, ...], values: bool, as_json: bool) -> None:
    """List the tensors that differ between two versions.

    All, or those whose path a GLOB matches, as for `ckstore ls`: tensors that were added or removed from version
    BEFORE to version AFTER, or have another dtype, shape or other values. Values are compared by the ids of what is
    stored; only what shares an object with others, as small tensors do, is decoded. Tensors are compared bit for bit:
    0.0 and -0.0 differ, and a NaN equals itself.
    """
    from ckstore.cli.comparison import Side, VersionDiff

    with open_store(ctx) as store:
        comparison = VersionDiff(Side(version_of(store, before), globs), Side(version_of(store, after), globs))
        if globs and not comparison.before.tensors and not comparison.after.tensors:
            named = " or ".join(globs)
            raise NotFoundError(f"Neither version has a tensor that matches {named}; see `ckstore ls {before}`.")
        changes = list(comparison.changes(values=values))
        compared = len(comparison.before.tensors.keys() | comparison.after.tensors.keys())
    if as_json:
        print_json(changes)
        return
    if changes:
        headings = ["change", "dtype", "shape", *(["max abs", "rms"] if values else []), "path"]
        print_table(headings, [_cells(change, values) for change in changes], (3, 4) if values else ())
    counts = {
        kind: sum(change["change"] == kind for change in changes) for kind in ("added", "removed", "shape", "values")
    }
    named = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    for row in (comparison.before.version.row, comparison.after.version.row):
        if changes and row.dropped:
            print_line(f"ckstore: Version {row.number} has dropped {', '.join(row.dropped)}.", err=True)
    print_line(f"{named or 'no difference'}; {compared - len(changes)} of {compared} tensors are the same.")


def _cells(change: dict[str, Any], values: bool) -> list[object]:
    before, after = change.get("before"), change.get("after")
    cells: list[object] = [change["change"], _both(before, after, "dtype"), _both(before, after, "shape")]
    if values:
        cells += [None if change.get(name) is None else f"{change[name]:.6g}" for name in ("max_abs", "rms")]
    return [*cells, change["path"]]


def _both(before: dict[str, Any] | None, after: dict[str, Any] | None, name: str) -> str:
    texts = [_text(side[name]) for side in (before, after) if side is not None]
    return texts[0] if len(set(texts)) == 1 else " -> ".join(texts)


def _text(value: Any) -> str:
    return "x".join(map(str, value)) or "()" if isinstance(value, list) else str(value)
