"""Print results: lines, tables, and lists of JSON objects. Every name goes to the terminal through `print_line`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ckstore.reading.storage_facts import Figures
    from ckstore.storage.rows import VersionRow

_UNITS = ("kB", "MB", "GB", "TB", "PB")

#: A metric without a value, as the catalog has it.
NAN = "NaN"

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects.")


def size_text(count: float) -> str:
    """Format a number of bytes with three digits and a decimal unit.

    Examples
    --------
    >>> size_text(999), size_text(12_345), size_text(999_999)
    ('999 B', '12.3 kB', '1.00 MB')
    """
    value = float(count)
    if abs(value) < 999.5:
        return f"{value:.0f} B"
    power = 0
    while abs(value) >= 999.5 and power < len(_UNITS):
        value /= 1000
        power += 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[power - 1]}"


def sizes_text(counts: Sequence[int]) -> list[str]:
    """Format numbers of bytes in one unit, that of the largest, so that a column can be compared by eye.

    Examples
    --------
    >>> sizes_text([58_200_000, 41_000, 0]), sizes_text([999, 12])
    (['58.200 MB', '0.041 MB', '0.000 MB'], ['999 B', '12 B'])
    """
    power = min(max((len(str(count)) - 1) // 3 for count in counts), len(_UNITS)) if counts else 0
    if not power:
        return [f"{count} B" for count in counts]
    least = min((count for count in counts if count), default=1) / 1000**power
    digits = 1 if least >= 10 else 2 if least >= 1 else 3
    return [f"{count / 1000**power:,.{digits}f} {_UNITS[power - 1]}" for count in counts]


def counted(count: int, noun: str) -> str:
    """Format a number of things.

    Examples
    --------
    >>> counted(1, "version"), counted(0, "pack")
    ('1 version', '0 packs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def ratio_text(original: int, stored: int) -> str:
    """Return the ratio of two sizes with two digits, such as `4.71x`, or `-` where nothing is stored."""
    value = original / stored if stored else None
    return "-" if value is None else f"{value:.2f}x" if value < 1000 else f"{value:.0f}x"


def speed_text(count: float, seconds: float) -> str:
    """Return a speed in GB/s, or in a smaller unit below a hundredth of it.

    Examples
    --------
    >>> speed_text(5.2e9, 10), speed_text(2.7e5, 1)
    ('0.52 GB/s', '270 kB/s')
    """
    rate = count / max(seconds, 1e-9)
    return f"{rate / 1e9:.2g} GB/s" if rate >= 1e7 else f"{size_text(rate)}/s"


def percent_text(part: float) -> str:
    """Format a fraction as a percentage of two digits, such as `0.23 %`."""
    percent = 100 * part
    return f"{percent:.0f} %" if percent >= 99.5 else f"{percent:.2g} %"


def name_of(row: VersionRow) -> str:
    """Return `run@step` for a version, or its run if it has no step."""
    return row.run if row.step is None else f"{row.run}@{row.step}"


def error_text(weights: float, moments: float) -> str:
    """Describe the largest errors of coarse weights and moments, which deviate far more, relative to root mean squares.

    Examples
    --------
    >>> error_text(0.02, 0.0)
    'weights by up to 2 % of their root mean square'
    >>> error_text(0.031, 1.44)
    'weights by up to 3.1 % of their root mean square, moments by up to 144 %'
    >>> error_text(0.0, 1.44)
    'moments by up to 144 % of their root mean square'
    """
    if moments and not weights:
        return f"moments by up to {percent_text(moments)} of their root mean square"
    text = f"weights by up to {percent_text(weights)} of their root mean square"
    return f"{text}, moments by up to {percent_text(moments)}" if moments else text


def printable(text: str) -> str:
    r"""Escape characters that control a terminal or are invisible.

    Names of files, tensors and metrics are untrusted input; one with a line break would look like two lines.

    Examples
    --------
    >>> print(printable("a\x1b[2J\u202eb"))
    a\x1b[2J\u202eb
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def print_line(text: str = "", *, err: bool = False, bold: bool = False) -> None:
    """Print one line, with escapes for unprintable characters."""
    line = printable(text)
    click.echo(click.style(line, bold=True) if bold else line, err=err)


def print_failure(message: str) -> None:
    """Print the sentence of an error on stderr."""
    color = False if "NO_COLOR" in os.environ else None
    click.echo(f"{click.style('ckstore:', fg='red')} {printable(message)}", err=True, color=color)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print JSON; NaN and infinities, which JSON lacks, as text. Without `indent` it is one line."""
    from msgspec.json import format as with_breaks

    try:
        text = json.dumps(value, allow_nan=False)
        text = text if indent is None else with_breaks(text, indent=indent)  # In less time than by `json`.
    except ValueError:  # A number that JSON lacks, or half a surrogate pair, which `msgspec` refuses.
        text = json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=indent)
    click.echo(text.replace("\x7f", "\\u007f"))  # The only control character that JSON leaves unescaped.


