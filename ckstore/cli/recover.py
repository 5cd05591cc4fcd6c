"""`ckstore recover`: rebuild the catalog."""

from __future__ import annotations

import click

from ckstore.cli.output import counted, json_option, print_json, print_line
from ckstore.cli.verb import store_path, verb
from ckstore.errors import IntegrityError


@verb(
    ("ckstore recover", "rebuild a lost or damaged catalog.sqlite"),
    ("ckstore --store copy/.ckstore recover", "rebuild the catalog of a copy"),
    exit_codes=[4],
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Rebuild the catalog from packs and log.

    Use it if another verb reports a missing or damaged catalog.sqlite, the index of packs/ and log/. It brings back all
    versions, tags, metrics and policies, and deletes nothing. Each damaged or missing pack, and each pair of versions
    with the same step or number, is reported on stderr, with exit code 4. Other processes cannot write until it is
    done.

    In a bucket, other processes go on, and damaged packs are uploaded again if the local cache has their bytes.
    """
    from ckstore.recovery.recover import recover

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
            " restore the named files from a copy of the store if you have one, then recover again."
        )
