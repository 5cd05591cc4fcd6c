"""`ckstore thin`: let versions give up their exact layers."""

from __future__ import annotations

import click

from ckstore.cli.options import selection_options
from ckstore.cli.output import counted, error_text, json_option, name_of, print_json, print_line, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import open_store, verb
from ckstore.policy import QUALITY


@verb(
    (
        "ckstore thin gpt@100..gpt@900 --keep-every 200 --dry-run",
        "say what would be freed, and how far values would be off",
    ),
    ("ckstore thin gpt@100..gpt@900 --keep-every 200", "keep one exact version in every 200 steps"),
    ("ckstore thin --run gpt --keep-last 5 --keep-tagged", "of a run but for its end and what has a tag"),
    exit_codes=[12, 13],
)
@selection_options
@click.option(
    "--quality",
    metavar="Q",
    type=float,
    default=QUALITY,
    help=f"Of moments and 16-bit floats, as for `ckstore ingest`.  [default: {QUALITY:g}]",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; say what would be freed, what stays and what error.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    versions: tuple[str, ...],
    run: str | None,
    keep_last: int | None,
    keep_every: int | None,
    keep_tagged: bool,
    quality: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Let versions give up their exact layers.

    Each VERSION, or range A..B of versions of one run, or a whole run, but for what is kept, becomes coarse: weights
    and moments come back near what they were, and `ckstore show` says how near. All other versions stay exact: what
    they had stored against a layer that goes is stored again. Only ingesting the same files again makes a thinned
    version exact. A version with a tag is refused unless --keep-tagged keeps it.

    The bytes stay until `ckstore gc` frees them.
    """
    from ckstore.operations.selection import select_versions
    from ckstore.operations.thin import ThinReport

    with open_store(ctx, "r" if dry_run else "a") as store:
        rows = select_versions(store.catalog, versions, run, keep_every, keep_last, keep_tagged)
        total = sum(row.original_bytes for row in rows)
        with progress_bar("thin", total, shown=not as_json) as progress:
            numbers = [row.number for row in rows]
            report = ThinReport()
            if numbers:  # All that are named may be kept.
                report = store.thin(numbers, quality=quality, dry_run=dry_run, progress=progress)
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
        error = error_text(item.weights, item.relative)
        print_line(
            f"{name_of(item.version)} (version {item.version.number})  {error}; none by more than {item.max_abs:.3g}"
        )
    if report.skipped:
        print_line(f"{counted(len(report.skipped), 'version')} had no exact layer to give up.")
    if not report.versions:
        print_line("Nothing to do: every version that is named is kept or coarse already.")
        return
    amounts = (
        f"{size_text(report.freed)} for `ckstore gc` to free, {size_text(report.added)} added; "
        f"{counted(report.reanchored, 'object')} of other versions stored again"
    )
    did = "Would thin" if dry_run else "Thinned"
    print_line(f"{did} {counted(len(report.versions), 'version')}: {amounts}.")
