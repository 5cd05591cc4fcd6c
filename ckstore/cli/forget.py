"""`ckstore forget`: remove versions from the store."""

from __future__ import annotations

from typing import Any

import click

from ckstore.cli.options import selection_options
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line, size_text
from ckstore.cli.verb import open_store, option, verb


@verb(
    ("ckstore forget gpt@100 7", "forget two versions"),
    ("ckstore forget gpt@100..gpt@900 --keep-every 200", "keep the first version of each 200 steps"),
    ("ckstore forget --run gpt --keep-last 5 --keep-tagged", "keep the last five and tagged versions of a run"),
    ("ckstore forget --run gpt --keep-last 5 --dry-run", "preview"),
    exit_codes=[12, 13],
)
@selection_options
@option("--dry-run", "Change nothing; list the versions.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, versions: tuple[str, ...], dry_run: bool, as_json: bool, **selection: Any) -> None:
    """Remove versions from the store, for good.

    Only another ingest of its files brings a forgotten version back, even before `ckstore gc`, which frees the bytes
    that no other version needs. --keep-last and --keep-every count within each run. If a selected version is tagged,
    nothing is forgotten.

    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        report = store.forget(versions or None, **selection, dry_run=dry_run)
    rows = report.versions
    if as_json:
        forgotten = [{"version": row.number, "run": row.run, "step": row.step} for row in rows]
        print_json([{"versions": forgotten, "freed": report.freed, "dry_run": dry_run}])
        return
    for row in rows:
        print_line(f"{name_of(row)} (version {row.number})")
    if not rows:
        print_line("Nothing to do: every version that is named is kept.")
    else:
        frees = "the bytes that no other version needs" if report.freed is None else size_text(report.freed)
        did, then = ("Would forget", "would free") if dry_run else ("Forgot", "frees")
        print_line(f"{did} {counted(len(rows), 'version')}; `ckstore gc` {then} {frees}.")
