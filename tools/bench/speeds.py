"""The command line of the speed benchmark: measures the rows that are named, prints them, or writes them down."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.bench import (
    growth,
    kernels_speed,
    roofline,
    speed_peers,
    speed_process,
    speed_report,
    speed_rows,
    speed_sweeps,
)
from tools.bench.series import REPOSITORY
from tools.bench.speed_bench import TIERS, Bench
from tools.bench.speed_clock import end_processes
from tools.bench.speed_contenders import warm_up
from tools.bench.speed_figures import Section

#: What each row measures, in the order of the document.
ROWS: dict[str, Callable[[Bench], Section]] = {
    "ingest": speed_rows.ingest,
    "live": speed_rows.live,
    "state_dict": speed_rows.state_dict,
    "checkout": speed_rows.checkout,
    "coarse": speed_rows.coarse,
    "huffman": kernels_speed.huffman,
    "exact": kernels_speed.exact,
    "row": speed_rows.row,
    "memory": speed_process.memory,
    "start": speed_process.start,
    "growth": growth.growth,
    "store_peers": speed_peers.storing,
    "restore_peers": speed_peers.restoring,
    "depth": speed_sweeps.depth,
    "size": speed_sweeps.size,
    "threads": speed_sweeps.threads,
    "stages": roofline.stages,
}

#: Rows that store nothing.
_KERNELS = {"huffman", "exact"}

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"


def main(arguments: list[str] | None = None) -> None:
    """Measure what is named on the command line."""
    parser = argparse.ArgumentParser(prog="tools/bench/speed", description=__doc__)
    parser.add_argument("--only", type=_names, metavar="ROW,...", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--megabytes", type=int, metavar="N", help="size of a checkpoint (default: the tier's)")
    parser.add_argument("--versions", type=int, metavar="N", help="versions of the run (default: the tier's)")
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds (default: the tier's)")
    parser.add_argument("--tier", choices=TIERS, default="full", help="tiny: to see that everything runs")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".cache" / "bench-speed", help="on the disk")
    parser.add_argument("--stages", action="store_true", help="only where time goes, and what the machine allows")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md (tiny: into --work)")
    chosen = parser.parse_args(arguments)
    rows = ("stages",) if chosen.stages else chosen.only or tuple(ROWS)
    given = {name: getattr(chosen, name) for name in ("megabytes", "versions", "repeat")}
    settings = replace(TIERS[chosen.tier], **{name: value for name, value in given.items() if value is not None})
    options = f"--tier {chosen.tier} {settings.options}"
    chosen.work.mkdir(parents=True, exist_ok=True)
    document = DOCUMENT if chosen.tier == "full" else chosen.work / DOCUMENT.name
    known = read(document.with_suffix(".json")) if chosen.write else {}
    with tempfile.TemporaryDirectory(dir=chosen.work, prefix="run-") as scratch:
        bench = Bench(settings, Path(scratch))
        try:
            if set(rows) - _KERNELS:
                warm_up(bench.series(1, 2), bench.work)
            machine = speed_report.machine([(place.name, place.kind) for place in bench.places])
            for name in rows:
                measured = datetime.now(UTC).date().isoformat()
                section = replace(ROWS[name](bench), measured=measured, options=options, machine=machine)
                known[name] = section
                print("\n\n".join([f"## {section.title}", *speed_report.body(section)]), end="\n\n", flush=True)
                if chosen.write:
                    publish(known, machine, f"tools/bench/speed {options} --write", document)
        finally:
            bench.close()
            end_processes()


def publish(known: dict[str, Section], machine: list[str], command: str, target: Path) -> None:
    """Write the document, its plots and, for runs that measure other rows, the figures; plots that are gone go."""
    known = {name: known[name] for name in ROWS if name in known}
    figures = {name: section.to_json() for name, section in known.items()}
    written = target.with_suffix(".json.new")
    written.write_text(json.dumps(figures, indent=1) + "\n")
    written.replace(target.with_suffix(".json"))
    sections = list(known.values())
    target.write_text(speed_report.document(sections, machine, command, target.stem))
    for old in target.parent.glob(f"{target.stem}-*.svg"):
        old.unlink()
    for section in sections:
        for plot in section.plots:
            speed_report.plot(plot, target.with_name(f"{target.stem}-{plot.name}.svg"))


def read(path: Path) -> dict[str, Section]:
    """The sections that were measured last, by row."""
    if not path.is_file():
        return {}
    try:
        return {name: Section.from_json(section) for name, section in json.loads(path.read_text()).items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        sys.exit(f"{path} was written by another version of this tool: remove it, and measure all rows again.")


def _names(text: str) -> Any:
    wanted = text.split(",")
    for name in wanted:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(f"there is no {name}; choose from {', '.join(ROWS)}")
    return tuple(name for name in ROWS if name in wanted)


if __name__ == "__main__":
    main()
