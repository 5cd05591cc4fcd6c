"""The output of the bench: tables, verdicts, and a plot of loss against savings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.fidelity.rows import Row
from tools.fidelity.verdicts import Findings, Verdict

#: The figure of each run in its rate-distortion curve, and the label of the axis.
_DISTORTIONS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "gpt": ("rise of the loss after resuming, %", lambda row: row.mean("resumed")),
    "weights": ("rise of the loss after resuming, %", lambda row: row.mean("resumed")),
    "cnn": ("accuracy lost by the worst version, %", lambda row: row.worst("accuracy lost")),
    "finetune": ("gain lost by the worst version, %", lambda row: row.worst("gain lost")),
    "finetune weights": ("gain lost by the worst version, %", lambda row: row.worst("gain lost")),
    "bf16": ("rise of the loss, %", lambda row: row.mean("at once")),
}

#: Panels of the plot side by side.
_COLUMNS = 3

#: Schemes without a curve of their own.
_REFERENCES = ("exact", "rounded")


def text(findings: Findings, verdicts: list[Verdict]) -> str:
    """Return tables and verdicts."""
    parts = []
    for run in dict.fromkeys(row.run for row in findings.rows):
        rows = _ordered(row for row in findings.rows if row.run == run)
        parts += [_figures(run, rows), _ledger(run, rows)]
    if findings.rework:
        head = ["rework, gpt", "delta ratio", "at once", "steps back", "worst"]
        lines = [
            [
                way.name, f"{way.ratio:.1f}x", f"{way.at_once:+.3%}", f"{way.steps:.2f}",
                f"{way.worst}" if way.worst < way.most else f"{way.most} or more",
            ]
            for way in findings.rework
        ]  # fmt: skip
        parts.append(_table(head, lines))
    if findings.failures is not None:
        head = ["failure after step", "restored", "spike over the uninterrupted run", "over this run without it"]
        found = findings.failures.failures
        lines = [[f"{f.step}", f"{f.restored}", f"{f.spike:+.3%}", f"{f.own_spike:+.3%}"] for f in found]
        parts.append(_table(head, lines))
    if findings.coded:
        head = ["entropy coding", "bits an element", "order-0", "above it"]
        parts.append(
            _table(head, [[c.name, f"{c.bits:.4f}", f"{c.entropy:.4f}", f"{c.excess:+.2%}"] for c in findings.coded])
        )
    if findings.ablation is not None:
        head = ["DynaQuant's coding, bits a weight", *vars(findings.ablation)]
        parts.append(
            _table(head, [["gpt, last version", *(f"{bits:.4f}" for bits in vars(findings.ablation).values())]])
        )
    if findings.ranked:
        head = ["DynaQuant's ranks, gpt", "at once"]
        parts.append(_table(head, [[f"step {r.step}, {r.way}", f"{r.rise:+.3%}"] for r in findings.ranked]))
    if findings.thinning is not None:
        thinned = findings.thinning
        head = ["thinning, gpt", "unshared bytes", "freed", "share", "others changed", "at once"]
        line = [
            "one version", f"{thinned.unshared:,}", f"{thinned.freed:,}", f"{thinned.share:.1%}",
            f"{thinned.changed} of {thinned.others}", f"{thinned.at_once:+.3%}",
        ]  # fmt: skip
        parts.append(_table(head, [line]))
    if findings.searched:
        head = ["search, gpt", "fidelity", "evaluations", "at once", "delta ratio"]
        lines = [
            [f"step {v.step}", v.fidelity, f"{v.evaluations}", f"{v.rise:+.3%}", f"{v.ratio:.1f}x"]
            for v in findings.searched
        ]
        parts.append(_table(head, lines))
    words = {True: "reached", False: "NOT REACHED", None: "not measured"}
    lines = [[v.subject, v.target, v.figure, words[v.reached]] for v in verdicts]
    parts.append(_table(["requirement", "target", "figure", "verdict"], lines, left=True))
    return "\n\n".join(parts)


def plot(rows: list[Row], target: Path) -> None:
    """Write the rate-distortion curves, a panel per run and a line per scheme."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    names = [run for run in _DISTORTIONS if any(row.run == run for row in rows)]
    columns = min(_COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(5 * columns, 4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(names) :]:
        axes.remove()
    for run, axes in zip(names, panels, strict=False):
        label, distortion = _DISTORTIONS[run]
        mine = [row for row in rows if row.run == run and row.setting.scheme not in _REFERENCES]
        for scheme in dict.fromkeys(row.setting.scheme for row in mine):
            points = sorted((row.stored.ratio, 100 * distortion(row)) for row in mine if row.setting.scheme == scheme)
            # Infinite values have no place; their scheme is named all the same.
            axes.plot([ratio for ratio, _ in points], [lost for _, lost in points], marker="o", label=scheme)
        axes.set(title=run, xscale="log", xlabel="ratio of the whole run, everything counted", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(target, dpi=120)


def document(findings: Findings, verdicts: list[Verdict]) -> dict[str, Any]:
    """Return all figures as containers of plain JSON values: null for infinite ones."""
    failures = findings.failures
    found = {
        "rows": [row.to_json() for row in findings.rows],
        "rework": [vars(way) for way in findings.rework],
        "failures": failures and {"rise": failures.rise, "failures": [vars(failure) for failure in failures.failures]},
        "ablation": findings.ablation and vars(findings.ablation),
        "ranked": [vars(way) for way in findings.ranked],
        "thinning": findings.thinning and vars(findings.thinning) | {"share": findings.thinning.share},
        "searched": [vars(version) for version in findings.searched],
        "coded": [vars(sample) | {"excess": sample.excess} for sample in findings.coded],
        "verdicts": [vars(verdict) for verdict in verdicts],
    }
    return _finite(found)


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _ordered(rows: Iterable[Row]) -> list[Row]:
    """Return rows by scheme in order of appearance, then by quality."""
    found = list(rows)
    schemes = list(dict.fromkeys(row.setting.scheme for row in found))
    return sorted(found, key=lambda row: (schemes.index(row.setting.scheme), row.setting.quality or 0))


def _figures(run: str, rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    head = [run, "bytes", "ratio", "delta ratio", "bases"]
    for name in names:
        head += [name, "worst"]
    head += ["ingest", "processors", "restore", "processors"]
    lines = []
    for row in rows:
        stored = row.stored
        line = [
            str(row.setting), f"{stored.total:,}", f"{stored.ratio:.2f}x", f"{stored.delta_ratio:.1f}x",
            f"{sum(stored.bases)}",
        ]  # fmt: skip
        for name in names:
            line += [f"{row.mean(name):+.3%}", f"{row.worst(name):+.3%}"]
        if row.exact is None:
            line += ["-"] * 4
        else:
            ratios = [*stored.ingest.over(row.exact.ingest), *stored.restore.over(row.exact.restore)]
            line += [f"{ratio:.2f}" for ratio in ratios]
        lines.append(line)
    note = "ingest, restore: wall time and processor time over those of exact"
    return f"{_table(head, lines)}\n{note}"


def _ledger(run: str, rows: list[Row]) -> str:
    causes = list(dict.fromkeys(cause for row in rows for cause in row.stored.ledger))
    lines = [[str(row.setting), *(f"{row.stored.ledger.get(cause, 0):,}" for cause in causes)] for row in rows]
    return _table([f"{run}, bytes", *causes], lines)


def _table(head: list[str], rows: Iterable[list[str]], *, left: bool = False) -> str:
    """Return columns of text; all but the first are right-aligned unless `left`."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = []
    for line in lines:
        first, *others = zip(line, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(c.ljust(w) if left else c.rjust(w) for c, w in others)]
        shown.append("  ".join(cells).rstrip())
    shown.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(shown)
