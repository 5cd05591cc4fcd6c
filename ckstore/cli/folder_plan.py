"""The plan of `ckstore ingest --recursive` and `--plan`: a table of files and versions, as CSV and on the screen."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckstore.cli.output import counted, print_line
from ckstore.errors import UsageError
from ckstore.runtime.access import DENIED, denied
from ckstore.scanning.steps import Planned
from ckstore.steps import step_of_text

_COLUMNS = ("path", "run", "step", "note")


def write_plan(file: Path, planned: Sequence[Planned]) -> None:
    """Write a plan as CSV, atomically."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("w", newline="", encoding="utf-8", errors="surrogateescape") as out:
            table = csv.writer(out)
            table.writerow(_COLUMNS)
            table.writerows(
                (item.path, item.run, "" if item.step is None else item.step, item.note) for item in planned
            )
        unfinished.replace(file)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if error.errno in DENIED:
            raise denied(file, error, writing=True) from error
        raise UsageError(f"The plan cannot be written to {file} ({error.strerror}); choose another file.") from error


def read_plan(file: Path) -> list[Planned]:
    """Read a plan that may have been edited; raise `UsageError` for an invalid one."""
    try:
        with file.open(newline="", encoding="utf-8", errors="surrogateescape") as source:
            table = csv.DictReader(source)
            if not {"path", "run", "step"} <= set(table.fieldnames or ()):
                raise UsageError(f"{file} is not a plan: its first line must name the columns {', '.join(_COLUMNS)}.")
            rows = [(table.line_num, row) for row in table]
    except (OSError, csv.Error, UnicodeError) as error:
        raise UsageError(f"The plan {file} cannot be read ({error}); name a file that --plan wrote.") from error
    return [_row(file, line, row) for line, row in rows]


def _row(file: Path, line: int, row: dict[str, str | None]) -> Planned:
    step, path = (row["step"] or "").strip(), row["path"]
    number = step_of_text(step)
    if step and (number is None or number < 0):
        raise UsageError(f"{file}, line {line}: {step!r} is not a step; write an integer from 0 on, or nothing.")
    if not path:
        raise UsageError(f"{file}, line {line}: the path is missing; write it, or delete the line.")
    run, note = (row["run"] or "").strip(), row.get("note") or ""
    return Planned(Path(path), number, run=run, note=note)


def print_totals(planned: Sequence[Planned]) -> None:
    """Print the numbers of versions, runs and inputs that are left out."""
    stored = [item for item in planned if item.run and not item.refused]
    runs = {item.run for item in stored}
    left = sum(not item.run for item in planned)
    without = f", {counted(left, 'file')} left out" if left else ""
    print_line(f"{counted(len(stored), 'version')} of {counted(len(runs), 'run')}{without}")
