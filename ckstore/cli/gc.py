"""`ckstore gc`: free what no version needs."""

from __future__ import annotations

import dataclasses

import click

from ckstore.cli.output import counted, json_option, print_json, print_line, size_text
from ckstore.cli.verb import open_store, verb


@verb(
    ("ckstore gc", "after `ckstore forget` or `ckstore rebase`"),
    ("ckstore gc --dry-run", "only say how much would be freed"),
    exit_codes=[4, 11],
)
@click.option(
    "--grace",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    help="Leave files alone that no commit knows and that changed less than SECONDS ago.",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be freed.")
@json_option
@click.pass_context
def command(ctx: click.Context, grace: float, dry_run: bool, as_json: bool) -> None:
    """Free what no version needs.

    Packs of which nothing is needed are removed. Packs of which a tenth or 1 MiB is garbage are written again without
    it; nothing is decoded. Files that killed processes left are removed. What versions restore to does not change.

    Others may ingest meanwhile; the change itself waits until nobody does, up to ten minutes. Where something is
    damaged, nothing is freed: it may be what a repair needs.
    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        report = store.gc(grace=grace, dry_run=dry_run)
    if as_json:
        print_json([{**dataclasses.asdict(report), "dry_run": dry_run}])
        return
    if not (report.removed or report.rewritten or report.files):
        print_line("Nothing to do: everything is needed.")
        return
    done = [
        f"{counted(report.removed, 'pack')} removed",
        f"{counted(report.rewritten, 'pack')} written again",
        f"{counted(report.files, 'file')} of killed processes",
        f"manifests of {counted(report.versions, 'version')}",
    ]
    amounts = (report.removed, report.rewritten, report.files, report.versions)
    parts = ", ".join(text for text, amount in zip(done, amounts, strict=True) if amount)
    print_line(f"{'Would free' if dry_run else 'Freed'} {size_text(report.bytes)}: {parts}.")
