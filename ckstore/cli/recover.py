"""`ckstore recover`: build the catalog again."""

from __future__ import annotations

import click

from ckstore.cli.output import counted, json_option, print_json, print_line
from ckstore.cli.verb import store_path, verb
from ckstore.errors import IntegrityError


@verb(
    ("ckstore recover", "after catalog.sqlite was lost or damaged"),
    ("ckstore --store copy/.ckstore recover", "a copy that holds packs and log only"),
    exit_codes=[4],
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Build the catalog again.

    From packs and log; nothing is deleted. Everything that is damaged or missing, or that two versions claim, is a line
    on stderr, and the exit code is 4 where there is one. Nobody else can write meanwhile.

    Of a store in a bucket others go on. Packs that are damaged there are put again if their bytes are in the cache.
    """
    from ckstore.operations.recover import recover

    report = recover(store_path(ctx))
    if as_json:
        print_json([{"versions": report.versions, "packs": report.packs, "problems": list(report.problems)}])
    else:
        for problem in report.problems:
            print_line(f"ckstore: {problem}", err=True)
        print_line(f"Recovered {counted(report.versions, 'version')} from {counted(report.packs, 'pack')}.")
    if report.problems:
        raise IntegrityError(
            f"{counted(len(report.problems), 'problem')} found;"
            " restore the named files from a copy of the store where there is one, then recover again."
        )
