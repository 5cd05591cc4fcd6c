"""Bands: hashes of signs and exponents of a few elements, equal in versions whose values are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
from blake3 import blake3

from ckstore.codecs.lattice import FLOATS
from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import Extent, FileLayout
from ckstore.objects.roles import role_of
from ckstore.objects.units import SMALL

T = TypeVar("T")

#: Returns bytes of a file, from an offset on.
Read = Callable[[int, int], bytes]


class Place(NamedTuple):
    """The number of a file, and the dtype, first byte and bytes of some elements there."""

    file: int
    dtype: str
    start: int
    nbytes: int


#: Bands of a version, at most, and the hexadecimal digits of each.
BANDS = 8
DIGITS = 8

#: Elements of a band. Unrelated weights agree in sign and exponent with a chance of about 1/8 for each; weights 5 %
#: apart agree in seven of eight.
_ELEMENTS = 6

#: The places of a tensor's bands, as parts of it: the first ones of all tensors come first.
_PLACES = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1 / 16)


def bands_of(files: Iterable[tuple[Read, FileLayout]]) -> tuple[int, ...]:
    """Return the bands of a version: of large tensors of floats; none if all are small."""
    given = [*files]
    found: dict[int, None] = {}
    for file, dtype, start, nbytes in places_of(layout for _, layout in given):
        bits = np.frombuffer(given[file][0](start, nbytes), f"u{ITEM_SIZES[dtype]}")
        codes = (bits >> FLOATS[dtype][0]).tolist()
        if len({*codes}) > 1:  # Rows of zeros are alike in all models.
            found[int.from_bytes(blake3(f"{dtype} {codes}".encode()).digest()[: DIGITS // 2])] = None
            if len(found) == BANDS:
                break
    return tuple(found)


def places_of(layouts: Iterable[FileLayout]) -> Iterator[Place]:
    """Yield the places from which bands may be made, in order.

    They are in tensors of all shapes, in first and in last layers, since models are merged by either.
    """
    forms: dict[tuple[bool, int], list[tuple[int, Extent, int]]] = {}
    for file, layout in enumerate(layouts):
        for extent in layout.extents:
            count = prod(extent.shape)
            if count >= SMALL and extent.dtype in FLOATS:
                forms.setdefault((role_of(extent.path) != "", -count), []).append((file, extent, count))
    of_states = min(forms, default=(False, 0))[0]  # Those of an optimiser only if there are no weights.
    turns = zip_longest(*(_spread(forms[form]) for form in sorted(forms) if form[0] == of_states))
    chosen = [item for turn in turns for item in turn if item is not None][:BANDS]
    for part in _PLACES:
        for file, extent, count in chosen:
            size = ITEM_SIZES[extent.dtype]
            first = min(int(part * count), count - _ELEMENTS)
            yield Place(file, extent.dtype, extent.start + first * size, _ELEMENTS * size)


def _spread(items: Sequence[T]) -> list[T]:
    """Return some items: the first, the last, one in the middle, and others."""
    places = dict.fromkeys([0, len(items) - 1, len(items) // 2, *range(min(len(items), BANDS))])
    return [items[place] for place in places]


def text_of(bands: Iterable[int]) -> str:
    """Return bands as hexadecimal digits, in order."""
    return "".join(f"{band:0{DIGITS}x}" for band in sorted(bands))


def bands_in(text: str) -> list[int]:
    """Return the bands of a text."""
    return [int(text[first : first + DIGITS], 16) for first in range(0, len(text), DIGITS)]
