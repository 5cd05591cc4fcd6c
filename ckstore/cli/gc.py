"""`ckstore gc`: free bytes that no version needs."""

from __future__ import annotations

import dataclasses

import click

from ckstore.cli.output import counted, json_option, print_held, print_json, print_line, size_text
from ckstore.cli.verb import open_store, option, verb


@verb(
    ("ckstore gc", "free space after forget, thin or rebase"),
    ("ckstore gc --dry-run", "preview freed bytes"),
    exit_codes=[4, 11],
)
@option(
    "--grace SECONDS",
    "Keep uncommitted files younger than SECONDS.",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
)
@option("--dry-run", "Change nothing; report the bytes to free.")
@json_option
@click.pass_context
def command(ctx: click.Context, grace: float, dry_run: bool, as_json: bool) -> None:
    """Collect garbage: free bytes that no version needs.

    Packs without live data and files of killed processes are deleted. Packs with at least a tenth or 1 MiB of garbage
    are rewritten without it. Versions that are stored against forgotten ones are stored in full where that takes fewer
    bytes. No value changes.

    Other processes may ingest; the final change waits for them, up to ten minutes. If something is damaged, nothing is
    freed, since a repair may need it.
    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        report = store.gc(grace=grace, dry_run=dry_run)
        is_clean = not (report.removed or report.rewritten or report.files)
        stored = store.stats()["stored_bytes"] if is_clean and not as_json else 0
    if as_json:
        print_json([{**dataclasses.asdict(report), "dry_run": dry_run}])
        return
    if is_clean:
        print_line("Nothing to do: no garbage.")
        print_held(stored, 0, report.held)
        return
    done = [
        f"{counted(report.removed, 'pack')} removed",
        f"{counted(report.rewritten, 'pack')} rewritten",
        f"{counted(report.in_full, 'object')} stored in full",
        f"{counted(report.files, 'file')} of killed processes",
        f"manifests of {counted(report.versions, 'version')}",
    ]
    amounts = (report.removed, report.rewritten, report.in_full, report.files, report.versions)
    parts = ", ".join(text for text, amount in zip(done, amounts, strict=True) if amount)
    print_line(f"{'Would free' if dry_run else 'Freed'} {size_text(report.bytes)}: {parts}.")