def print_csv(names: Sequence[str], columns: Iterable[Sequence[object]]) -> None:
    """Print columns as comma-separated values; lists as words."""
    import csv

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for row in zip(*columns, strict=True):
        writer.writerow([" ".join(map(str, value)) if isinstance(value, list) else value for value in row])


def form_cells(figures: Figures) -> tuple[str | None, str | None]:
    """Return the form of a tensor in the store, and its bits an element, as cells."""
    form = f"{figures.form} (bundle)" if figures.bundled else figures.form
    return form, None if figures.bits is None else f"{figures.bits:.3f}"


def cell_text(value: object) -> object:
    """Return a value as the cell of a table."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or None
    return f"{value:.6g}" if isinstance(value, float) else value


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[int] = (), paths: list[str] | None = None
) -> None:
    """Print aligned columns, those of the indexes `right` to the right; None is printed as `-`.

    Paths are a last column: there may be a hundred thousand, so that equal rows are aligned once.
    """
    ends, rows = set(right), list(rows)
    distinct = rows if paths is None else list(dict.fromkeys(rows))
    columns = [_aligned(cells, is_right=number in ends) for number, cells in enumerate(_columns(headings, distinct))]
    heading, *lines = map("  ".join, zip(*columns, strict=True))
    if paths is not None:
        heading, starts = f"{heading}  PATH", dict(zip(distinct, lines, strict=True))
        shown = paths if "".join(paths).isprintable() else map(printable, paths)
        lines = list(map("  ".join, zip(map(starts.__getitem__, rows), shown, strict=True)))
    print_line(heading.rstrip(), bold=True)
    if lines:  # Its cells are printable, and paths have no colours that a file should not get.
        click.echo("\n".join(map(str.rstrip, lines)), color=True if paths else None)


def _columns(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[list[str]]:
    """Yield the texts of each column, which begin with its heading."""
    for heading, *cells in zip([heading.upper() for heading in headings], *rows, strict=True):
        yield [heading, *("-" if cell is None else printable(str(cell)) for cell in cells)]


def _aligned(column: Sequence[str], *, is_right: bool) -> list[str]:
    """Return the cells of a column in its width; NaN in red."""
    width = max(map(len, column))
    padded = [cell.rjust(width) if is_right else cell.ljust(width) for cell in column]
    if NAN in column:
        padded = [
            click.style(text, fg="red") if cell == NAN else text for cell, text in zip(column, padded, strict=True)
        ]
    return padded


def column_widths(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[int]:
    """Return the width of each column of a table."""
    return [max(map(len, column)) for column in _columns(headings, rows)]


def fitting(columns: Mapping[str, Sequence[object]], dropped: Sequence[str], also: str) -> list[str]:
    """Return the names of the columns that the terminal has room for; say which ones it has not.

    The columns `dropped` go first ones first; `also` is an option that shows them.
    """
    left = dict(zip(columns, column_widths(list(columns), zip(*columns.values(), strict=True)), strict=True))
    if sys.stdout is None or not sys.stdout.isatty():
        return list(left)
    width = shutil.get_terminal_size().columns
    gone = []
    for name in dropped:
        if sum(left.values()) + 2 * (len(left) - 1) <= width:
            break
        if left.pop(name, None) is not None:
            gone.append(name)
    if gone:
        print_line(f"ckstore: {also} also shows {', '.join(gone)}.", err=True)
    return list(left)


def print_held(stored: int, freed: int, held: int) -> None:
    """Say on stderr how many bytes of the stored a `gc` would free, or how many of forgotten versions others need."""
    if freed > stored / 8:
        print_line(f"ckstore: `ckstore gc` would free {size_text(freed)} that no version needs.", err=True)
    elif held > stored / 100:
        print_line(
            f"ckstore: {size_text(held)} of forgotten versions stay: present ones are stored against them, in fewer "
            "bytes than in full. `ckstore rebase` would save none.",
            err=True,
        )


def print_kept(kept: int, until: str) -> None:
    """Say on stderr how many bytes stay for `undo` until a time, if there is one."""
    if until:
        print_line(
            f"ckstore: {size_text(kept)} of forgotten or thinned versions stay for `ckstore undo`, the first until "
            f"{time_text(until)} UTC; `ckstore gc --grace 0` frees them now.",
            err=True,
        )


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print a name and a value per line; skip values of None."""
    shown = [(printable(name), value) for name, value in facts if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print_line(f"{name.ljust(width)}  {value}")


def time_text(timestamp: str) -> str:
    """Format a timestamp of the catalog to the second, such as `2026-07-01 12:00:00`; times are UTC."""
    return timestamp[:19].replace("T", " ")
