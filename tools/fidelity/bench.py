"""The command line of the bench."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ckstore.policy import SCHEMES
from tools.fidelity import ablation, coding, failures, ranking, report, rework, rows, searching, thinning
from tools.fidelity.settings import TIERS, Bench, threads
from tools.fidelity.verdicts import Findings, judge

_REPOSITORY = Path(__file__).resolve().parents[2]

#: Parts that yield rows.
_ROWS = {
    "gpt": rows.gpt, "excp": rows.excp, "weights": rows.weights, "cnn": rows.cnn, "finetune": rows.finetune,
    "bf16": rows.bf16,
}  # fmt: skip

#: Parts that yield one finding each, by the attribute of `Findings`.
_OTHERS: dict[str, tuple[str, Any]] = {
    "partial": ("rework", rework.measure),
    "failures": ("failures", failures.measure),
    "ablation": ("ablation", ablation.measure),
    "ranking": ("ranked", ranking.measure),
    "thin": ("thinning", thinning.measure),
    "search": ("searched", searching.measure),
    "entropy": ("coded", lambda bench: coding.measure()),
}

PARTS = (*_ROWS, *_OTHERS)


def main(arguments: list[str] | None = None) -> None:
    """Measure the parts named on the command line and print tables and verdicts."""
    parser = argparse.ArgumentParser(prog="tools/bench/fidelity", description="Judge coarse versions.")
    parser.add_argument("--tier", choices=TIERS, default="small", help="tiny: a minute; small: minutes; full: hours")
    parser.add_argument("--only", type=names(PARTS), default=PARTS, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--qualities", type=_numbers, metavar="NUMBER,...", help="(default: the tier's)")
    parser.add_argument("--schemes", type=names(SCHEMES), default=SCHEMES, metavar="SCHEME,...")
    parser.add_argument("--work", type=Path, default=_REPOSITORY / ".cache", help="keeps trained runs and figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write rate-distortion curves there")
    chosen = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    qualities = chosen.qualities or TIERS[chosen.tier].qualities
    before = torch.get_num_threads()
    torch.set_num_threads(threads(chosen.tier))
    try:
        findings = measure(Bench(chosen.tier, chosen.work, chosen.schemes, qualities, say), chosen.only)
    finally:
        torch.set_num_threads(before)
    verdicts = judge(findings)
    print(report.text(findings, verdicts))
    if chosen.json:
        chosen.json.write_text(json.dumps(report.document(findings, verdicts), indent=1))
    if chosen.plot:
        report.plot(findings.rows, chosen.plot)


def measure(bench: Bench, parts: tuple[str, ...] = PARTS) -> Findings:
    """Return the findings of the parts."""
    findings = Findings()
    for name in parts:
        bench.report(f"== {name}")
        if name in _ROWS:
            for row in _ROWS[name](bench):
                findings.rows.append(row)
                lost = ", ".join(f"{figure} {row.mean(figure):+.3%}" for figure in row.figures)
                bench.report(f"{row.run}: {row.setting}: {row.stored.ratio:.2f}x, {lost}")
        else:
            attribute, find = _OTHERS[name]
            setattr(findings, attribute, find(bench))
    return findings


def names(known: tuple[str, ...]) -> Any:
    """Return a parser of a comma-separated subset of known names."""

    def parse(text: str) -> tuple[str, ...]:
        wanted = text.split(",")
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown part {name}; choose from {', '.join(known)}")
        return tuple(name for name in known if name in wanted)

    return parse


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


if __name__ == "__main__":
    main()
