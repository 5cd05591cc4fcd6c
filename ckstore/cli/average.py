"""`ckstore average`: write the mean of versions."""

from __future__ import annotations

from pathlib import Path

import click

from ckstore.cli.output import counted, json_option, print_json, print_line
from ckstore.cli.progress import progress_bar
from ckstore.cli.verb import open_store, option, verb
from ckstore.formats.paths import listed


@verb(
    ("ckstore average gpt@600..gpt@1000 -o soup.pt", "write the mean of a run's last versions"),
    ("ckstore average gpt@600..gpt@1000 --ema 0.99 -o ema.pt", "weigh later versions more"),
    exit_codes=[4, 12, 13],
)
@click.argument("versions", metavar="VERSION...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="TARGET",
    type=click.Path(path_type=Path),
    required=True,
    help="File or directory to write.",
)
@option("--ema DECAY", "Exponential moving average: weight of the mean so far, such as 0.99.", type=float)
@option("--force", "Overwrite TARGET; a directory is replaced as a whole.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, versions: tuple[str, ...], output: Path, ema: float | None, force: bool, as_json: bool
) -> None:
    """Write the mean of versions, in the format of the last one, or of the suffix of TARGET as in `ckstore checkout`.

    Floats are summed in float64 and rounded once. Integers, counters of steps, floats of 8 bits and all other contents
    are those of the last version; stderr names the tensors. Versions that differ in their tensors are refused.
    """
    with open_store(ctx) as store:
        last = store.select(versions[-1:])[-1]
        with progress_bar("average", last.original_bytes, shown=not as_json) as progress:
            report = store.average(versions, output, ema=ema, force=force, progress=progress)
    if as_json:
        print_json([{"versions": report.versions, "averaged": report.averaged, "kept": report.kept}])
        return
    done = f"{counted(len(report.averaged), 'tensor')} of {counted(len(report.versions), 'version')}"
    print_line(f"Mean of {done} -> {output}")
    if report.kept:
        print_line(
            f"ckstore: {counted(len(report.kept), 'tensor')} not averaged, and taken from {last.name}: "
            f"{listed(report.kept)}.",
            err=True,
        )
