"""Findings: the odd things in the statistics of a run, for the top of its report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from ckstore.report.statistics import RunStatistics

Mask = npt.NDArray[np.bool]
Floats = npt.NDArray[np.float64]
Kind = Literal["nan", "norm", "ratio", "rate", "frozen"]
Severity = Literal["error", "warning"]

#: Tensors by the first and last version concerned.
_Stretches = dict[tuple[int, int], list[int]]

#: A root mean square this many times the median of the versions before has exploded.
_EXPLODED = 10.0

#: An update-to-weight ratio is unusual beyond this many deviations (MAD, as standard deviation) and this factor.
_DEVIATIONS = 8.0
_FACTOR = 8.0

#: The update-to-weight ratios of this share of the layers grow by this factor where a learning rate is doubled, and by
#: less than the third factor between the versions before: in a warm-up they grow steadily.
_TOGETHER = 0.8
_JUMP = 1.55
_STEADY = 1.25

#: Intervals are comparable if the longer has at most this many times the steps.
_ALIKE = 1.25

#: A tensor that moved has stopped when it is still over at least this many intervals, and longer than ever before.
_STILL = 4

#: Findings of one kind that are listed.
_MOST = 8

#: The number of a layer in a path.
_NUMBER = re.compile(r"(?<![^/.\[])[0-9]+(?![^/.\]])")


@dataclass(frozen=True, slots=True)
class Finding:
    """An odd thing in a run.

    Attributes
    ----------
    kind
        `nan`, `norm`, `ratio`, `rate` or `frozen`.
    severity
        `error` or `warning`.
    text
        One sentence with tensor and step.
    tensor
        Index of the tensor; None for a subtree or for the run.
    first, last
        Indexes of the first and last version concerned.

    Examples
    --------
    >>> [finding] = store.report("gpt").findings["gpt"]
    >>> finding.kind, finding.text
    ('frozen', 'model/bias did not move from step 100 to step 300.')
    """

    kind: Kind
    severity: Severity
    text: str
    tensor: int | None
    first: int
    last: int


def findings(run: RunStatistics) -> list[Finding]:
    """Return the odd things in a run: errors first, then by version."""
    if len(run.versions) < 2 or not run.tensors:
        return []
    found = [*_nonfinite(run), *_exploded(run), *_rates(run), *_unusual(run), *_frozen(run)]
    return sorted(found, key=lambda item: (item.severity != "error", item.first))


def _weights(run: RunStatistics, axes: int = 0) -> Mask:
    """Return whether each tensor is a weight of at least `axes` axes, with more than one element."""
    return np.array([h.role == "weight" and len(h.shape) >= axes and h.elements > 1 for h in run.tensors], np.bool)


def _step(run: RunStatistics, place: int) -> str:
    row = run.versions[place].row
    return f"version {row.number}" if row.step is None else f"step {row.step}"


def _logarithm(values: npt.NDArray[np.float32]) -> Floats:
    """Return logarithms, NaN for values that are not positive and finite."""
    wide = values.astype(np.float64)
    return np.log(np.where((wide > 0) & np.isfinite(wide), wide, np.nan))


def _nonfinite(run: RunStatistics) -> Iterator[Finding]:
    """Find tensors with NaN or infinities, but not constants such as masks, which have them from the start."""
    share = run.values["nonfinite"]
    stretches: _Stretches = defaultdict(list)
    for number in np.flatnonzero((share > 0).any(1)):
        places = np.flatnonzero(share[number] > 0)
        is_moment = run.tensors[number].role.endswith("moment")
        if np.nanmin(share[number]) < np.nanmax(share[number]) or is_moment or _moved(run, int(number)).any():
            stretches[int(places[0]), int(places[-1])].append(int(number))

    def text(subject: str, members: list[int], first: int, last: int) -> str:
        is_last = last == int(np.flatnonzero(~np.isnan(share).all(0))[-1])
        when = f"at {_step(run, first)}"
        if last > first:
            when = f"since {_step(run, first)}" if is_last else f"from {_step(run, first)} to {_step(run, last)}"
        worst = float(np.nanmax(share[members, first]))
        return f"{subject} has NaN or infinite values {when}, up to {worst:.1%} of elements."

    yield from _lines(run, "nan", "error", stretches, range(len(run.tensors)), text)


def _moved(run: RunStatistics, number: int) -> Mask:
    """Return whether a tensor moved since the version before, by version."""
    history = run.tensors[number]
    unchanged = run.values["unchanged"][number]
    moved: Mask = unchanged < 1
    if history.sampled is not None:  # Others than the read elements may have moved.
        moved[1:] |= [one != other for one, other in pairwise(history.objects)]
    moved &= ~np.isnan(unchanged)
    return moved


def _coarse(run: RunStatistics) -> Mask:
    """Return whether the values of each version are coarse: they are off by more than a step may move them."""
    return np.array([version.row.fidelity == "coarse" for version in run.versions], np.bool)


def _exploded(run: RunStatistics) -> Iterator[Finding]:
    """Find weights that grow far beyond their own size so far, and beyond the usual size of the weights."""
    norm, weights = run.values["rms"].astype(np.float64), np.flatnonzero(_weights(run))
    starts = norm[weights, [run.tensors[number].first for number in weights]]
    usual = starts[_weights(run, 2)[weights] & ~np.isnan(starts)]
    floor = float(np.median(usual)) if usual.size else 0.0
    stretches: _Stretches = defaultdict(list)
    factors: dict[int, float] = {}
    for number in weights:
        for place in range(1, norm.shape[1]):
            before = norm[number, :place]
            before = before[before > 0]
            if before.size and norm[number, place] > max(_EXPLODED * np.median(before), floor):
                factors[int(number)] = norm[number, place] / np.median(before)
                stretches[place, norm.shape[1] - 1].append(int(number))
                break

    def text(subject: str, members: list[int], first: int, last: int) -> str:
        factor = max(factors[number] for number in members)
        return f"The norm of {subject} exploded at {_step(run, first)}: {factor:.3g} times its median before."

    yield from _lines(run, "norm", "error", stretches, weights.tolist(), text)


def _rates(run: RunStatistics) -> Iterator[Finding]:
    """Find steps at which nearly all layers begin to move faster, after they moved steadily: a higher learning rate."""
    growth = _growth(run)
    for place in range(3, growth.shape[1]):
        now, before = (growth[~np.isnan(growth[:, at]), at] for at in (place, place - 1))
        if min(now.size, before.size) < 2 or np.median(before) > np.log(_STEADY):
            continue
        if np.mean(now > np.log(_JUMP)) >= _TOGETHER:
            text = f"Nearly all layers move {np.exp(np.median(now)):.2g} times as far per step after {_step(run, place - 1)}, as with a higher learning rate."  # noqa: E501
            yield Finding("rate", "warning", text, None, place, place)


def _ratios(run: RunStatistics) -> Floats:
    """Return the logarithm of each matrix's ratio, tensors x versions, NaN where an end of the interval is coarse."""
    ratio, coarse = _logarithm(run.values["ratio"]), _coarse(run)
    ratio[~_weights(run, 2)] = np.nan
    ratio[:, 1:][:, coarse[1:] | coarse[:-1]] = np.nan
    return ratio


