"""`ckstore thin`: make versions coarse."""

from __future__ import annotations

from typing import Any

import click

from ckstore.cli.options import DAYS, selection_options
from ckstore.cli.output import counted, error_text, json_option, name_of, print_json, print_line, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import note_runs, open_store, option, verb
from ckstore.policy import QUALITY


@verb(
    (
        "ckstore thin gpt@100..gpt@900 --keep-every 200 --dry-run",
        "preview freed bytes and errors",
    ),
    ("ckstore thin gpt@100..gpt@900 --keep-every 200", "keep the first version of each 200 steps exact"),
    ("ckstore thin --run gpt --keep-last 5 --keep-tagged", "keep the last five and tagged versions of a run exact"),
    ("ckstore undo", "make the versions exact again that were thinned last"),
    exit_codes=[12, 13],
)
@selection_options
@option(
    "--quality Q",
    f"Quality of moments and 16-bit floats, as for `ckstore ingest`.  [default: {QUALITY:g}]",
    type=float,
    default=QUALITY,
)
@option("--prune", "Make them coarse for good, and free the bytes now.")
@option("--dry-run", "Change nothing; report freed bytes, kept versions and errors.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    versions: tuple[str, ...],
    quality: float,
    prune: bool,
    dry_run: bool,
    as_json: bool,
    **selection: Any,
) -> None:
    """Make exact versions coarse: round their values.

    Weights come back rounded, by a few percent of their root mean square, and the moments of an optimiser only roughly.
    `ckstore show` prints the errors, --dry-run before anything changes. All other versions stay exact. `ckstore undo`
    makes them exact again for seven days. After that, or when the disk lacks the room for another version, `ckstore gc`
    frees the bytes. If a selected version is tagged, nothing is thinned.

    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        note_runs(store, versions, "selects")
        chosen = store.select(versions or None, **selection) if versions or selection["run"] else None
        total = sum(version.original_bytes for version in chosen or ())
        with progress_bar("thin", total, shown=not as_json) as progress:
            report = store.thin(chosen, quality=quality, prune=prune, dry_run=dry_run, progress=progress)
    if as_json:
        thinned = [
            {
                "version": item.version.number,
                "run": item.version.run,
                "step": item.version.step,
                "max_abs_error": item.max_abs,
                "relative_error": item.relative,
                "relative_error_of_weights": item.weights,
            }
            for item in report.versions
        ]
        print_json([
            {
                "versions": thinned,
                "skipped": report.skipped,
                "reanchored": report.reanchored,
                "freed": report.freed,
                "added": report.added,
                "dry_run": dry_run,
            }
        ])  # fmt: skip
        return
    for item in report.versions:
        error = error_text(item.weights, item.relative if item.relative > item.weights else 0.0)
        print_line(
            f"{name_of(item.version)} (version {item.version.number})  {error}; none by more than {item.max_abs:.3g}"
        )
    if report.skipped:
        print_line(f"{counted(len(report.skipped), 'version')} had no exact values to drop.")
    if not report.versions:
        print_line("Nothing to do: every version that is named is kept or coarse already.")
        return
    did = "Would thin" if dry_run else "Thinned"
    stored_again = f"{counted(report.reanchored, 'object')} of other versions stored again"
    print_line(
        f"{did} {counted(len(report.versions), 'version')}: {size_text(report.added)} added, {stored_again}; "
        f"{_after(report.freed, prune and not dry_run)}"
    )
    if not report.freed:
        print_line("ckstore: Other versions keep exact values of these, so nothing can be freed now.", err=True)


def _after(freed: int, prune: bool) -> str:
    """Say how exact values can come back, and when their bytes are freed."""
    if prune:
        return f"freed {size_text(freed)}, for good."
    return f"`ckstore undo` makes them exact again. After {DAYS} days `ckstore gc` frees {size_text(freed)}."
