"""`ckstore undo`: bring back forgotten versions."""

from __future__ import annotations

import click

from ckstore.cli.output import counted, json_option, name_of, print_json, print_line
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore undo", "bring back the versions that were forgotten last; again, those before"),
    ("ckstore log --forgotten", "list the versions that it can bring back"),
    exit_codes=[12, 13],
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Bring back forgotten versions: those of the last `ckstore forget`.

    Their bytes, numbers and metrics are as before. `ckstore gc` keeps forgotten versions for seven days, but none
    that a policy or `ckstore forget --prune` removed.
    """
    with open_store(ctx, "a") as store:
        rows = store.undo().versions
    if as_json:
        print_json([{"version": row.number, "run": row.run, "step": row.step} for row in rows])
        return
    for row in rows:
        print_line(f"{name_of(row)} (version {row.number})")
    print_line(f"Brought back {counted(len(rows), 'version')}.")
