"""The command line of the published schemes' figures: measures missing rows, and writes the document."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tools import runs
from tools.bench import speed_figures, speeds
from tools.fidelity import coarse, page, whole
from tools.fidelity.found import Found
from tools.fidelity.settings import Bench

_REPOSITORY = Path(__file__).resolve().parents[2]

DOCUMENT = _REPOSITORY / "docs" / "schemes.md"

#: The page of the part `coarse`.
BENCHMARKS = speeds.DOCUMENT

#: The function that measures the rows of each part.
PARTS: dict[str, Callable[[Bench, Found], None]] = {
    **{run: partial(whole.measure, run=run) for run in ("cnn", "gpt", "finetune")},
    "coarse": coarse.measure,
}


def main(arguments: list[str] | None = None) -> None:
    """Measure the parts named on the command line, on one thread of torch."""
    parser = argparse.ArgumentParser(prog="tools/bench/schemes", description=__doc__)
    parser.add_argument("--tier", choices=runs.TIERS, default="small", help="of the trained runs")
    parser.add_argument("--only", type=speeds.names(PARTS), default=tuple(PARTS), metavar="PART,...")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="measure rows whose names contain one")
    parser.add_argument("--again", action="store_true", help="also measure existing rows again")
    parser.add_argument("--work", type=Path, default=_REPOSITORY / ".cache", help="keeps trained runs and rows")
    parser.add_argument(
        "--write", action="store_true", help="write docs/schemes.md, and `coarse` into docs/benchmarks.md"
    )
    chosen = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    bench = Bench(chosen.tier, chosen.work, say)
    machine = speed_figures.machine(chosen.work)
    found = Found(bench.kept / "found", machine=machine, again=chosen.again, report=say, named=tuple(chosen.rows))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for part in chosen.only:
            PARTS[part](bench, found)
    finally:
        torch.set_num_threads(before)
    rows = {part: found.rows(part) for part in PARTS}
    for part in chosen.only:
        print(f"## {page.SECTIONS[part][0]}\n\n{page.section(part, rows[part], chosen.tier)}\n")
    if chosen.write:
        page.write(rows, chosen.tier, DOCUMENT)
        if rows["coarse"]:
            heading, _ = page.SECTIONS["coarse"]
            speeds.publish(heading, page.section("coarse", rows["coarse"], chosen.tier), BENCHMARKS)


if __name__ == "__main__":
    main()
