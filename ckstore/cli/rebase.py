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
    ("ckstore rebase --budget 1.5", "restore any version at 1.5 times the cost of a full one"),
    ("ckstore rebase best", "store one version in full"),
    ("ckstore rebase --run gpt --budget 1.2 --dry-run", "preview"),
    exit_codes=[3, 13],
)
@named_options
@option(
    "--budget X",
    "Maximal restore cost, as a multiple of a full restore.  [default: store the versions in full]",
    type=click.FloatRange(min=1),
)
@option("--dry-run", "Change nothing; report the objects to rewrite.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, versions: tuple[str, ...], run: str | None, budget: float | None, dry_run: bool, as_json: bool
) -> None:
    """Rewrite versions in full, so that they restore faster.

    The selected versions, or with --budget all versions above it, are stored without deltas, in more bytes. Values do
    not change; `ckstore compact` does not undo it. `ckstore gc` frees the old deltas. Coarse versions of scheme lc
    cannot be stored in full: those above the budget are listed, with exit code 3.
    """
    if not versions and run is None and budget is None:
        raise UsageError(
            "Name versions, a --run or a --budget: a rewrite of the whole store would undo all savings of deltas."
        )
    with open_store(ctx, "r" if dry_run else "a") as store:
        report = store.rebase(versions or None, run=run, budget=budget, dry_run=dry_run)
        rows = [store[number] for number in report.versions]
    if as_json:
        changed = [{"version": row.number, "run": row.run, "step": row.step, "cost": row.cost} for row in rows]
        amounts = {"objects": report.objects, "bytes": report.bytes, "beyond": report.beyond, "dry_run": dry_run}
        print_json([{"versions": changed, **amounts}])
    else:
        _say(report, rows, budget, dry_run=dry_run)
    if report.beyond:
        wanted = "could not be stored in full" if budget is None else f"stay beyond a budget of {budget:g}"
        raise PartialError(
            f"{counted(len(report.beyond), 'version')} ({', '.join(map(str, report.beyond))}) {wanted}, as sums of"
            " changes (scheme lc) have no values of their own; give the budget when files are ingested"
            " (`ckstore ingest --budget`)."
        )


def _say(report: RebaseReport, rows: Sequence[Version], budget: float | None, *, dry_run: bool) -> None:
    if not rows and not report.beyond:
        done = "every version is within the budget" if budget is not None else "the versions are stored in full"
        print_line(f"Nothing to do: {done}.")
    if not rows:
        return
    named = ", ".join(str(row.number) for row in rows)
    amount = f"{counted(report.objects, 'object')} of {counted(len(rows), 'version')} in full ({named})"
    if dry_run:
        print_line(f"Would store {amount}.")
    else:
        print_line(f"Stored {amount}, {size_text(report.bytes)} more.")
