"""Writes `docs/schemes.md`: the figures of every part, beside those of the papers."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.fidelity.whole import SEARCHED, TOLERANCE

Row = dict[str, Any]

INTRODUCTION = """\
# The published schemes, measured

What LC-Checkpoint and Inshrinkerator (DynaQuant) reach as ckstore has them, beside ckstore's own lattices, other
baselines and the papers' own figures. `tools/bench/schemes --write` writes this document from rows that it measures
or finds; nothing here was written by hand. The runs are small, so that they can be trained anywhere
(`tools/train`):

* *residual network*: 2.8 million parameters on scikit-learn's digits, SGD with momentum, 60 epochs to a plateau of
  96.5 % accuracy, a checkpoint an epoch; *lost* is the part of the accuracy on 397 other digits that is gone.
  Gradients are those of `ckstore.GradientAccumulator`.
* *GPT*: 4.9 million parameters on Python's sources, AdamW, 800 steps, a checkpoint every 40; *lost* is the rise of
  the loss on 128 other windows, as a part of it.
* *fine-tune*: the GPT on English prose, 200 steps, a checkpoint every 10, the first before any; *lost* is the same
  on prose, of ten versions.

Ratios are of files of 32-bit floats to everything that is stored. `searched`: of each version the setting that
takes the fewest bytes while an evaluation is at most 5 % worse, as in Inshrinkerator's paper; the baselines
QD-compressor, Check-N-Run and GOBO have the fewest levels that do so (`tools/fidelity/baselines.py`), and quantise
weights alone. The others have their defaults.

