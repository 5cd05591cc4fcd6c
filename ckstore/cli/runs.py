"""`ckstore runs`: list and rename runs."""

from __future__ import annotations

import click

from ckstore.cli.output import (
    cell_text,
    fitting,
    json_option,
    print_csv,
    print_json,
    print_line,
    print_table,
    sizes_text,
)
from ckstore.cli.verb import RunName, format_option, open_store, option, verb
from ckstore.errors import UsageError

_SIZES = ("size", "stored")
#: Columns that a narrow terminal drops, first ones first.
_DROPPED = ("parent", "size", "stored", "last", "tags")


@verb(
    ("ckstore runs", "list the runs: versions, steps, last version, best metrics, bytes, parent and tags"),
    ("ckstore runs gpt --rename small", "give a run another name"),
    ("ckstore forget --run gpt", "forget a run"),
    exit_codes=[12, 13],
)
@click.argument("run", required=False, type=RunName())
@option("--rename NAME", "Give RUN another name.")
@format_option
@json_option
@click.pass_context
def command(ctx: click.Context, run: str | None, rename: str | None, form: str | None, as_json: bool) -> None:
    """List runs, or rename one.

    A renamed run keeps its versions with their ids, numbers, tags and children, and its policy. Jobs that save under
    the old name begin another run. `ckstore tag RUN NAME` tags the version with the highest step of a run.
    """
    if as_json and (rename is not None or form == "csv"):
        raise UsageError("--json lists runs, in a form of its own; leave it out, or --rename and --format csv.")
    if rename is not None:
        if run is None:
            raise UsageError("Name the run, too: `ckstore runs RUN --rename NAME`.")
        with open_store(ctx, "a") as store:
            store.rename_run(run, rename)
        print_line(f"Run {run} is {rename}.")
        return
    from ckstore.table import run_records

    with open_store(ctx) as store:
        found = run_records(store._catalog.summaries(run))
    names = list(found[0]) if found else []
    if as_json:
        print_json(found)
    elif form == "csv":
        print_csv(names, [found.values(name) for name in names])
    elif not found:
        print_line("No versions yet; `ckstore ingest` stores the first.", err=True)
    else:
        columns = {
            name: sizes_text(found.values(name)) if name in _SIZES else list(map(cell_text, found.values(name)))
            for name in names
        }
        names = fitting(columns, _DROPPED, "--json")
        rows = zip(*(columns[name] for name in names), strict=True)
        print_table(names, rows, right=[place for place, name in enumerate(names) if name in ("versions", *_SIZES)])
