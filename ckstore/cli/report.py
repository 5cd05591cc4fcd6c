"""`ckstore report`: write a report on runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckstore.cli.output import counted, print_json, print_line
from ckstore.cli.verb import RunName, open_store, option, verb
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from ckstore.report.report import Format

_FORMATS = ("html", "md", "json")


@verb(
    ("ckstore report gpt -o gpt.html", "write one page that needs no other file"),
    ("ckstore report gpt gpt-b --metric val_loss -o runs.html", "compare runs"),
    ("ckstore report gpt", "print a summary for a pull request"),
    exit_codes=[12, 13],
)
@click.argument("runs", metavar="[RUN]...", nargs=-1, type=RunName())
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write FILE.  [default: print]")
@option("--metric NAME", "Show this metric first.  [default: the first with numbers]")
@option("--format FORMAT", "html, md or json.  [default: by the suffix of FILE, else md]", type=click.Choice(_FORMATS))
@option("--force", "Overwrite FILE.")
@click.pass_context
def command(
    ctx: click.Context,
    runs: tuple[str, ...],
    output: Path | None,
    metric: str | None,
    format: Format | None,
    force: bool,
) -> None:
    """Report on runs: odd findings, measures of every tensor over the versions, metrics, sizes and lineage.

    Findings are tensors that did not move, NaN and infinities, norms that exploded, and unusual update-to-weight
    ratios. A large tensor is sampled; the report gives the share. The next report decodes only newer versions. By
    default all runs count.
    """
    from ckstore.reading.checkout import check_place
    from ckstore.report.report import format_of

    chosen = format_of(output or ".md", format)
    if output is None and chosen == "html":
        raise UsageError("A page is not printed; name its file with -o.")
    if output is not None:
        check_place(output, force=force)
    with open_store(ctx) as store:
        report = store.report(*runs, metric=metric)
    if output is None and chosen == "json":
        print_json(json.loads(report.to_json()))
    elif output is None:
        for line in report.to_markdown().splitlines():
            print_line(line)
    else:
        report.save(output, chosen, force=force)
        print_line(f"{output}: {counted(sum(map(len, report.findings.values())), 'finding')}")