def _growth(run: RunStatistics) -> Floats:
    """Return the growth of the logarithm of each matrix's ratio, tensors x versions, NaN between unlike intervals."""
    ratio = _ratios(run)
    spans = np.diff(np.array(run.steps(), np.float64), prepend=np.nan)
    growth = np.full_like(ratio, np.nan)
    for place in range(2, growth.shape[1]):
        if max(spans[place - 1 : place + 1]) <= _ALIKE * min(spans[place - 1 : place + 1]):
            growth[:, place] = ratio[:, place] - ratio[:, place - 1]
    return growth


def _unusual(run: RunStatistics) -> Iterator[Finding]:
    """Find matrices whose ratio leaves its usual place among the layers, or is far from that of the others."""
    ratio = _ratios(run)
    layers = np.flatnonzero(~np.isnan(ratio).all(1))
    intervals = np.flatnonzero((~np.isnan(ratio[layers])).sum(0) >= 4) if layers.size else np.array([], np.intp)
    if layers.size < 4 or not intervals.size:
        return
    # Relative to the median layer, so that schedules do not count.
    relative = ratio[np.ix_(layers, intervals)]
    relative -= np.nanmedian(relative, axis=0)
    usual = np.nanmedian(relative, axis=1)
    always = {int(layers[row]): float(usual[row]) for row, _ in _outliers(usual[:, None], usual)}
    yield from _ratio_lines(run, layers, always, (int(intervals[0]), int(intervals[-1])))
    residual = relative - usual[:, None]
    sometimes: dict[int, dict[int, float]] = defaultdict(dict)
    seen = set[int]()
    for row, place in _outliers(residual, residual) if intervals.size >= 4 else ():
        if row not in seen:
            seen.add(row)
            sometimes[int(intervals[place])][int(layers[row])] = float(residual[row, place])
    for place, off in sometimes.items():
        yield from _ratio_lines(run, layers, off, (place, place))