Papers: [LC] Chen, Liu, Ren, Jin, *On Efficient Constructions of Checkpoints*, ICML 2020. [I] Agrawal, Reddy,
Bhattamishra and others, *Inshrinkerator*, SoCC 2024, arXiv 2306.11800v3."""

_RUNS = {"cnn": "residual network", "gpt": "GPT", "finetune": "fine-tune"}

#: Schemes in the order of tables.
_ORDER = ("exact", "lattice", "lc", "dynaquant 1", "dynaquant, s", "QD", "Check", "GOBO", "excp", "SCAR", "TOPN")

_T95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 8: 2.31, 11: 2.20}


#: What the papers say of whole runs like these.
_WHOLE = {
    "cnn": "[I], table 2, ResNet-152, with 10 failures: Inshrinkerator 39.09x, 0.50 % lost; QD-compressor "
    "11.82x, -0.09 %; "
    "Check-N-Run 5.71x, 0.36 %; best versions above 100x (section 7.1), 366x (section 7.3). [LC], abstract: 28x.",
    "gpt": "[I], table 2, GPT-2 Medium, with 10 failures: Inshrinkerator 29.81x, 0.61 % lost; QD-compressor "
    "22.15x, 1.10 %; "
    "Check-N-Run 6.35x, 0.25 %. [LC] and [I] compress weights; of *all*, moments are two thirds.",
    "finetune": "Each version is 10 steps after the one before, where those of the papers are thousands.",
}


def whole(rows: list[Row]) -> str:
    """A run kept by every scheme."""
    lines = []
    for row in _ordered(rows, "name"):
        each = row["original"] / len(row["added"])
        late = row["added"][-(len(row["added"]) // 3) :]
        lines.append([
            _name(row["scheme"]), "weights" if row["part"] == "weights" else "all",
            f"{row['original'] / row['total']:.1f}x", f"{each / statistics.mean(late):.1f}x",
            f"{each / min(row['added']):.0f}x", f"{statistics.mean(row['lost']):+.2%}", f"{max(row['lost']):+.2%}",
        ])  # fmt: skip
    head = ["scheme", "of", "whole run", "last third", "best version", "lost, mean", "worst version"]
    run = rows[0]["run"]
    return f"{_table(head, sorted(lines, key=lambda line: line[1], reverse=True), text=2)}\n\n{_WHOLE[run]}"


def interrupted(rows: list[Row]) -> str:
    """Accuracy after failures."""
    (exact,) = (row for row in rows if row["scheme"] == "exact")
    base = [accuracy for accuracy, _ in exact["ends"]]
    lines = [["exact", "0", f"{statistics.mean(base):.2%}", "", f"{statistics.mean(e[1] for e in exact['ends']):.4f}"]]
    for row in _ordered((row for row in rows if row is not exact), "name"):
        ends = row["ends"]
        lost = [(before - after) / before for before, (after, _) in zip(base, ends, strict=True)]
        lines.append([
            _name(row["scheme"]), str(row["count"]), f"{statistics.mean(end[0] for end in ends):.2%}",
            f"{statistics.mean(lost):+.2%} ± {_half(lost):.2%}", f"{statistics.mean(end[1] for end in ends):.4f}",
        ])  # fmt: skip
    head = ["scheme", "failures", "accuracy", "lost of it", "loss"]
    return _table(head, sorted(lines, key=lambda line: int(line[1]))) + (
        f"\n\nA residual network of 0.3 million parameters, 40 epochs, whole checkpoints (of the baselines, "
        f"weights alone); "
        f"means over {len(base)} seeds, with 95 % confidence of what is lost; one digit is 0.25 %.\n\n"
        "[I], table 2 and section 7.1, ResNet-152: 10 failures cost 0.50 % (Inshrinkerator), -0.09 % "
        "(QD-compressor) and "
        "0.36 % (Check-N-Run) of the accuracy, 5 failures 0.16 %, 20 failures 1.1 %."
    )


def rework(rows: list[Row]) -> str:
    """Steps until the loss is back."""
    scar = next((row for row in rows if row["name"] == "SCAR, a tenth"), None)
    lines = []
    for row in _ordered(rows, "name"):
        counts = row["counts"]
        mean = statistics.mean(counts)
        factor = "" if scar is None else _factor(statistics.mean(scar["counts"]), mean)
        more = " or more" if max(counts) == row["most"] else ""
        lines.append([
            _name(row["name"]), f"{row['bytes'] / row['later']:.1f}x", f"{statistics.mean(row['rises']):+.2%}",
            f"{mean:.2f} ± {_half(counts):.2f}{more}", f"{max(counts)}{more}", factor,
        ])  # fmt: skip
    head = ["way", "a later version", "lost at once", "steps lost", "worst", "faster than SCAR"]
    return _table(head, lines) + (
        f"\n\nThe GPT is restored after steps 400 and 600 and goes on with {len(rows[0]['counts']) // 2} seeds of "
        f"batches until "
        "its loss on other windows is that of the checkpoint, judged after each step; 95 % confidence over all "
        "of these. A "
        f"count ends at {rows[0]['most']}: where it did, the mean is a lower bound. SCAR and TOPN write a tenth "
        f"of the "
        "parameters, as in [LC], or as many bytes as LC-Checkpoint.\n\n"
        "[LC], abstract: recovery up to 5.77 times faster than SCAR's, 28x smaller."
    )


def ablation(rows: list[Row]) -> str:
    """Bits of three codings."""
    lines = []
    for row in rows:
        raw = 32 * row["elements"]
        parts = {"whole run": row["bits"], "last third": row["bits"][-(len(row["bits"]) // 3) :]}
        for part, bits in parts.items():
            totals = [sum(column) for column in zip(*bits, strict=True)]
            lines.append([_RUNS[row["run"]], part, *(f"{raw * len(bits) / total:.1f}x" for total in totals)])
        best = [min(column) for column in zip(*row["bits"], strict=True)]
        lines.append([_RUNS[row["run"]], "best version", *(f"{raw / least:.1f}x" for least in best)])
    head = ["run", "of", "Huffman", "run lengths", "rearranged"]
    return _table(head, lines, text=2) + (
        "\n\nWeights of at least 65,536 elements, of the residual network with 4 levels and 40 % pruned, of the "
        "GPT with "
        "the defaults; the first version counts in whole runs.\n\n"
        "[I], section 7.3, ResNet-152: 25x, 28x and 39x over the whole run; the best versions 30x, 79x and 366x."
    )


def levels(rows: list[Row]) -> str:
    """Levels that quantisers need."""
    lines = []
    for row in rows:
        cells = []
        for needed in row["needed"].values():
            found = [levels for levels in needed if levels is not None]
            text = f"{statistics.mean(found):.1f}" if found else "none"
            cells.append(text if len(found) == len(needed) else f"{text} ({len(needed) - len(found)} never)")
        lines.append([_RUNS[row["run"]], row["quantiser"], str(len(needed)), *cells])
    head = ["run", "quantiser", "versions", "ε = 0.1 %", "1 %", "5 %"]
    return _table(head, lines, text=2) + (
        "\n\nMeans over evenly spaced versions of the fewest levels, up to 192, with which the weights of one "
        "version, nothing "
        "pruned or protected, are within ε.\n\n"
        "[I], table 4: ResNet-152: k-means on the sketch 20.2, 11.9, 7.2; Check-N-Run's levels 59.3, 40.7, 26.7; "
        "GPT-2 "
        "Medium: 54.7, 16.2, 9.1 and 106.9, 47.7, 24.6; plain k-means took more than 30 minutes."
    )


def costs(rows: list[Row]) -> str:
    """Seconds."""
    (quantiser,) = (row for row in rows if row["name"] == "quantiser")
    seconds = quantiser["seconds"]
    scale = quantiser["elements"] / quantiser["sample"]
    text = _table(
        ["step", "ckstore", "beside", "seconds", "times"],
        [
            ["partition", f"{seconds['partition']:.3f} s", "`numpy.quantile`", f"{seconds['quantiles']:.3f} s",
             f"{seconds['quantiles'] / seconds['partition']:.1f}"],
            ["clustering", f"{seconds['clustering']:.3f} s", f"scikit-learn's KMeans, {quantiser['sample']:,} elements",
             f"{seconds['scikit-learn']:.1f} s", f"{seconds['scikit-learn'] / seconds['clustering'] * scale:.0f}"],
        ],
    )  # fmt: skip
    text += (
        f"\n\nProcessor time for {quantiser['elements']:,} weights of the GPT and {quantiser['levels']} levels; "
        f"*times* is for as "
        "many elements. [I], table 5, on a GPU: 3 to 4 times faster than CuPy's quantiles, 9 to 65 times faster "
        "than CuML's "
        "k-means.\n\n"
    )
    lines = []
    for row in _ordered((row for row in rows if row is not quantiser), "name"):
        step = row["alone"][1] / row["steps"]
        version = (row["beside"][1] - row["alone"][1]) / row["versions"]
        lines.append([
            _name(row["scheme"]), f"{step:.3f} s", f"{version:.2f} s", f"{version / (40 * step):.1%}",
            f"{version / (1000 * step):.2%}", f"{row['beside'][0] / row['alone'][0] - 1:+.0%}",
        ])  # fmt: skip
    head = [
        "scheme", "a step of training", "a version", "share, every 40 steps", "every 1,000", "wall time, every "
        "10 steps",
    ]  # fmt: skip
    return (
        text
        + _table(head, lines)
        + (
            "\n\nProcessor time of the GPT's steps on one core, and what versions of its whole checkpoints (59 "
            "MB) add to it while "
            "training goes on beside. [I], table 2: 0.3 to 0.6 % of the training time, with a GPU to compress."
        )
    )


def transfer(rows: list[Row]) -> str:
    """Fine-tunes from what came back."""
    lines = []
    for row in _ordered(rows, "name"):
        first = row["losses"][0]
        lines.append([
            _name(row["scheme"]), f"{row['bytes'] / row['nbytes']:.1f}x", f"{row['lost']:+.2%}", f"{first:.4f}",
            *(f"{loss:.4f}" for loss in row["losses"][1:]),
        ])  # fmt: skip
    head = ["scheme", "ratio", "lost at once", "prose, before", *(f"step {step}" for step in (50, 100, 150, 200))]
    return _table(head, lines) + (
        "\n\nThe weights of the pretrained GPT are stored once, without a parent, and fine-tuned on prose from "
        "what comes back, "
        "with the same batches; losses on other prose.\n\n"
        "[I], table 3: Inshrinkerator 11.3x (BERT Large: SST-2 93.3 instead of 93.2, MNLI 85.9 and 85.9, STS-B "
        "88.3 and 86.1) "
        "and 10.0x (Pythia 1B on Alpaca: 0.919 instead of 0.894); Check-N-Run's levels 4.6x and 5.3x."
    )


def shown(rows: dict[str, list[Row]]) -> str:
    """What was to be shown of the whole runs."""
    lines = []

    def judged(run: str, part: str, scheme: str, least: float | None, most: float, best: float | None) -> None:
        for row in rows.get(run, []):
            if row["part"] == part and row["scheme"].startswith(scheme):
                ratio = row["original"] / row["total"]
                peak = row["original"] / len(row["added"]) / min(row["added"])
                reached = max(row["lost"]) <= most and ratio >= (least or 0) and peak >= (best or 0)
                target = f"every version within {most:.1%}"
                target += "" if least is None else f", {least:g}x"
                target += "" if best is None else f", best version {best:g}x"
                figure = f"{max(row['lost']):+.2%}, {ratio:.1f}x, best version {peak:.0f}x"
                what = f"{_name(row['scheme'])}, {_RUNS[run]}, {'weights' if part == 'weights' else 'all'}"
                lines.append([what, target, figure, "reached" if reached else "not reached"])

    for part in ("weights", "whole"):
        judged("gpt", part, "lc", None, 0.005, None)
        judged("gpt", part, str(SEARCHED), 20, TOLERANCE, None)
        judged("cnn", part, str(SEARCHED), 35, TOLERANCE, 100)
    return _table(["what", "target", "figure", "verdict"], lines, text=4)


#: What was to be shown, which several parts say.
SHOWN = "What was to be shown"

#: Heading and text of each part, in the document's order.
SECTIONS: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "cnn": ("Whole runs: residual network", whole),
    "gpt": ("Whole runs: GPT", whole),
    "finetune": ("Whole runs: fine-tune", whole),
    "interrupted": ("Failures", interrupted),
    "rework": ("Rework", rework),
    "ablation": ("What each step of the coding saves", ablation),
    "levels": ("Levels", levels),
    "costs": ("What compressing costs", costs),
    "transfer": ("Transfer learning", transfer),
}


def write(rows: dict[str, list[Row]], tier: str, machine: str, target: Path) -> None:
    """Write the sections of parts that have rows; those of others stay as they were.

    Parameters
    ----------
    rows
        By part.
    tier, machine
        What they were measured with and on.
    target
        The document; replaced.
    """
    parts = re.split(r"^## (.*)\n", target.read_text() if target.exists() else "", flags=re.MULTILINE)[1:]
    known = dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))
    if rows.get("cnn") and rows.get("gpt"):
        known[SHOWN] = shown(rows)
    for part, (heading, text) in SECTIONS.items():
        if rows.get(part):
            day = max(row["day"] for row in rows[part])
            command = f"`tools/bench/schemes --tier {tier} --only {part}`"
            known[heading] = f"{text(rows[part])}\n\nMeasured on {day} with {command} on {machine}."
    headings = [SHOWN, *(heading for heading, _ in SECTIONS.values())]
    found = [f"## {heading}\n\n{known[heading]}" for heading in headings if heading in known]
    target.write_text("\n\n".join([INTRODUCTION, *found]) + "\n")


def _name(scheme: str) -> str:
    """As tables have it."""
    for short, name in (("lattice", "ckstore's lattices"), ("lc", "LC-Checkpoint"), ("excp", "ExCP")):
        if scheme.startswith(short):
            return name
    return "DynaQuant, default" if scheme.startswith("dynaquant 1") else scheme.replace("dynaquant", "DynaQuant")


def _ordered(rows: Iterable[Row], name: str) -> list[Row]:
    def place(row: Row) -> tuple[int, str]:
        scheme = row.get("scheme", row[name])
        found = [number for number, start in enumerate(_ORDER) if scheme.startswith(start)]
        return (found or [len(_ORDER)])[0], row[name]

    return sorted(rows, key=place)


def _half(values: list[float]) -> float:
    """Half of the 95 % confidence interval of a mean, by Student's distribution."""
    if len(values) < 2:
        return math.inf
    return _T95.get(len(values) - 1, 2.0) * statistics.stdev(values) / math.sqrt(len(values))


def _factor(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.1f}x" if ours else "no steps lost"


def _table(head: list[str], lines: Iterable[list[str]], *, text: int = 1) -> str:
    """A table in Markdown, whose first columns are text."""
    marks = ["---"] * text + ["---:"] * (len(head) - text)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))
