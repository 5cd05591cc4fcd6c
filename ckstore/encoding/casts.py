"""Finds the float32 tensors that tensors of 16 bits in the same version are roundings of, as of master weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from ckstore.codecs.lattice import Bits
from ckstore.codecs.short_floats import SHORT, narrowed
from ckstore.encoding.value_roles import Values
from ckstore.formats.layout import Extent, FileLayout, Source
from ckstore.objects.records import CAST_FROM
from ckstore.objects.units import SMALL, Unit
from ckstore.runtime.cached import cached_property

#: Elements that are compared, and the share of them that must agree.
_COMPARED = 256
_AGREEING = 15 / 16
#: Candidates for each tensor, and roles that none has.
_CANDIDATES = 4
_MOMENTS = ("first", "second")


class _Identified(Values, Protocol):
    @property
    def contents(self) -> Sequence[str]:
        """The content ids of the units; empty where they are not known yet."""


class Casts:
    """The roundings among the units of a version."""

    def __init__(self, values: _Identified) -> None:
        self._values = values

    def source(self, unit: Unit, *, alone: bool = False) -> tuple[str, Unit] | None:
        """Return content id and unit of the float32 values that a unit rounds; None without any.

        If `alone`, no other unit may have these values.
        """
        if unit.dtype not in SHORT:
            return None
        candidates = self._candidates.get(unit.shape, ())[:_CANDIDATES]
        first = max(unit.count - _COMPARED, 0) // 2
        last = min(first + _COMPARED, unit.count)
        own = self._values.read(unit, first, last) if candidates else None
        for number in candidates:
            other, content = self._values.units[number], self._values.contents[number]
            if alone and self._uses[content] > 1:
                continue
            if own is not None and content and _agree(own, self._values.read(other, first, last), unit.dtype):
                return content, other
        return None

    @cached_property
    def copies(self) -> dict[Unit, Unit]:
        """The weights that are roundings of others in the version, each with the unit that it alone rounds."""
        weights = (unit for unit in self._values.units if unit.role in ("weight", "vector"))
        sources = ((unit, self.source(unit, alone=True)) for unit in weights)
        return {unit: source[1] for unit, source in sources if source is not None}

    def planned(self, units: Sequence[Unit]) -> list[list[int]]:
        """Return the places of a coarse version's units in the order in which they are planned, a window's together.

        Weights are last, since moments have one way each and leave a surplus of the budget. A weight has its casts with
        it, which pay for its chain again.
        """
        groups: dict[Unit | int, list[int]] = {}
        for place, unit in enumerate(units):
            groups.setdefault(self.copies.get(unit, unit) if self.copies else place, []).append(place)
        weights = ("weight", "vector")
        return sorted(groups.values(), key=lambda places: any(units[place].role in weights for place in places))

    @cached_property
    def _uses(self) -> Counter[str]:
        return Counter(self._values.contents)

    @cached_property
    def _candidates(self) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = {}
        for number, unit in enumerate(self._values.units):
            if unit.dtype == CAST_FROM and unit.role not in _MOMENTS:
                found.setdefault(unit.shape, []).append(number)
        return found


def has_casts(files: Iterable[tuple[Source, FileLayout]]) -> bool:
    """Return whether the largest extent of 16-bit floats rounds one of float32, before anything is read."""
    extents = [(source, extent) for source, layout in files for extent in layout.extents]
    short = max(
        (item for item in extents if item[1].dtype in SHORT and item[1].count >= SMALL),
        key=lambda item: item[1].count,
        default=None,
    )
    if short is None:
        return False
    first = (short[1].count - _COMPARED) // 2

    def middle(item: tuple[Source, Extent], size: int) -> Bits:
        source, extent = item
        return np.frombuffer(source.pread(extent.start + first * size, _COMPARED * size), f"u{size}")

    alike = [item for item in extents if (item[1].dtype, item[1].shape) == (CAST_FROM, short[1].shape)]
    own = middle(short, 2) if alike else np.empty(0, np.uint16)
    return any(_agree(own, middle(item, 4), short[1].dtype) for item in alike[: 2 * _CANDIDATES])


def _agree(bits: Bits, words: Bits, dtype: str) -> bool:
    return int(np.count_nonzero(narrowed(words, dtype) == bits)) >= _AGREEING * bits.size
