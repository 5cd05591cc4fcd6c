"""`ckstore log`: list versions. Imports nothing that computes, so that it answers at once."""

from __future__ import annotations

import click

from ckstore.cli.output import (
    json_option,
    print_json,
    print_line,
    print_table,
    ratio_text,
    size_text,
    tags_by_version,
    time_text,
)
from ckstore.cli.verb import RunName, open_store, verb
from ckstore.errors import UsageError
from ckstore.table import version_record


@verb(
    ("ckstore log", "list all versions, oldest first"),
    ("ckstore log gpt -n 5", "list the last five versions of a run"),
    ("ckstore log --json | jq '.[] | select(.tags != [])'", "filter tagged versions"),
    exit_codes=[13],
)
@click.argument("run", required=False, type=RunName())
@click.option("--run", "run_option", metavar="RUN", type=RunName(), help="Same as RUN.")
@click.option("-n", "--last", "limit", metavar="N", type=click.IntRange(min=0), help="List only the last N versions.")
@json_option
@click.pass_context
def command(ctx: click.Context, run: str | None, run_option: str | None, limit: int | None, as_json: bool) -> None:
    """List versions, oldest first.

    KIND is base (stored in full), delta (stored against other versions) or hot (not encoded yet; see `ckstore
    compact`). DEPTH is the number of deltas between the version and a base. STORED is the number of bytes that the
    version added to the store. COST is the restore cost as a multiple of restoring an exact, full copy. WITHOUT lists
    dropped tensors.
    """
    if run is not None and run_option is not None and run != run_option:
        raise UsageError("RUN is given twice; name one run.")
    with open_store(ctx) as store:
        rows = store.catalog.versions(run or run_option)
        tags = tags_by_version(store.catalog.tags())
    if limit is not None:
        rows = rows[max(len(rows) - limit, 0) :]
    if as_json:
        print_json([version_record(row, tags.get(row.number, [])) for row in rows])
        return
    if not rows:
        print_line("No versions yet; `ckstore ingest` stores the first.", err=True)
        return
    coarse = any(row.fidelity != "exact" for row in rows)
    dropped = any(row.dropped for row in rows)
    headings = [
        "version",
        "run",
        "step",
        "parent",
        "kind",
        "depth",
        "size",
        "stored",
        "ratio",
        "cost",
        "tags",
        "created",
    ]
    print_table(
        [*headings, *(["fidelity"] if coarse else []), *(["without"] if dropped else [])],
        [
            (
                *(
                    row.number,
                    row.run,
                    row.step,
                    row.parent,
                    "hot" if row.hot else "base" if row.base else "delta",
                    row.depth,
                ),
                *(size_text(row.original_bytes), size_text(row.stored_bytes)),
                *(ratio_text(row.original_bytes, row.stored_bytes), f"{row.cost:.2f}x"),
                *(", ".join(tags.get(row.number, [])) or None, time_text(row.created)),
                *((row.fidelity,) if coarse else ()),
                *((", ".join(row.dropped) or None,) if dropped else ()),
            )
            for row in rows
        ],
        right=(0, 2, 3, 5, 6, 7, 8, 9),
    )
