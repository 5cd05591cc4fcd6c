"""Tensors without negative values: their positive values must not become 0, unless they are surely weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import Bits, floats
from ckstore.objects.units import Unit

#: Values that show most tensors to have negative ones.
_FEW = 1 << 12

#: Elements from which on a tensor's values show something.
LEAST = 1 << 5

#: Largest value of a steady tensor as a multiple of the smallest one.
_STEADY = 1024.0


def is_positive(values: npt.NDArray[Any]) -> bool:
    """Return whether no value is negative, and some are positive.

    Examples
    --------
    >>> is_positive(np.array([0.0, 1e-30])), is_positive(np.zeros(2)), is_positive(np.array([1.0, -1e-30]))
    (True, False, False)
    """
    return bool(values[:_FEW].min(initial=0) >= 0 and values.min(initial=0) >= 0 and values.max(initial=0) > 0)


def loses_positives(unit: Unit, bits: Bits, decoded: Bits) -> bool:
    """Return whether a tensor of a unit has no negative values, and a positive one decodes to 0."""
    values, after = floats(bits, unit.dtype), floats(decoded, unit.dtype)
    starts = np.cumsum([0, *unit.member_counts[:-1]]) if unit.is_bundle else np.zeros(1, np.int64)
    lost = np.logical_or.reduceat((values > 0) & (after <= 0), starts)
    return bool((lost & (np.minimum.reduceat(values, starts) >= 0)).any())


def steady_least(values: npt.NDArray[Any]) -> float:
    """Return the smallest value of a tensor if all are positive and within ten octaves; otherwise 0.

    SGD with weight decay has such momenta for the gains of norms. Second moments reach over more octaves.

    Examples
    --------
    >>> steady_least(np.full(32, 0.5)), steady_least(np.linspace(0.0, 1.0, 32)), steady_least(np.ones(2))
    (0.5, 0.0, 0.0)
    """
    if values.size < LEAST or values[0] <= 0:
        return 0.0
    least = float(values.min())
    return least if least > 0 and float(values.max()) <= _STEADY * least else 0.0


def may_lose(unit: Unit, bits: Bits) -> bool:
    """Return whether a tensor of a unit may have no negative values."""
    return unit.is_bundle or is_positive(floats(bits, unit.dtype))
