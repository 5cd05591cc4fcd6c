"""The sensitivity of weights by their moments: how finely each row and column is quantised relative to others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import Bits, floats
from ckstore.encoding.magnitudes import row_width
from ckstore.objects.units import Unit
from ckstore.runtime.threads import worker_count

#: Steps follow the diagonal Fisher information to this power: half of the exponent of a loss budget at high rates.
POWER = -0.25

#: Octaves that rows, columns and whole tensors may differ by: even weights with rare gradients matter.
_REACH = 2.0

_SMALLEST = 1e-300


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Octaves by which steps of a unit's rows and columns differ from the common step; empty if all are equal."""

    rows: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    cols: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


def sensitivities(pairs: Sequence[tuple[Unit, Unit]], read: Callable[[Unit, int, int], Bits]) -> dict[str, Sensitivity]:
    """Return the sensitivities of weights, each given with a moment, by key.

    A second moment represents the diagonal of the Fisher information. The square of a first one does so less well, and
    counts half. `read` returns the bits of a unit from one element to before another.
    """

    def means(pair: tuple[Unit, Unit]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], float]:
        from ckstore.kernels.coarse import value_sums

        moment = pair[1]
        width = row_width(moment)
        rows, cols = np.zeros(-(-moment.count // width)), np.zeros(width)
        values = floats(read(moment, 0, moment.count), moment.dtype)
        value_sums(values, moment.role != "second", width, rows, cols)
        return rows / width, cols / rows.size, float(rows.sum())

    with ThreadPoolExecutor(worker_count(), thread_name_prefix="ckstore") as pool:
        found = list(pool.map(means, pairs))
    overall = sum(total for _, _, total in found) / max(sum(moment.count for _, moment in pairs), 1)
    result = {}
    for (weight, moment), (rows, cols, total) in zip(pairs, found, strict=True):
        power = POWER if moment.role == "second" else POWER / 2
        mean = total / max(moment.count, 1)
        by_rows = _octaves(rows, mean, power) + _octaves(np.array([mean]), overall, power)
        by_cols = _octaves(cols, mean, power) if min(rows.size, cols.size) > 1 else np.empty(0)
        result[weight.key] = Sensitivity(by_rows, by_cols)
    return result


def _octaves(means: npt.NDArray[np.float64], reference: float, power: float) -> npt.NDArray[np.float64]:
    """Return the octaves by which steps differ if moments are `means` rather than `reference`."""
    if not reference > 0:
        return np.zeros(means.size)
    logarithms = np.log2(np.maximum(means, _SMALLEST) / reference)
    result: npt.NDArray[np.float64] = np.clip(power * logarithms, -_REACH, _REACH)
    return result
