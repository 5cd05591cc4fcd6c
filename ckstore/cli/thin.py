"""`ckstore thin`: make versions coarse."""

from __future__ import annotations

from typing import Any

import click

from ckstore.cli.options import selection_options
from ckstore.cli.output import counted, error_text, json_option, name_of, print_json, print_line, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import open_store, option, verb
from ckstore.policy import QUALITY


@verb(
    (
        "ckstore thin gpt@100..gpt@900 --keep-every 200 --dry-run",
        "preview freed bytes and errors",
    ),
    ("ckstore thin gpt@100..gpt@900 --keep-every 200", "keep the first version of each 200 steps exact"),
    ("ckstore thin --run gpt --keep-last 5 --keep-tagged", "keep the last five and tagged versions of a run exact"),
    exit_codes=[12, 13],
)
@selection_options
@option(
    "--quality Q",
    f"Quality of moments and 16-bit floats, as for `ckstore ingest`.  [default: {QUALITY:g}]",
    type=float,
    default=QUALITY,
)
@option("--dry-run", "Change nothing; report freed bytes, kept versions and errors.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, /, versions: tuple[str, ...], quality: float, dry_run: bool, as_json: bool, **selection: Any
) -> None:
    """Make exact versions coarse: round their values.

    Weights come back rounded, by a few percent of their root mean square, and the moments of an optimiser only roughly.
    `ckstore show` prints the errors, --dry-run before anything changes. All other versions stay exact. Only another
    ingest of the original files with --fidelity exact brings the exact values back, under a new number, even before
    `ckstore gc`. If a selected version is tagged, nothing is thinned. `ckstore gc` frees the bytes.

    """
    with open_store(ctx, "r" if dry_run else "a") as store:
        chosen = store.select(versions or None, **selection) if versions or selection["run"] else None
        total = sum(version.original_bytes for version in chosen or ())
        with progress_bar("thin", total, shown=not as_json) as progress:
            report = store.thin(chosen, quality=quality, dry_run=dry_run, progress=progress)
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
    amounts = (
        f"{size_text(report.freed)} for `ckstore gc` to free, {size_text(report.added)} added; "
        f"{counted(report.reanchored, 'object')} of other versions stored again"
    )
    did = "Would thin" if dry_run else "Thinned"
    print_line(f"{did} {counted(len(report.versions), 'version')}: {amounts}.")
    if not report.freed:
        print_line("ckstore: Other versions keep exact values of these, so nothing can be freed now.", err=True)
