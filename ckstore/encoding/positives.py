"""Tensors without negative values: their positive values must not become 0, unless they are surely weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codecs.lattice import Bits, floats
from ckstore.objects.units import Unit

#: Values that show most tensors to have negative ones.
_FEW = 1 << 12


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


def may_lose(unit: Unit, bits: Bits) -> bool:
    """Return whether a tensor of a unit may have no negative values."""
    return unit.is_bundle or is_positive(floats(bits, unit.dtype))
