"""`ckstore forget`: remove versions from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckstore.cli.options import DAYS, selection_options
from ckstore.cli.output import counted, json_option, name_of, print_json, print_line, size_text
from ckstore.cli.verb import note_runs, open_store, option, verb

if TYPE_CHECKING:
    from ckstore.retention.forget import ForgetReport


@verb(
    ("ckstore forget gpt@100 7", "forget two versions"),
    ("ckstore forget gpt@100..gpt@900 --keep-every 200", "keep the first version of each 200 steps"),
    ("ckstore forget --run gpt --keep-last 5 --keep-tagged", "keep the last five and tagged versions of a run"),
    ("ckstore forget --run gpt --keep-last 5 --dry-run", "preview"),
    ("ckstore forget gpt@100 --prune", "forget for good, and free the bytes now"),
    ("ckstore undo", "bring back the versions that were forgotten last"),
    exit_codes=[12, 13],
)
@selection_options
@option("--prune", "Forget for good, and free the bytes now.")
@option("--dry-run", "Change nothing; list the versions.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    versions: tuple[str, ...],
    prune: bool,
    dry_run: bool,
    as_json: bool,
    **selection: Any,
) -> None:
    """Remove versions from the store.

    `ckstore undo` brings them back for seven days, `ckstore log --forgotten` lists them. After that, or when the disk
    lacks the room for another version, `ckstore gc` frees the bytes that no other version needs. --keep-last and
    --keep-every count within each run. If a selected version is tagged, nothing is forgotten.

    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        note_runs(store, versions, "selects")
        report = store.forget(versions or None, **selection, prune=prune, dry_run=dry_run)
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
        did = "Would forget" if dry_run else "Forgot"
        print_line(f"{did} {counted(len(rows), 'version')}; {_after(report, prune)}")


def _after(report: ForgetReport, prune: bool) -> str:
    """Say how the versions can come back, and when the bytes that no other needs are freed."""
    freed = "the bytes that no other version needs" if report.freed is None else size_text(report.freed)
    if prune:
        return f"freed {freed}, for good."
    return f"`ckstore undo` brings them back. After {DAYS} days `ckstore gc` frees {freed}."