def _ratio_lines(
    run: RunStatistics, layers: npt.NDArray[np.intp], off: Mapping[int, float], stretch: tuple[int, int]
) -> Iterator[Finding]:
    """Yield findings on the layers whose ratio is off, by its logarithm, at one version or throughout."""

    def text(subject: str, members: list[int], first: int, last: int) -> str:
        most = max((off[number] for number in members), key=abs)
        times = f"{np.exp(most):.2g} times" if most > 0 else f"a {np.exp(-most):.2g}th of"
        usual = f"its usual one at {_step(run, first)}" if first == last else "that of the other layers throughout"
        return f"The update-to-weight ratio of {subject} is {times} {usual}."

    for sign in (1, -1):
        stretches = {stretch: [number for number, value in off.items() if value * sign > 0]}
        yield from _lines(run, "ratio", "warning", stretches, layers.tolist(), text)


def _outliers(values: Floats, sample: Floats) -> Iterator[tuple[int, int]]:
    """Yield the places of values far from 0, by the median absolute deviation of a sample."""
    deviation = 1.4826 * float(np.nanmedian(np.abs(sample)))
    limit = max(_DEVIATIONS * deviation, np.log(_FACTOR))
    for row, place in np.argwhere(np.abs(values) > limit):
        yield int(row), int(place)


def _frozen(run: RunStatistics) -> Iterator[Finding]:
    """Find weights that did not move, while others did: throughout, or up to the last version."""
    weights = np.flatnonzero(_weights(run))
    if not weights.size:
        return
    moved = np.array([_moved(run, int(number)) for number in weights])
    there = ~np.isnan(run.values["unchanged"][weights])
    there &= moved.any(0)
    there[:, 1:] &= np.diff(_coarse(run).astype(np.int8)) == 0  # Coarse values differ from exact ones.
    stretches: _Stretches = defaultdict(list)
    for row, number in enumerate(weights):
        places = np.flatnonzero(there[row])
        lengths = [(still, len(list(group))) for still, group in groupby((~moved[row, places]).tolist())]
        if not lengths or not lengths[-1][0]:
            continue
        length = lengths.pop()[1]
        longest = max((before for still, before in lengths if still), default=0)
        if not lengths or length >= max(_STILL, longest + 1):
            stretches[int(places[-length]) - 1, int(places[-1])].append(int(number))

    def text(subject: str, members: list[int], first: int, last: int) -> str:
        return f"{subject} did not move from {_step(run, first)} to {_step(run, last)}."

    yield from _lines(run, "frozen", "warning", stretches, weights.tolist(), text)


def _lines(
    run: RunStatistics,
    kind: Kind,
    severity: Severity,
    stretches: Mapping[tuple[int, int], Sequence[int]],
    among: Sequence[int],
    text: Callable[[str, list[int], int, int], str],
) -> Iterator[Finding]:
    """Yield a finding for each subject of the tensors of a stretch of versions."""
    subtrees = [_subtrees(history.path) for history in run.tensors]
    for (first, last), numbers in stretches.items():
        for subject, members in _subjects(subtrees, numbers, among):
            tensor = members[0] if len(members) == 1 else None
            yield Finding(kind, severity, text(subject, members, first, last), tensor, first, last)


def _subjects(
    subtrees: Sequence[list[tuple[str, str]]], numbers: Sequence[int], among: Sequence[int]
) -> list[tuple[str, list[int]]]:
    """Group tensors by the highest of their subtrees that has no others of `among`.

    With `*` in place of numbers a subtree may be one of many layers. The last of many groups names further ones.
    """
    chosen = set(numbers)
    mixed = {name for number in among if number not in chosen for pair in subtrees[number] for name in pair}
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for number in sorted(chosen):
        names = ((name, pair[1]) for pair in subtrees[number] for name in pair)
        name, subtree = next(found for found in names if found[0] not in mixed)
        groups[name].append((subtree, number))
    found = []
    for name, pairs in sorted(groups.items(), key=lambda item: -len(item[1])):
        members = [number for _, number in pairs]
        one = subtrees[members[0]][-1][1] if len(members) == 1 else pairs[0][0]
        found.append((one if len({subtree for subtree, _ in pairs}) == 1 else name, members))
    if len(found) > _MOST:
        rest = [number for _, members in found[_MOST - 1 :] for number in members]
        found[_MOST - 1 :] = [(f"{found[_MOST - 1][0]} and further ones", rest)]
    return [(name if len(members) == 1 else f"{name} ({len(members)} tensors)", members) for name, members in found]


def _subtrees(path: str) -> list[tuple[str, str]]:
    """Return a path and the subtrees that contain it, the highest first, each also with `*` in place of numbers.

    Dots separate names, too, as in state dicts.
    """
    ends = [*(end for end, character in enumerate(path) if character in "/." and end), len(path)]
    return [(_NUMBER.sub("*", path[:end]), path[:end]) for end in ends]
