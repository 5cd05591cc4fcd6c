"""Writes `docs/schemes.md`: the figures of every part, with those of the papers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.bench import speed_figures
from tools.fidelity import papers
from tools.fidelity.evaluation import confidence
from tools.fidelity.papers import percent
from tools.fidelity.transfer import EVERY, STEPS
from tools.fidelity.whole import SEARCHED, TOLERANCE

Row = dict[str, Any]

INTRODUCTION = """\
# The published schemes, measured

LC-Checkpoint and Inshrinkerator (DynaQuant) in ckstore, compared with ckstore's own lattices, other baselines and the
papers, on small runs of `tools/train`. `tools/bench/schemes --write` writes this page.

* *residual network*: 2.8 million parameters on scikit-learn's digits, SGD with momentum, 60 epochs to a plateau of
  96.5 % accuracy, a checkpoint an epoch; gradients by `ckstore.GradientAccumulator`. *Lost*: part of the accuracy on
  397 other digits.
* *GPT*: 4.9 million parameters on Python's sources, AdamW, 800 steps, a checkpoint every 40. *Lost*: the relative
  rise of the loss on 128 other windows.
* *fine-tune*: the GPT on English prose, 200 steps, a checkpoint every 10. *Lost*: the same on prose.

Ratios compare 32-bit files with everything that is stored. *Searched*: each version has the smallest setting whose
evaluation is at most 5 % worse, as in Inshrinkerator's paper. QD-compressor, Check-N-Run and GOBO quantise weights
alone.

The verdict is *none* where the run could not have missed the figure: every scheme reaches it, or training had reached a
plateau.

Papers: [LC] Chen et al., *On Efficient Constructions of Checkpoints*, ICML 2020. [I] Agrawal et al.,
*Inshrinkerator*, SoCC 2024, arXiv 2306.11800v3."""

#: Notes below the tables of each part.
NOTES = {
    "cnn": """\
[I], ResNet-152, 10 failures: QD-compressor 11.82x, -0.09 % lost; Check-N-Run 5.71x, 0.36 %.

ExCP's threshold falls with second moments, and SGD has none: nearly all late changes are below it.""",
    "gpt": """\
[I], GPT-2 Medium, 10 failures: QD-compressor 22.15x, 1.10 % lost; Check-N-Run 6.35x, 0.25 %.""",
    "failures": """\
A GPT of 1.7 million parameters, 200 steps of a loss that falls until the end, a checkpoint every 10. Failures follow
random steps. *Each seed*, of initial weights and failures: the rise of the final loss over that seed's run without
failures. *Weights alone*, *moments alone*: a restore takes these from the version and the rest exactly.""",
    "coarse": """\
The GPT of `--tier full` has 10.9 million parameters and 25 checkpoints of 131 MB, its fine-tune 21. *Later versions*:
the median version that is not stored in full. *Rise*: evaluation loss 20 steps after resuming, over an exact resume
with the same batches; mean of three versions and three seeds, in brackets the worst version. Of the fine-tune, the lost
part of its gain in loss.""",
    "finetune": """\
Versions are 10 steps apart; in the papers thousands. LC-Checkpoint's second version is its worst: 10 steps move less
than the error of the first version.""",
    "interrupted": """\
A residual network of 0.3 million parameters, 40 epochs, whole checkpoints (baselines: weights alone); means over
{seeds} seeds and their 95 % confidence, against the same seed without failures. One digit is 0.25 %. *After a failure*:
median size of the version after one, relative to others; [I]'s peaks are such versions.""",
    "rework": """\
The GPT is restored after steps 400 and 600 and trained with {seeds} seeds of batches until its loss on 64 other
windows is that of the checkpoint; 95 % confidence over all. Counts end at 40 steps (*or more*), so those means are
lower bounds. SCAR and TOPN write a tenth of the parameters, as in [LC], or as many bytes as LC-Checkpoint. Ratios of
QD-compressor, Check-N-Run and GOBO are of weights.""",
    "ablation": """\
Weights of at least 65,536 elements in the paper's coding, with 16 levels, 0.5 % protected and 20 % pruned, or with
the searched setting of the residual network: 4 levels, 0.05 and 40 %.

[I], ResNet-152: 25x, 28x and 39x over the whole run; the best versions 30x, 79x and 366x.""",
    "levels": """\
The fewest levels, up to 192, with which a version's weights, nothing pruned or protected, are within ε; means over
evenly spaced versions.

[I], ResNet-152: k-means on the sketch 20.2, 11.9 and 7.2, Check-N-Run 59.3, 40.7 and 26.7;
GPT-2 Medium: 54.7, 16.2 and 9.1, and 106.9, 47.7 and 24.6.""",
    "quantiser": """\
Processor time for {elements:,} weights of the GPT and {levels} levels; *times* is for equal numbers of elements.""",
    "costs": """\
Processor time of the GPT's steps on one core, and the time that versions of its whole checkpoints (59 MB) add during
training: 3 versions in 30 steps, once.""",
    "transfer": """\
The weights of the pretrained GPT are stored without a parent, restored, and fine-tuned on prose with the same batches;
losses on other prose.""",
}

