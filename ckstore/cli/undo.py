"""`ckstore undo`: bring back forgotten versions, and the exact values of thinned ones."""

from __future__ import annotations

import click

from ckstore.cli.output import counted, json_option, name_of, print_json, print_line
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore undo", "undo the last `ckstore forget` or `ckstore thin`; again, the one before"),
    ("ckstore log --forgotten", "list the versions that it can bring back"),
    exit_codes=[12, 13],
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Undo the last `ckstore forget` or `ckstore thin`.

    The versions have their bytes, numbers and metrics again. `ckstore gc` keeps them for seven days, but none that a
    policy or --prune forgot or thinned.
    """
    with open_store(ctx, "a") as store:
        rows = store.undo().versions
    if as_json:
        print_json([{"version": row.number, "run": row.run, "step": row.step} for row in rows])
        return
    for row in rows:
        print_line(f"{name_of(row)} (version {row.number})")
    print_line(f"Brought back {counted(len(rows), 'version')}.")
