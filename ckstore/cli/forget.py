"""`ckstore forget`: take versions out of the store."""

from __future__ import annotations

import click

from ckstore.cli.options import selection_options
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore forget gpt@100 7", "two versions"),
    ("ckstore forget gpt@100..gpt@900 --keep-every 200", "keep one version in every 200 steps"),
    ("ckstore forget --run gpt --keep-last 5 --keep-tagged", "a run but for its end and what has a tag"),
    ("ckstore forget --run gpt --keep-last 5 --dry-run", "only say which"),
    exit_codes=[12, 13],
)
@selection_options
@click.option("--dry-run", is_flag=True, help="Change nothing; say which versions would be forgotten.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    versions: tuple[str, ...],
    run: str | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_tagged: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Take versions out of the store.

    Each VERSION, or range A..B of versions of one run, or a whole run, but for what is kept. Forgotten
    versions cannot be restored. A range holds both its ends and goes by steps, between two numbers by numbers. Kept
    versions are counted in each run apart. A version with a tag is refused unless --keep-tagged keeps it.

    The bytes stay until `ckstore gc` frees what no other version needs.
    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        rows = store.forget(
            versions, run=run, keep_last=keep_last, keep_every=keep_every, keep_tagged=keep_tagged, dry_run=dry_run
        ).versions
    if as_json:
        forgotten = [{"version": row.number, "run": row.run, "step": row.step} for row in rows]
        print_json([{"versions": forgotten, "dry_run": dry_run}])
        return
    for row in rows:
        print_line(f"{name_of(row)} (version {row.number})")
    if not rows:
        print_line("Nothing to do: every version that is named is kept.")
    elif dry_run:
        print_line(f"Would forget {counted(len(rows), 'version')}.")
    else:
        print_line(f"Forgot {counted(len(rows), 'version')}; `ckstore gc` frees what no other version needs.")
