"""`ckstore rebase`: rewrite versions in full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ckstore.cli.options import named_options
from ckstore.cli.output import counted, json_option, print_json, print_line, size_text
from ckstore.cli.verb import open_store, option, verb
from ckstore.errors import PartialError, UsageError

if TYPE_CHECKING:
    from ckstore.version import Version
    from ckstore.writing.rebase import RebaseReport


@verb(
    ("ckstore rebase --max-restore-cost 1.5", "restore any version at no more than 1.5 times the cost of a full one"),
    ("ckstore rebase best", "store one version in full"),
    ("ckstore rebase --run gpt --max-restore-cost 1.2 --dry-run", "preview"),
    exit_codes=[3, 13],
)
@named_options
@option(
    "--max-restore-cost X",
    "Rewrite only versions that cost more than X full restores, down to X.  [default: store the versions in full]",
    type=click.FloatRange(min=1),
)
@option("--dry-run", "Change nothing; report the objects to rewrite.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    versions: tuple[str, ...],
    run: str | None,
    max_restore_cost: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Rewrite versions in full, so that they restore faster.

    Versions are stored without deltas, in more bytes; with --max-restore-cost only as many objects, of the selected or
    of all versions, as each version needs. Values do not change, and later versions are deltas as before. `ckstore gc`
    frees the old deltas. Coarse versions of the schemes lc and factors cannot be stored in full: versions that still
    cost more are listed, with exit code 3.
    """
    if not versions and run is None and max_restore_cost is None:
        raise UsageError(
            "Name versions, a --run or a --max-restore-cost: a rewrite of the whole store would undo all savings of"
            " deltas."
        )
    with open_store(ctx, "r" if dry_run else "a") as store:
        report = store.rebase(versions or None, run=run, max_restore_cost=max_restore_cost, dry_run=dry_run)
        rows = [store[number] for number in report.versions]
    if as_json:
        changed = [{"version": row.number, "run": row.run, "step": row.step, "cost": row.cost} for row in rows]
        amounts = {"objects": report.objects, "bytes": None if dry_run else report.bytes, "beyond": report.beyond}
        print_json([{"versions": changed, **amounts, "dry_run": dry_run}])
    else:
        _say(report, rows, max_restore_cost, dry_run=dry_run)
    if report.beyond:
        wanted = (
            "could not be stored in full"
            if max_restore_cost is None
            else f"still cost more than {max_restore_cost:g} times a full copy"
        )
        raise PartialError(
            f"{counted(len(report.beyond), 'version')} ({', '.join(map(str, report.beyond))}) {wanted}, as sums of"
            " changes (schemes lc and factors) have no values of their own; set the limit when files are ingested"
            " (`ckstore ingest --max-restore-cost`)."
        )


def _say(report: RebaseReport, rows: Sequence[Version], max_restore_cost: float | None, *, dry_run: bool) -> None:
    if not rows and not report.beyond:
        done = "every version costs at most that" if max_restore_cost is not None else "the versions are stored in full"
        print_line(f"Nothing to do: {done}.")
    if not rows:
        return
    named = ", ".join(str(row.number) for row in rows)
    amount = f"{counted(report.objects, 'object')} of {counted(len(rows), 'version')} in full ({named})"
    if dry_run:
        print_line(f"Would store {amount}.")
    else:
        print_line(f"Stored {amount}, {size_text(report.bytes)} more.")
