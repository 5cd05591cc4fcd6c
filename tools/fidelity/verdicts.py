"""The requirements of the bench, one by one: the figure, the target, and whether it is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tools.fidelity.ablation import Ablation
from tools.fidelity.archives import DEFAULT
from tools.fidelity.coding import Coded
from tools.fidelity.failures import Interrupted
from tools.fidelity.ranking import Ranked
from tools.fidelity.rework import Rework
from tools.fidelity.rows import Row
from tools.fidelity.searching import TOLERANCE, Searched
from tools.fidelity.thinning import Thinning

_OURS = DEFAULT.scheme

#: The limit of evaluations of a search after the first version.
_EVALUATIONS = 12

#: Accuracies are parts of 397 digits: a tolerance for rounding errors.
_EPSILON = 1e-9


@dataclass(frozen=True)
class Verdict:
    """One requirement.

    Attributes
    ----------
    subject
    The requirement's name.
    target
        In words.
    figure
        In words.
    reached
        None if it was not measured.
    """

    subject: str
    target: str
    figure: str
    reached: bool | None


@dataclass
class Findings:
    """The findings of one pass of the bench; empty or None for parts that did not run."""

    rows: list[Row] = field(default_factory=list)
    rework: list[Rework] = field(default_factory=list)
    failures: Interrupted | None = None
    coded: list[Coded] = field(default_factory=list)
    ablation: Ablation | None = None
    ranked: list[Ranked] = field(default_factory=list)
    thinning: Thinning | None = None
    searched: list[Searched] = field(default_factory=list)

    def of(self, run: str, scheme: str) -> list[Row]:
        """Return the rows of a run and a scheme."""
        return [row for row in self.rows if row.run == run and row.setting.scheme == scheme]


def judge(findings: Findings) -> list[Verdict]:
    """Return all verdicts, in the order of the requirements."""
    return [
        *_ratios(findings, "gpt", "GPT, weights + moments", ((0.001, 45, 80), (0.003, 70, 120))),
        *_ratios(findings, "weights", "GPT, weights only", ((0.001, 25, None), (0.003, 40, None))),
        *_limited(findings, "cnn", "SGD run, weights", "accuracy lost", ((50, 0.005), (100, 0.015))),
        *_limited(findings, "finetune weights", "fine-tune, weights only", "gain lost", ((20, 0.005),)),
        *_limited(findings, "finetune", "fine-tune, weights + moments", "gain lost", ((50, 0.005),)),
        _excp(findings),
        *_published(findings),
        *_failures(findings.failures),
        _coding(findings.coded),
        *_thinning(findings.thinning),
        _searched(findings.searched),
        *_speed(findings),
    ]


def _ratios(
    findings: Findings, run: str, name: str, targets: tuple[tuple[float, float, float | None], ...]
) -> Iterator[Verdict]:
    """Yield ratios of the whole run, and of the median delta version, at no more than a rise after resuming."""
    for rise, whole, delta in targets:
        allowed = [row for row in findings.of(run, _OURS) if row.mean("resumed") <= rise]
        sizes: list[tuple[str, float | None, Callable[[Row], float]]] = [
            ("whole run", whole, lambda row: row.stored.ratio),
            ("median delta version", delta, lambda row: row.stored.delta_ratio),
        ]
        for subject, target, ratio in sizes:
            if target is not None:
                yield _largest(
                    f"{name}, {subject}", f"{target:g}x at no more than {rise:+.1%} after resuming", target,
                    allowed, findings.of(run, _OURS), ratio, _risen,
                )  # fmt: skip


def _risen(row: Row) -> str:
    return f"{row.mean('resumed'):+.3%}, worst version {row.worst('resumed'):+.3%}"


def _limited(
    findings: Findings, run: str, name: str, figure: str, targets: tuple[tuple[float, float], ...]
) -> Iterator[Verdict]:
    """Yield ratios of the whole run while no version loses more than a limit."""
    for ratio, limit in targets:
        rows = findings.of(run, _OURS)
        allowed = [row for row in rows if row.worst(figure) <= limit + _EPSILON]
        yield _largest(
            f"{name}, whole run", f"{ratio:g}x with no version's {figure} above {limit:.1%}", ratio,
            allowed, rows, lambda row: row.stored.ratio, lambda row: f"{row.worst(figure):.3%}",
        )  # fmt: skip


def _largest(
    subject: str,
    target: str,
    least: float,
    allowed: list[Row],
    rows: list[Row],
    ratio: Callable[[Row], float],
    cost: Callable[[Row], str],
) -> Verdict:
    if not rows:
        return Verdict(subject, target, "", None)
    if not allowed:
        finest = min(rows, key=ratio)
        return Verdict(subject, target, f"none; {finest.setting} is {ratio(finest):.1f}x at {cost(finest)}", False)
    best = max(allowed, key=ratio)
    return Verdict(subject, target, f"{ratio(best):.1f}x at {cost(best)} ({best.setting})", ratio(best) >= least)


def _excp(findings: Findings) -> Verdict:
    subject, target = "against ExCP, same run", "3 times its ratio at no more than its loss"
    theirs, ours = findings.of("gpt", "excp"), findings.of("gpt", _OURS)
    if not theirs or not ours:
        return Verdict(subject, target, "", None)
    (excp,) = theirs
    rise = excp.mean("resumed")
    allowed = [row for row in ours if row.mean("resumed") <= rise]
    best = max((row.stored.ratio for row in allowed), default=0.0)
    figure = f"{best / excp.stored.ratio:.2f} times its {excp.stored.ratio:.1f}x, at no more than {rise:+.3%}"
    return Verdict(subject, target, figure, best >= 3 * excp.stored.ratio)


def _published(findings: Findings) -> Iterator[Verdict]:
    for scheme, name in (("lc", "LC-Checkpoint"), ("dynaquant", "DynaQuant")):
        for run, figure in (("gpt", "resumed"), ("weights", "resumed"), ("cnn", "loss")):
            theirs, ours = findings.of(run, scheme), findings.of(run, _OURS)
            if theirs and ours:
                yield _ahead(f"against {name}, {run}", figure, ours, theirs)
    yield _kind(
        "LC-Checkpoint on the SGD run", "20x with no version's accuracy lost above 1.5%", findings.of("cnn", "lc"),
        lambda row: row.stored.ratio, lambda row: row.worst("accuracy lost"), 0.015,
    )  # fmt: skip
    yield _kind(
        "DynaQuant late in training, weights", "20x at no more than +0.3% after resuming",
        findings.of("weights", "dynaquant"), lambda row: row.stored.late_ratio, lambda row: row.mean("resumed"), 0.003,
    )  # fmt: skip
    subject, target = "DynaQuant's ablation", "Huffman < + run lengths < + rearrangement"
    if findings.ablation is None:
        yield Verdict(subject, target, "", None)
        return
    steps = list(vars(findings.ablation).values())
    text = " > ".join(f"{bits:.3f}" for bits in steps) + " bits a weight"
    yield Verdict(subject, target, text, steps[0] > steps[1] > steps[2])


def _ahead(subject: str, figure: str, ours: list[Row], theirs: list[Row]) -> Verdict:
    """Compare our ratio with theirs at the loss of each of their settings, by our curve (the logarithm, linearly)."""
    curve: list[tuple[float, float]] = []
    for row in sorted(ours, key=lambda row: row.mean(figure)):
        if not curve or row.stored.ratio > curve[-1][1]:
            curve.append((row.mean(figure), row.stored.ratio))
    losses, ratios = zip(*curve, strict=True)
    within = [row for row in theirs if row.mean(figure) >= losses[0]]
    closer = [row for row in theirs if row.mean(figure) < losses[0]]
    gains = [float(np.exp(np.interp(row.mean(figure), losses, np.log(ratios)))) / row.stored.ratio for row in within]
    text = f"{min(gains):.2f} to {max(gains):.2f} times its ratio" if gains else "nothing to compare"
    if closer:
        text += f"; {len(closer)} of its {len(theirs)} settings lose less than any of ours"
    beaten = any(row.stored.ratio >= ratios[0] for row in closer)
    reached = min(gains) > 1 and not beaten if gains else False if beaten else None
    return Verdict(subject, "a larger ratio at the loss of each of its settings", text, reached)


def _kind(
    subject: str,
    target: str,
    rows: list[Row],
    ratio: Callable[[Row], float],
    lost: Callable[[Row], float],
    limit: float,
) -> Verdict:
    allowed = [row for row in rows if lost(row) <= limit + _EPSILON]
    return _largest(subject, target, 20, allowed, rows, ratio, lambda row: f"{lost(row):+.2%}")


def _failures(found: Interrupted | None) -> Iterator[Verdict]:
    subject = "failures and restores from coarse versions in one run"
    if found is None:
        yield Verdict(f"{subject}, final loss", "within 0.5%", "", None)
        yield Verdict(f"{subject}, spikes", "none above 1%", "", None)
        return
    subject = f"{len(found.failures)} {subject}"
    yield Verdict(f"{subject}, final loss", "within 0.5%", f"{found.rise:+.3%}", found.rise <= 0.005)
    spike = max(failure.spike for failure in found.failures)
    own = max(failure.own_spike for failure in found.failures)
    figure = f"{spike:+.2%} over the uninterrupted run, {own:+.2%} over this run without that failure"
    yield Verdict(f"{subject}, spikes", "none above 1%", figure, spike <= 0.01)


def _coding(coded: list[Coded]) -> Verdict:
    subject, target = "entropy coding, 0.02 to 16 bits an element", "within 2% of the order-0 entropy"
    if not coded:
        return Verdict(subject, target, "", None)
    worst = max(coded, key=lambda sample: sample.excess)
    return Verdict(subject, target, f"{worst.excess:+.2%} ({worst.name})", worst.excess <= 0.02)


def _thinning(found: Thinning | None) -> Iterator[Verdict]:
    freed = Verdict("thinning a version of the GPT run", "frees at least 90% of its unshared bytes", "", None)
    kept = Verdict("thinning, all other versions", "keep their SHA-256", "", None)
    if found is not None:
        figure = f"{found.freed:,} of {found.unshared:,} bytes, {found.share:.1%}"
        freed = replace(freed, figure=figure, reached=found.share >= 0.9)
        kept = replace(kept, figure=f"{found.others - found.changed} of {found.others}", reached=not found.changed)
    yield from (freed, kept)


def _searched(found: list[Searched]) -> Verdict:
    subject = f"search with an evaluation command, {TOLERANCE:.1%} tolerated"
    target = "within it, and at most 12 evaluations after the first version"
    if not found:
        return Verdict(subject, target, "", None)
    worst = max(version.rise for version in found)
    most = max(version.evaluations for version in found[1:])
    figure = f"{worst:+.3%} at most; {found[0].evaluations} evaluations, then at most {most} a version"
    return Verdict(subject, target, figure, worst <= TOLERANCE and most <= _EVALUATIONS)


def _speed(findings: Findings) -> Iterator[Verdict]:
    for subject in ("ingest", "restore"):
        target = "not slower than exact"
        rows = [row for row in findings.rows if row.setting == DEFAULT]
        if not rows:
            yield Verdict(f"coarse {subject}", target, "", None)
            continue
        times = {
            row.run: getattr(row.stored, subject).over(getattr(row.exact, subject))[0] for row in rows if row.exact
        }
        figure = ", ".join(f"{run} {ratio:.2f}" for run, ratio in times.items())
        yield Verdict(f"coarse {subject}", target, f"wall time over that of exact: {figure}", max(times.values()) <= 1)
