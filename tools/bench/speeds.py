"""The command line of the speed benchmark: measures rows, prints them, or writes them to the document."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from tools import runs
from tools.bench import peaks, remotes, reports, series, speed_figures, speed_process, speed_rows, speed_saver
from tools.bench.speed_figures import Section
from tools.bench.speed_frame import Bench, end_processes

#: The rows, in the order of the document.
ROWS: dict[str, Callable[[Bench], Section]] = {
    "storing": speed_rows.storing,
    "restoring": speed_rows.restoring,
    "row": speed_rows.row,
    "report": reports.report,
    "memory": peaks.memory,
    "start": speed_process.start,
    "saver": speed_saver.saver,
    "bucket": remotes.restores,
    "writers": remotes.writers,
}

#: Rows with checkpoints of their own, for any series.
_OWN = {"memory", "start", "writers"}

DOCUMENT = series.REPOSITORY / "docs" / "benchmarks.md"

INTRODUCTION = """\
# Benchmarks

`tools/bench/speed --write` and `tools/bench/schemes --only coarse --write` write the sections below, except *Size*,
which `tools/bench/size` prints, *A loop of saves* and *Stalls of saves in the background*.

Contenders take turns (A B A B). A ratio compares one round and is above 1 where ckstore is faster. Figures are
medians, with the first and third quartiles in brackets. Files are in the page cache, and both sides sync their
output. Ingests of files and restores run in processes that stay alive. CPU is seconds of all cores per GB (10^9 bytes).
*Slow* is a fine-tune of 22.7 million parameters with Adam's moments, 268 MB a file. Sections without a series use
synthetic float32 weights with AdamW's moments that move by 8 % of their size between versions."""


def main(arguments: list[str] | None = None) -> None:
    """Measure the rows named on the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/speed", description=__doc__)
    named = ", ".join([*runs.RUNS, *series.PUBLIC])
    parser.add_argument("--only", type=names(ROWS), metavar="ROW,...", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--series", metavar="NAME", help=f"{named}, or a directory of checkpoints (default: synthetic)")
    parser.add_argument("--tier", default="small", choices=["tiny", "small", "full"], help="size of the trained runs")
    parser.add_argument("--megabytes", type=int, default=Bench.megabytes, help="of a synthetic checkpoint")
    parser.add_argument("--versions", type=int, default=Bench.versions, help="of the series, from its first on")
    parser.add_argument("--repeat", type=int, default=Bench.repeat, help="rounds of rows that need no new version each")
    parser.add_argument(
        "--work", type=Path, default=series.REPOSITORY / ".cache", help="directory on the measured disk"
    )
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    chosen = parser.parse_args(arguments)
    if chosen.versions < 2:
        parser.error("--versions must be 2 or more: the first version has no parent")
    options = f"--versions {chosen.versions} --repeat {chosen.repeat}"
    try:
        found = _series(chosen) if chosen.series else None
    except ValueError as error:
        parser.error(str(error))
    if found:
        tier = f" --tier {chosen.tier}" if found.name in runs.RUNS else ""
        options = f"--series {found.name}{tier} {options}"
    else:
        options = f"--megabytes {chosen.megabytes} {options}"
    chosen.work.mkdir(parents=True, exist_ok=True)
    where = "" if speed_figures.file_system(chosen.work) != "tmpfs" else ", tmpfs"
    alone = "" if speed_figures.cores() > 1 else ", one core"
    pinned = alone and "taskset -c 0 "
    with tempfile.TemporaryDirectory(dir=chosen.work, prefix="speed-") as scratch:
        bench = Bench(Path(scratch), chosen.megabytes, chosen.versions, chosen.repeat, found)
        try:
            speed_rows.warm_up(bench.synthetic(1, 2), bench.work)
            for name in chosen.only or [name for name in ROWS if found is None or name not in _OWN]:
                section = ROWS[name](bench)
                heading = section.title + where + alone + ("" if found is None or name in _OWN else f": {found.name}")
                command = f"`{pinned}tools/bench/speed --only {name} {options}`"
                day, machine = datetime.now(UTC).date(), speed_figures.machine(chosen.work)
                text = f"{section}\n\nMeasured on {day} with {command} on {machine}."
                print(f"## {heading}\n\n{text}\n", flush=True)
                if chosen.write:
                    publish(heading, text, DOCUMENT)
        finally:
            end_processes()


def _series(chosen: argparse.Namespace) -> series.Series:
    """Return the series that is named.

    Raises
    ------
    ValueError
        It does not exist, or its versions are directories.
    """
    if chosen.series not in (*runs.RUNS, *series.PUBLIC):
        return series.in_directory(Path(chosen.series))
    said: list[str] = []
    found = series.find([chosen.series], None, chosen.work, tier=chosen.tier, report=said.append)
    if not found:
        raise ValueError("; ".join(said))
    if found[0].versions[0].is_dir():
        raise ValueError(f"the versions of {chosen.series} are directories; choose a series of files")
    return found[0]


def publish(heading: str, text: str, target: Path) -> None:
    """Replace the section with this heading, or append it to the document."""
    sections = speed_figures.sections_of(target) | {heading: text}
    target.write_text(speed_figures.page_of(INTRODUCTION, sections))


def names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of a comma-separated subset of known names."""

    def parse(text: str) -> tuple[str, ...]:
        wanted = text.split(",")
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name}; choose from {', '.join(known)}")
        return tuple(name for name in known if name in wanted)

    return parse


if __name__ == "__main__":
    main()
