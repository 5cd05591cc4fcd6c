"""`ckstore plot`: draw a measure of tensors over a run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from ckstore.cli.output import json_option, print_json, print_line, print_table
from ckstore.cli.verb import RunName, open_store, option, verb
from ckstore.errors import NotFoundError, UsageError

_BLOCKS = "▁▂▃▄▅▆▇█"
#: Columns of a line in the terminal, at least and at most.
_NARROWEST, _WIDEST = 8, 60


@verb(
    ("ckstore plot gpt 'model/h.0.*'", "root mean squares of tensors over a run, a line for each"),
    ("ckstore plot gpt 'model/*' --measure change", "another measure: the distance from the version before"),
    ("ckstore plot gpt 'model/h.0.*' -o rms.png", "as a picture, with matplotlib"),
    exit_codes=[13],
)
@click.argument("run", type=RunName())
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@option("--measure KEY", "The measure; the page on reports defines them.  [default: rms]", default="rms")
@click.option(
    "-o", "--output", metavar="FILE", help="Write a picture: png, svg or pdf.", type=click.Path(path_type=Path)
)
@json_option
@click.pass_context
def command(
    ctx: click.Context, run: str, globs: tuple[str, ...], measure: str, output: Path | None, as_json: bool
) -> None:
    """Draw a measure of tensors over the versions of a run, by step.

    Each line is scaled by itself, from FIRST to LAST. GLOBs are those of `ckstore ls`.
    """
    if as_json and output is not None:
        raise UsageError("--json prints the numbers; leave -o out.")
    with open_store(ctx) as store:
        table = store.run(run).statistics([measure], globs)
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in table:
        value = row[measure]
        if value is not None and math.isfinite(value):
            lines.setdefault(row["path"], []).append((row["version"] if row["step"] is None else row["step"], value))
    if as_json and len(table):
        print_json(table)
    elif not lines:
        match = f"that matches {' or '.join(globs)} " if globs else ""
        raise NotFoundError(
            f"No tensor of {run} {match}has the measure {measure}; `ckstore ls {run}` lists the tensors."
        )
    elif output is not None:
        _draw(lines, measure, run, output)
        print_line(f"{output}: {measure} of {len(lines)} tensors")
    else:
        _print(lines)


def _print(lines: dict[str, list[tuple[int, float]]]) -> None:
    widest = max(map(len, lines))
    width = min(max(shutil.get_terminal_size().columns - widest - 24, _NARROWEST), _WIDEST)
    rows = []
    for path, points in lines.items():
        values = [value for _, value in points]
        rows.append((f"{values[0]:.4g}", sparkline(values, width), f"{values[-1]:.4g}", path))
    print_table(["first", "over steps", "last", "path"], rows, right=(0, 2))


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as blocks of eight heights, between their least and their greatest.

    Of more values than columns the nearest ones are shown.

    Examples
    --------
    >>> sparkline([0.0, 1.0, 2.0, 7.0], 60)
    '▁▂▃█'
    """
    if len(values) > width:
        values = [values[place * (len(values) - 1) // (width - 1)] for place in range(width)]
    low, high = min(values), max(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top) if high > low else 0] for value in values)


def _draw(lines: dict[str, list[tuple[int, float]]], measure: str, run: str, output: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("Pictures need matplotlib: `pip install matplotlib`; without -o, plot draws here.") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for path, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=path, marker=".")
    axes.set(title=run, xlabel="step", ylabel=measure)
    axes.legend(fontsize="small")
    try:
        figure.savefig(output)
    except ValueError as error:
        raise UsageError(f"{output}: {error}; name a .png, .svg or .pdf.") from error
