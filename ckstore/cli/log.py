"""`ckstore log`: list versions. Imports no numerical package, so that it answers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.graph import drawn
from ckstore.cli.output import (
    cell_text,
    fitting,
    json_option,
    print_csv,
    print_json,
    print_line,
    print_table,
    ratio_text,
    size_text,
    sizes_text,
    time_text,
)
from ckstore.cli.verb import RunName, format_option, open_store, option, verb
from ckstore.errors import UsageError
from ckstore.table import NO_FLOATS

if TYPE_CHECKING:
    from ckstore.storage.catalog import Catalog
    from ckstore.table import Table

#: Columns of the table, and further ones that appear where a version differs from the default.
_COLUMNS = ("version", "run", "step", "parent", "kind", "depth", "size", "stored", "ratio", "cost", "tags", "created")
_BESIDE_GRAPH = ("version", "run", "step", "size", "stored", "tags", "created")
#: Columns that a narrow terminal drops, first ones first.
_DROPPED = ("cost", "depth", "ratio", "kind", "parent", "created", "size", "stored")
_NO_VERSIONS = "No versions yet; `ckstore ingest` stores the first."
_NO_FORGOTTEN = "No version can be brought back."
_ALL = "all"
#: Columns with bytes, and the records' keys.
_SIZES = {"size": "bytes", "stored": "stored"}
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
    ("ckstore log", "list all versions, by run and step"),
    ("ckstore log gpt -n 5", "list the last five versions of a run"),
    ("ckstore log gpt wide --sort best:val_loss -n 3", "list the three best versions of two runs"),
    ("ckstore log --where 'val_loss<2.5 and config.lr<1e-3 and age<2d'", "filter"),
    ("ckstore log --columns version,step,val_loss --format csv", "choose columns"),
    ("ckstore log --graph", "draw forks and runs, newest first"),
    exit_codes=[13],
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunName())
@option("--run RUN", "Same as RUN.", name="run_option", type=RunName())
@click.option(
    "-n",
    "--limit",
    "--last",
    "limit",
    metavar="N",
    type=click.IntRange(min=0),
    help="List only the last N versions, or the first N with --sort.",
)
@option("--where CONDITION", "List matching versions: step>=100, tags=best, isnan(loss), age<2d.", multiple=True)
@option("--sort COLUMN", "Sort by a column or metric; descending with - before it, best first with best: before it.")
@option("--columns COLUMN,...", "Show these columns and metrics, or all.  [default: as many as fit in the terminal]")
@format_option
@option("--forgotten", "List the forgotten and thinned versions that `ckstore undo` can bring back, as they were.")
@option("--graph", "Draw the lineage: newest first, a line from each version to its parent.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    runs: tuple[str, ...],
    run_option: str | None,
    limit: int | None,
    where: tuple[str, ...],
    sort: str | None,
    columns: str | None,
    form: str | None,
    forgotten: bool,
    graph: bool,
    as_json: bool,
) -> None:
    """List versions, by run and step.

    KIND is base (stored in full), delta (stored against other versions) or hot (not encoded yet). DEPTH is the number
    of deltas back to a base, STORED the bytes that the version added to the store, COST the restore cost as a multiple
    of a full, exact copy's. SUPERSEDED marks versions after one that the run went back to. DROPPED lists dropped
    tensors. The first metrics follow.

    A CONDITION compares a column or metric by =, !=, <, <=, > or >=; `and` joins several. Columns are those of --json,
    and the values inside `config` and `made`, such as config.lr and made.commit.
    """
    if runs and run_option is not None and set(runs) != {run_option}:
        raise UsageError("RUN is given twice; name one run.")
    _check_forms(form, sort, graph=graph, as_json=as_json)
    with open_store(ctx) as store:
        chosen: list[str | None] = list(dict.fromkeys(runs)) or [run_option]
        if limit is None or where or sort is not None or forgotten or len(chosen) > 1:
            records = _joined([store.log(run, forgotten=forgotten) for run in chosen]).where(*where)
        else:
            records = store._table(store._catalog.last_versions(limit, chosen[0]))
        if sort is not None:
            records = records.sorted_by(sort)
        garbage = 0 if forgotten else _garbage(store._repository.catalog)
        names_of_runs = list(dict.fromkeys([*(found.name for found in store._catalog.runs()), *records.values("run")]))
    if limit is not None and sort is not None:
        del records[limit:]
    elif limit is not None:
        del records[: max(len(records) - limit, 0)]
    names = [name.strip() for name in columns.split(",")] if columns and columns != _ALL else []
    if as_json:
        print_json(records.columns(*names) if names else records)
        return
    records.columns(*(name for name in names if name not in _TEXTS and name not in _SIZES))  # Raises for unknown ones.
    if sort is None:
        records = _by_run(records, names_of_runs)
    if not records:
        if forgotten or not (where or limit == 0):
            print_line(_NO_FORGOTTEN if forgotten else _NO_VERSIONS, err=True)
        return
    if not names:
        names = _default_columns(records, graph=graph, every=columns == _ALL)
        if columns is None and form is None and not graph:
            headings = [_HEADINGS.get(name, name) for name in names]
            cells = zip(headings, *_rows(records, names), strict=True)
            names = fitting(dict(zip(names, cells, strict=True)), _DROPPED, "--columns all")
    if form == "csv":
        print_csv(names, _values(names, records))
        return
    _print_rows(records, names, graph=graph)
    if garbage:
        print_line(
            f"ckstore: {size_text(garbage)} of the store belong to no version in this list; `ckstore stats` says how "
            "many of them `ckstore gc` would free.",
            err=True,
        )


def _joined(tables: Sequence[Table]) -> Table:
    """Return the versions of several runs by number, as those of one are."""
    joined = tables[0]
    for table in tables[1:]:
        joined.extend(table)
    return joined if len(tables) == 1 else joined.sorted_by("version")


def _check_forms(form: str | None, sort: str | None, *, graph: bool, as_json: bool) -> None:
    if graph and (sort is not None or as_json):
        raise UsageError("--graph has an order and a form of its own; leave --sort and --json out.")
    if form == "csv" and (graph or as_json):
        raise UsageError("--format csv is a form of its own; leave --graph and --json out.")


def _default_columns(records: Table, *, graph: bool, every: bool) -> list[str]:
    """Return the columns that show without `--columns`, with the first metrics that are numbers, or all metrics."""
    metrics = dict.fromkeys(
        name
        for record in records
        for name, value in record["metrics"].items()
        if every or isinstance(value, int | float) or value in NO_FLOATS
    )
    names = [
        *(_BESIDE_GRAPH if graph else _COLUMNS),
        *(name for name, differs in _IF_ANY.items() if any(map(differs, records))),
    ]
    return [*names, *(metrics if every else list(metrics)[:_METRICS])]


def _print_rows(records: Table, names: Sequence[str], *, graph: bool) -> None:
    rows = _rows(records, names)
    if graph:
        cells = {record["version"]: row for record, row in zip(records, rows, strict=True)}
        lineage = sorted(((record["version"], record["parent"]) for record in records), reverse=True)
        blank = [""] * len(names)
        rows = [[text, *(blank if number is None else cells[number])] for number, text in drawn(lineage)]
        names = ["graph", *names]
    headings = [_HEADINGS.get(name, name) for name in names]
    print_table(headings, rows, right=[place for place, name in enumerate(names) if name not in _LEFT])


def _rows(records: Table, names: Sequence[str]) -> list[list[object]]:
    """Return the cells of versions."""
    columns: list[Sequence[object]] = []
    for name in names:
        if name in _SIZES:
            columns.append(sizes_text(records.values(_SIZES[name])))
        elif name in _TEXTS:
            columns.append([_TEXTS[name](record) for record in records])
        else:
            columns.append([cell_text(value) for value in records.values(name)])
    return [list(row) for row in zip(*columns, strict=True)]


def _by_run(records: Table, runs: Sequence[str]) -> Table:
    """Return versions by run, in the order of the runs; those of one run by step, then by number."""
    places = {name: place for place, name in enumerate(runs)}

    def order(record: dict[str, Any]) -> tuple[int, bool, int, int]:
        step = record["step"]
        return places[record["run"]], step is not None, step or 0, record["version"]

    return type(records)(sorted(records, key=order))


def _values(names: Sequence[str], records: Table) -> list[Sequence[object]]:
    """Return the values of columns."""
    return [
        [_TEXTS["kind"](record) for record in records] if name == "kind" else records.values(_SIZES.get(name, name))
        for name in names
    ]


def _garbage(catalog: Catalog) -> int:
    """Return the bytes that no version has added, if they are many and came since the last `gc`; else 0."""
    totals, collected = catalog.totals(), catalog.collected()
    unclaimed = totals.bytes - totals.stored_bytes
    if unclaimed <= _NOTED * totals.bytes or not any(
        record["change"] in _FREEING and record["created"] > collected for record in catalog.log_records()
    ):
        return 0
    return unclaimed
