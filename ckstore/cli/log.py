"""`ckstore log`: list versions. Imports no numerical package, so that it answers at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.graph import drawn
from ckstore.cli.output import (
    json_option,
    print_json,
    print_line,
    print_table,
    ratio_text,
    size_text,
    time_text,
)
from ckstore.cli.verb import RunName, open_store, option, verb
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.storage.catalog import Catalog

#: Columns of the table, and further ones that appear where a version differs from the default.
_COLUMNS = ("version", "run", "step", "parent", "kind", "depth", "size", "stored", "ratio", "cost", "tags", "created")
_BESIDE_GRAPH = ("version", "run", "step", "size", "stored", "tags", "created")
_IF_ANY: dict[str, Callable[[dict[str, Any]], bool]] = {
    "superseded": lambda record: record["superseded"],
    "fidelity": lambda record: record["fidelity"] != "exact",
    "dropped": lambda record: bool(record["dropped"]),
}

#: Most metrics in the table.
_METRICS = 4

#: Bytes of no version are mentioned from this part of the store on, after one of these changes.
_NOTED = 1 / 8
_FREEING = ("forget", "thin", "drop", "rebase")

#: Text of a cell, by column.
_TEXTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "kind": lambda record: "hot" if record["hot"] else "base" if record["base"] else "delta",
    "size": lambda record: size_text(record["bytes"]),
    "stored": lambda record: size_text(record["stored"]),
    "ratio": lambda record: ratio_text(record["bytes"], record["stored"]),
    "cost": lambda record: f"{record['cost']:.2f}x",
    "tags": lambda record: ", ".join(record["tags"]) or None,
    "created": lambda record: time_text(record["created"]),
    "superseded": lambda record: "yes" if record["superseded"] else None,
    "dropped": lambda record: ", ".join(record["dropped"]) or None,
}
#: Headings that differ from the name of the column.
_HEADINGS = {"created": "created (UTC)"}
_LEFT = ("graph", "run", "kind", "tags", "created", "superseded", "fidelity", "dropped")


@verb(
    ("ckstore log", "list all versions, oldest first"),
    ("ckstore log gpt -n 5", "list the last five versions of a run"),
    ("ckstore log --where 'val_loss<2.5' --sort val_loss", "find the best versions"),
    ("ckstore log --columns version,step,val_loss", "choose columns"),
    ("ckstore log --graph", "draw forks and runs, newest first"),
    exit_codes=[13],
)
@click.argument("run", required=False, type=RunName())
@option("--run RUN", "Same as RUN.", name="run_option", type=RunName())
@click.option("-n", "--last", "limit", metavar="N", type=click.IntRange(min=0), help="List only the last N versions.")
@option("--where CONDITION", "List matching versions: step>=100, tags=best, loss=NaN.", multiple=True)
@option("--sort COLUMN", "Sort by a column or metric; descending with - before it.")
@option("--columns COLUMN,...", "Show these columns and metrics.")
@option("--graph", "Draw the lineage: newest first, a line from each version to its parent.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    run: str | None,
    run_option: str | None,
    limit: int | None,
    where: tuple[str, ...],
    sort: str | None,
    columns: str | None,
    graph: bool,
    as_json: bool,
) -> None:
    """List versions, oldest first.

    KIND is base (stored in full), delta (stored against other versions) or hot (not encoded yet). DEPTH is the number
    of deltas back to a base, STORED the bytes that the version added to the store, COST the restore cost as a multiple
    of a full, exact copy's. SUPERSEDED marks versions after one that the run went back to. DROPPED lists dropped
    tensors. The first metrics follow.

    A CONDITION compares a column or metric by =, !=, <, <=, > or >=. Columns are those of --json.
    """
    if run is not None and run_option is not None and run != run_option:
        raise UsageError("RUN is given twice; name one run.")
    if graph and (sort is not None or as_json):
        raise UsageError("--graph has an order and a form of its own; leave --sort and --json out.")
    with open_store(ctx) as store:
        if limit is None or where or sort is not None:
            records = store.log(run or run_option).where(*where)
        else:
            records = store._table(store._catalog.last_versions(limit, run or run_option))
        if sort is not None:
            records = records.sorted_by(sort)
        garbage = _garbage(store._repository.catalog)
    if limit is not None:
        del records[: max(len(records) - limit, 0)]
    names = [name.strip() for name in columns.split(",")] if columns else []
    derived = [name for name in names if name in _TEXTS]
    if as_json:
        print_json(records.columns(*names) if names else records)
        return
    records.columns(*(name for name in names if name not in derived))  # Raises for unknown ones.
    if not records:
        if not where:
            print_line("No versions yet; `ckstore ingest` stores the first.", err=True)
        return
    if not names:
        metrics = dict.fromkeys(
            name for record in records for name, value in record["metrics"].items() if isinstance(value, int | float)
        )
        names = [
            *(_BESIDE_GRAPH if graph else _COLUMNS),
            *(name for name, differs in _IF_ANY.items() if any(map(differs, records))),
        ]
        names += list(metrics)[:_METRICS]
    rows = [[_TEXTS[name](record) if name in _TEXTS else _cell(record, name) for name in names] for record in records]
    if graph:
        cells = {record["version"]: row for record, row in zip(records, rows, strict=True)}
        lineage = sorted(((record["version"], record["parent"]) for record in records), reverse=True)
        blank = [""] * len(names)
        rows = [[text, *(blank if number is None else cells[number])] for number, text in drawn(lineage)]
        names = ["graph", *names]
    headings = [_HEADINGS.get(name, name) for name in names]
    print_table(headings, rows, right=[place for place, name in enumerate(names) if name not in _LEFT])
    if garbage:
        print_line(
            f"ckstore: {size_text(garbage)} of the store belong to no version in this list; `ckstore stats` says how "
            "many of them `ckstore gc` would free.",
            err=True,
        )


def _garbage(catalog: Catalog) -> int:
    """Return the bytes that no version has added, if they are many and came since the last `gc`; else 0."""
    totals, collected = catalog.totals(), catalog.collected()
    unclaimed = totals.bytes - totals.stored_bytes
    if unclaimed <= _NOTED * totals.bytes or not any(
        record["change"] in _FREEING and record["created"] > collected for record in catalog.records()
    ):
        return 0
    return unclaimed


def _cell(record: dict[str, Any], name: str) -> object:
    value = record[name] if name in record else record["metrics"].get(name)
    return f"{value:.6g}" if isinstance(value, float) else value
