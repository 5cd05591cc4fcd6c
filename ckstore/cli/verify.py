"""`ckstore verify`: check every pack, object and chunk."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ckstore.cli.options import signed_option
from ckstore.cli.output import counted, json_option, print_json, print_line, size_text
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import VersionName, open_store, option, verb, version_of
from ckstore.errors import IntegrityError


@verb(
    ("ckstore verify", "check all packs and versions"),
    ("ckstore verify latest best", "check two versions"),
    ("ckstore verify --sample 0.1", "check a random tenth"),
    exit_codes=[4, 13],
)
@click.argument("versions", metavar="[VERSION]...", nargs=-1, type=VersionName())
@option(
    "--sample FRACTION",
    "Check this fraction of the packs and objects, drawn at random.",
    type=click.FloatRange(0, 1, min_open=True),
)
@signed_option
@json_option
@click.pass_context
def command(
    ctx: click.Context, versions: tuple[str, ...], sample: float | None, signed_by: Path | None, as_json: bool
) -> None:
    """Check the integrity of the store.

    Compares every pack with the digest in its name, and the decoded objects of all versions (or of each VERSION) with
    their ids. Each problem is a line on stderr, with exit code 4.
    """
    from ckstore.checking.verify import bytes_to_check

    start = time.perf_counter()
    with open_store(ctx) as store:
        chosen = [version_of(store, name) for name in versions] if versions else store.versions()
        total = bytes_to_check(store._repository, [version._stored for version in chosen], sample)
        with progress_bar("verify", total, shown=not as_json) as progress:
            report = store.verify(chosen if versions else None, sample=sample, progress=progress, signed_by=signed_by)
    seconds = time.perf_counter() - start
    if as_json:
        counts = {name: getattr(report, name) for name in ("versions", "packs", "objects", "chunks", "bytes")}
        print_json([{**counts, "seconds": round(seconds, 6), "problems": list(report.problems),
                     "damaged": {str(number): paths for number, paths in report.damaged.items()}}])  # fmt: skip
    else:
        for problem in report.problems:
            print_line(f"ckstore: {problem}", err=True)
        print_line(
            f"{counted(report.versions, 'version')}, {counted(report.packs, 'pack')},"
            f" {counted(report.objects, 'object')}, {counted(report.chunks, 'chunk')},"
            f" {size_text(report.bytes)} in {seconds:.1f} s"
        )
    if report.problems:
        raise IntegrityError(
            f"{counted(len(report.problems), 'problem')} found;"
            " restore the named files from a copy of the store, then verify again."
        )
    if not as_json:
        print_line("No problems found.")
