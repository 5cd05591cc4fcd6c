"""`ckstore log`: list versions. Imports no numerical package, so that it answers at once."""

from __future__ import annotations

from typing import Any

import click

from ckstore.cli.output import (
    json_option,
    print_json,
    print_line,
    print_table,
    ratio_text,
    size_text,
    time_text,
)
from ckstore.cli.verb import RunName, open_store, verb
from ckstore.errors import UsageError


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
        records: list[dict[str, Any]] = store.log(run or run_option)
    if limit is not None:
        records = records[max(len(records) - limit, 0) :]
    if as_json:
        print_json(records)
        return
    if not records:
        print_line("No versions yet; `ckstore ingest` stores the first.", err=True)
        return
    coarse = any(record["fidelity"] != "exact" for record in records)
    dropped = any(record["dropped"] for record in records)
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
                *(record[name] for name in ("version", "run", "step", "parent")),
                *("hot" if record["hot"] else "base" if record["base"] else "delta", record["depth"]),
                *(size_text(record["bytes"]), size_text(record["stored"])),
                *(ratio_text(record["bytes"], record["stored"]), f"{record['cost']:.2f}x"),
                *(", ".join(record["tags"]) or None, time_text(record["created"])),
                *((record["fidelity"],) if coarse else ()),
                *((", ".join(record["dropped"]) or None,) if dropped else ()),
            )
            for record in records
        ],
        right=(0, 2, 3, 5, 6, 7, 8, 9),
    )