_PARTS = {"all": "weights and both moments", "weights": "weights alone", "dropped": "weights, moments dropped"}

_RUNS = {"cnn": "residual network", "gpt": "GPT", "finetune": "fine-tune"}

#: Prefixes of schemes' names, in the order of tables.
_ORDER = ("exact", "lattice", "lc", "dynaquant 1", "dynaquant, s", "QD", "Check", "GOBO", "excp", "SCAR", "TOPN")


def whole(rows: list[Row]) -> str:
    """Return the table of a run kept by every scheme."""
    lines = []
    for row in sorted(_ordered(rows), key=lambda row: row["part"] != "weights"):
        each = row["original"] / len(row["added"])
        late = row["added"][-(len(row["added"]) // 3) :]
        lines.append([
            _name(row["scheme"]) + (", all" + "*" * ("*" in papers.whose(row["scheme"], "all", row["run"])))
            * (row["part"] != "weights"),
            f"{row['original'] / row['total']:.1f}x", f"{each / statistics.mean(late):.1f}x",
            f"{each / min(row['added']):.0f}x", percent(statistics.mean(row["lost"])), percent(max(row["lost"])),
        ])  # fmt: skip
    head = ["scheme; weights, or all", "whole run", "last third", "best version", "lost, mean", "worst version"]
    return f"{speed_figures.table(head, lines)}\n\n{NOTES[rows[0]['run']]}"


def interrupted(rows: list[Row]) -> str:
    """Return the table of accuracy after failures."""
    exact = {row["seed"]: row for row in rows if row["scheme"] == "exact"}
    ways: dict[tuple[int, str], list[Row]] = {}
    for row in _ordered(rows):
        ways.setdefault((row["count"], row["scheme"]), []).append(row)
    lines = []
    for (count, scheme), ends in sorted(ways.items(), key=lambda way: way[0][0]):
        lost = [1 - row["accuracy"] / exact[row["seed"]]["accuracy"] for row in ends]
        mean = f"{percent(statistics.mean(lost))} ± {confidence(lost):.2%}" if len(lost) > 1 else percent(lost[0])
        lines.append([
            _name(scheme), str(count), f"{statistics.mean(row['accuracy'] for row in ends):.2%}",
            *([""] * 2 if scheme == "exact" else (mean, percent(max(lost)))),
            f"{statistics.mean(row['loss'] for row in ends):.4f}", _after(ends),
        ])  # fmt: skip
    head = ["scheme", "failures", "accuracy", "lost of it", "worst seed", "loss", "after a failure"]
    seeds = len(next(iter(ways.values())))
    return f"{speed_figures.table(head, lines)}\n\n{NOTES['interrupted'].format(seeds=seeds)}"


def failures(rows: list[Row]) -> str:
    """Return the table of the short GPT's loss after failures."""
    ways: dict[tuple[int, str, str], list[Row]] = {}
    for row in _ordered(rows):
        ways.setdefault((row["count"], row["scheme"], row["part"]), []).append(row)
    lines = []
    for (count, scheme, part), ends in sorted(ways.items(), key=lambda way: way[0][0]):
        rises = [row["rise"] for row in ends]
        lines.append([
            _name(scheme) + f", {part} alone" * (part != "all"), papers.whose(scheme, part), str(count),
            ", ".join(map(percent, rises)), percent(statistics.mean(rises)),
            f"{confidence(rises):.2%}" if len(rises) > 1 else "",
            *(f"{ratio:.1f}x" for ratio in papers.ratios_after_failures(ends)),
        ])  # fmt: skip
    head = ["scheme", "levels; coder", "failures", "each seed", "mean", "±", "ratio", "best version"]
    return f"{speed_figures.table(head, lines, text=2)}\n\n{NOTES['failures']}"


def coarse(rows: list[Row]) -> str:
    """Return the table of ckstore's own lattices, for the page of benchmarks."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["run"] != "gpt", row["part"], row["quality"])):
        part = _PARTS[row["part"]]
        rise = f"{percent(statistics.mean(row['rises']))} ({percent(max(row['rises']))})"
        lines.append([
            f"{_RUNS[row['run']]}, {part}", f"{row['quality']:g}", f"{row['ratio']:.1f}x", f"{row['later']:.1f}x", rise
        ])  # fmt: skip
    table = speed_figures.table(["series", "`--quality`", "ratio", "later versions", "rise"], lines)
    return f"{table}\n\n{NOTES['coarse']}"


def _after(ends: list[Row]) -> str:
    """Return the size of versions that follow a failure, relative to others; medians."""
    following: list[int] = []
    others: list[int] = []
    for row in ends:
        for epoch, nbytes in enumerate(row.get("added", [])[1:], 2):
            (following if epoch - 1 in row["after"] else others).append(nbytes)
    return f"{statistics.median(following) / statistics.median(others):.2f}" if following and others else ""


def rework(rows: list[Row]) -> str:
    """Return the table of steps until the loss is back."""
    scar = next((row for row in rows if row["name"] == "SCAR, a tenth"), None)
    lines = []
    for row in _ordered(rows):
        counts = row["counts"]
        ended = max(counts) == row["most"]
        lines.append([
            _name(row["name"]), f"{row['bytes'] / row['later']:.1f}x", percent(statistics.mean(row["rises"])),
            f"{'at least ' * ended}{statistics.mean(counts):.2f} ± {confidence(counts):.2f}",
            f"{max(counts)}{' or more' * ended}", _faster(row, scar),
        ])  # fmt: skip
    head = ["way", "a later version", "lost at once", "steps lost", "worst", "faster than SCAR"]
    seeds = len(rows[0]["counts"]) // len(rows[0]["rises"])
    return f"{speed_figures.table(head, lines)}\n\n{NOTES['rework'].format(seeds=seeds)}"


def _faster(row: Row, scar: Row | None) -> str:
    """Return how many times fewer steps are lost than by SCAR with a tenth; empty if both never recover."""
    mean = statistics.mean(row["counts"])
    if not mean:
        return "no steps lost"
    if scar is None or row is scar or max(row["counts"]) == row["most"]:
        return ""
    return f"{'at least ' * (max(scar['counts']) == scar['most'])}{statistics.mean(scar['counts']) / mean:.1f}x"


def ablation(rows: list[Row]) -> str:
    """Return the table of ratios of three codings."""
    lines = []
    for row in sorted(rows, key=lambda row: (row["run"], row["levels"])):
        raw = 32 * row["elements"]
        of = [_RUNS[row["run"]], str(row["levels"])]
        for part, bits in (("whole run", row["bits"]), ("last third", row["bits"][-(len(row["bits"]) // 3) :])):
            totals = [sum(column) for column in zip(*bits, strict=True)]
            lines.append([*of, part, *(_ratio(raw * len(bits) / total) for total in totals)])
        best = [min(column) for column in zip(*row["bits"], strict=True)]
        lines.append([*of, "best version", *(_ratio(raw / least) for least in best)])
    table = speed_figures.table(["run", "levels", "of", "Huffman", "run lengths", "rearranged"], lines, text=3)
    return f"{table}\n\n{NOTES['ablation']}"


def levels(rows: list[Row]) -> str:
    """Return the table of levels that quantisers need."""
    lines = []
    for row in rows:
        cells = []
        for needed in row["needed"].values():
            found = [levels for levels in needed if levels is not None]
            text = f"{statistics.mean(found):.1f}" if found else "none"
            cells.append(text if len(found) == len(needed) else f"{text} ({len(needed) - len(found)} never)")
        versions = len(next(iter(row["needed"].values())))
        lines.append([_RUNS[row["run"]], row["quantiser"], str(versions), *cells])
    table = speed_figures.table(["run", "quantiser", "versions", "ε = 0.1 %", "1 %", "5 %"], lines, text=2)
    return f"{table}\n\n{NOTES['levels']}"


def costs(rows: list[Row]) -> str:
    """Return the tables of seconds of the quantiser's steps, and of versions during training."""
    (quantiser,) = (row for row in rows if row["name"] == "quantiser")
    seconds = quantiser["seconds"]
    scale = quantiser["elements"] / quantiser["sample"]
    sample = f"scikit-learn's KMeans, {quantiser['sample']:,} elements"
    lines = [
        [
            step,
            f"{seconds[step]:.3f} s",
            other,
            f"{seconds[theirs]:.3f} s",
            f"{n * seconds[theirs] / seconds[step]:.1f}",
        ]
        for step, other, theirs, n in (
            ("partition", "`numpy.quantile`", "quantiles", 1),
            ("clustering", sample, "scikit-learn", scale),
        )
    ]
    table = speed_figures.table(["step", "ckstore", "other", "seconds", "times"], lines)
    text = f"{table}\n\n{NOTES['quantiser'].format(**quantiser)}"
    lines = []
    for row in _ordered(row for row in rows if row is not quantiser):
        step = row["alone"][1] / row["steps"]
        version = (row["during"][1] - row["alone"][1]) / row["versions"]
        lines.append([
            _name(row["scheme"]), f"{step:.3f} s", f"{version:.2f} s", f"{version / (40 * step):.1%}",
            f"{version / (1000 * step):.2%}",
        ])  # fmt: skip
    head = ["scheme", "a step of training", "a version", "share, one every 40 steps", "every 1,000"]
    return f"{text}\n\n{speed_figures.table(head, lines)}\n\n{NOTES['costs']}"


def transfer(rows: list[Row]) -> str:
    """Return the table of fine-tunes from restored weights."""
    lines = [
        [
            _name(row["scheme"]), f"{row['bytes'] / row['nbytes']:.1f}x", percent(row["lost"]),
            *(f"{loss:.4f}" for loss in row["losses"]),
        ]
        for row in _ordered(rows)
    ]  # fmt: skip
    steps = [f"step {step}" for step in range(EVERY, STEPS + 1, EVERY)]
    head = ["scheme", "ratio", "lost at once", "prose, before", *steps]
    return f"{speed_figures.table(head, lines)}\n\n{NOTES['transfer']}"


def shown(rows: dict[str, list[Row]]) -> str:
    """Return the table of targets for the weights of whole runs: their losses at once do not depend on moments."""
    lines = []

    def judged(run: str, scheme: str, most: float, least: float = 0, best: float = 0) -> None:
        alike = [row for row in rows.get(run, []) if row["part"] == "weights"]
        missed = [row for row in alike if not _meets(row, most, least, best)]
        for row in alike:
            if row["scheme"].startswith(scheme):
                verdict = "reached" if _meets(row, most, least, best) else "not reached"
                if verdict == "reached" and (run == "cnn" or not missed):
                    verdict = papers.NOT_JUDGED
                target = f"{most:.1%}"
                target += f", {least:g}x" * bool(least) + f", best version {best:g}x" * bool(best)
                name = f"{_name(row['scheme'])}, {_RUNS[run]}"
                ratio, peak = papers.ratios(row)
                figure = f"{percent(max(row['lost']))}, {ratio:.1f}x, best version {peak:.0f}x"
                lines.append([name, papers.whose(row["scheme"], "weights", run), target, figure, verdict])

    judged("gpt", "lc", 0.005)
    judged("gpt", str(SEARCHED), TOLERANCE, 20)
    judged("cnn", str(SEARCHED), TOLERANCE, 35, 100)
    return speed_figures.table(
        ["weights of", "levels; coder", "target, every version within", "figure", "verdict"], lines, text=5
    )


def _meets(row: Row, most: float, least: float, best: float) -> bool:
    ratio, peak = papers.ratios(row)
    return max(row["lost"]) <= most and ratio >= least and peak >= best


def compared(rows: dict[str, list[Row]]) -> str:
    """Return the table of the papers' figures and those found here."""
    head = ["figure", "levels; coder", "paper", "here", "verdict", "difference"]
    return speed_figures.table(head, (figure.cells() for figure in papers.figures(rows)), text=6)


#: Headings of the sections without measured rows, and of those over several parts.
WHOSE, SHOWN, COMPARED = "Whose levels and coder", "Targets", "Compared with the papers"
OTHERS = "Other systems"

#: Heading and text of each part, in the document's order.
SECTIONS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "cnn": ("Whole runs: residual network", whole),
    "gpt": ("Whole runs: GPT", whole),
    "finetune": ("Whole runs: fine-tune", whole),
    "interrupted": ("Failures", interrupted),
    "failures": ("Failures: GPT", failures),
    "rework": ("Rework", rework),
    "ablation": ("Savings of each coding step", ablation),
    "levels": ("Levels", levels),
    "costs": ("Cost of compression", costs),
    "transfer": ("Transfer learning", transfer),
    "coarse": ("Coarse versions", coarse),
}

#: Begins the last line of a section.
_MEASURED = "\n\nMeasured on "

#: The part that another page shows.
_ELSEWHERE = "coarse"


def section(part: str, rows: list[Row], tier: str) -> str:
    """Return the text of a part that was measured."""
    last = max(rows, key=lambda row: str(row["day"]))
    command = f"`tools/bench/schemes --tier {tier} --only {part}`"
    return f"{SECTIONS[part][1](rows)}{_MEASURED}{last['day']} with {command} on {last['machine']}."


def write(rows: dict[str, list[Row]], tier: str, target: Path) -> None:
    """Write the sections of parts that have rows; the others, and their rows without new ones, stay unchanged.

    Parameters
    ----------
    rows
        By part.
    tier
        Of the trained runs.
    target
        The document; replaced.
    """
    known = speed_figures.sections_of(target)
    shown_here = {part: heading for part, (heading, _) in SECTIONS.items() if part != _ELSEWHERE}
    found = {SHOWN: shown(rows), COMPARED: compared(rows)}
    found |= {heading: section(part, rows[part], tier) for part, heading in shown_here.items() if rows.get(part)}
    known |= {
        heading: _merged(known.get(heading, ""), text) for heading, text in found.items() if text.count("\n|") > 1
    }
    known |= {WHOSE: papers.WHOSE, OTHERS: papers.OTHERS}
    headings = [WHOSE, SHOWN, COMPARED, OTHERS, *shown_here.values()]
    ordered = {heading: known[heading] for heading in headings if heading in known}
    target.write_text(speed_figures.page_of(INTRODUCTION, ordered))


def _merged(old: str, new: str) -> str:
    """Return a section with the rows of the old one that the new one lacks, and the days of both."""
    table = [line for line in old.splitlines() if line.startswith("|")]
    # The first cells that name a row; two tables of a section are never merged.
    cells = next((cells for cells in (1, 2, 3) if len(_rows(old, cells)) == len(table)), 0)
    before, rows = _rows(old, cells), _rows(new, cells)
    if not cells or before.keys() <= rows.keys():
        return new
    text = new.replace("\n".join(rows.values()), "\n".join((before | rows).values()))
    _, mark, day = old.partition(_MEASURED)
    names = "; ".join(dict.fromkeys(key[0] for key in before if key not in rows))
    day = re.sub(" with `.*`", "", day, count=1)
    return f"{text}\n\nOlder rows ({names}): {day}" if mark else text


def _rows(section: str, cells: int) -> dict[tuple[str, ...], str]:
    """Return the lines of a section's table by their first cells."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return {tuple(line.strip("| ").split(" | ")[:cells]): line for line in lines}


def _name(scheme: str) -> str:
    """Return the name of a scheme in tables."""
    names = {
        "lattice 1.5": "ckstore's lattices", "lc 1.5": "LC-Checkpoint", "lc 2.5": "LC-Checkpoint, 2 bits",
        "dynaquant 1.5": "DynaQuant, default", "dynaquant, searched": "DynaQuant, searched", "excp": "ExCP",
    }  # fmt: skip
    return names.get(scheme, scheme)


def _ordered(rows: Iterable[Row]) -> list[Row]:
    def place(row: Row) -> tuple[int, str]:
        found = [number for number, start in enumerate(_ORDER) if str(row.get("scheme", row["name"])).startswith(start)]
        return (found or [len(_ORDER)])[0], row["name"]

    return sorted(rows, key=place)


def _ratio(value: float) -> str:
    return f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"
