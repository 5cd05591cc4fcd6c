"""`ckstore gc`: free bytes that no version needs."""

from __future__ import annotations

import dataclasses

import click

from ckstore.cli.output import counted, json_option, print_held, print_json, print_kept, print_line, size_text
from ckstore.cli.verb import open_store, option, verb


@verb(
    ("ckstore gc", "free space after forget, thin or rebase"),
    ("ckstore gc --dry-run", "preview freed bytes"),
    ("ckstore gc --grace 0", "free forgotten and thinned versions now"),
    exit_codes=[4, 11],
)
@option(
    "--grace SECONDS",
    "Keep forgotten and thinned versions, and files of killed processes, for SECONDS.  [default: 7 days, an hour]",
    type=click.FloatRange(min=0),
)
@option("--dry-run", "Change nothing; report the bytes to free.")
@json_option
@click.pass_context
def command(ctx: click.Context, grace: float | None, dry_run: bool, as_json: bool) -> None:
    """Collect garbage: free bytes that no version needs.

    Packs without live data and files of killed processes are deleted. Packs with at least a tenth or 1 MiB of garbage
    are rewritten without it. Versions that are stored against forgotten ones are stored in full where that takes fewer
    bytes. No value changes. Versions that `ckstore forget` removed, and exact values that `ckstore thin` rounded, stay
    for seven days, for `ckstore undo`, or until the disk lacks the room for another version.

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
        print_line("Nothing to do: no garbage." if not report.kept else "Nothing to do yet.")
        print_held(stored, 0, report.held)
        print_kept(report.kept, report.until)
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
    print_kept(report.kept, report.until)
