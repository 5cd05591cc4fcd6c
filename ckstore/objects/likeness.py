"""Bands: hashes of signs and exponents of a few elements, equal in versions whose values are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from blake3 import blake3

from ckstore.codecs.lattice import FLOATS
from ckstore.dtypes import ITEM_SIZES
from ckstore.formats.layout import Extent, FileLayout, Source
from ckstore.objects.roles import role_of
from ckstore.objects.units import SMALL

T = TypeVar("T")

#: Bands of a version, at most, and the hexadecimal digits of each.
BANDS = 8
DIGITS = 8

#: Elements of a band. Unrelated weights agree in sign and exponent with a chance of about 1/8 for each; those that are
#: 5 % apart agree in seven of eight.
_ELEMENTS = 6

#: The places of a tensor's bands, as parts of it: the first ones of all tensors come first.
_PLACES = (1 / 2, 1 / 4, 3 / 4, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1 / 16)


def bands_of(files: Iterable[tuple[Source, FileLayout]]) -> tuple[int, ...]:
    """Return the bands of a version: of large tensors of floats; none if all are small.

    They are of all shapes and of first and last layers, since models are merged by either.
    """
    forms: dict[tuple[bool, int], list[tuple[Source, Extent]]] = {}
    for source, layout in files:
        for extent in layout.extents:
            count = extent.count
            if count >= SMALL and extent.dtype in FLOATS:
                forms.setdefault((role_of(extent.path) != "", -count), []).append((source, extent))
    of_states = min(forms, default=(False, 0))[0]  # Those of an optimiser only if there are no weights.
    turns = zip_longest(*(_spread(forms[form]) for form in sorted(forms) if form[0] == of_states))
    chosen = [item for turn in turns for item in turn if item is not None][:BANDS]
    found: dict[int, None] = {}
    for source, extent, place in _places(chosen):
        size = ITEM_SIZES[extent.dtype]
        bits = np.frombuffer(source.pread(extent.start + place * size, _ELEMENTS * size), f"u{size}")
        codes = (bits >> FLOATS[extent.dtype][0]).tolist()
        if len({*codes}) > 1:  # Rows of zeros are alike in all models.
            found[int.from_bytes(blake3(f"{extent.dtype} {codes}".encode()).digest()[: DIGITS // 2])] = None
            if len(found) == BANDS:
                break
    return tuple(found)


def _spread(items: Sequence[T]) -> list[T]:
    """Return some items: the first, the last, one in the middle, and others."""
    places = dict.fromkeys([0, len(items) - 1, len(items) // 2, *range(min(len(items), BANDS))])
    return [items[place] for place in places]


def _places(extents: Sequence[tuple[Source, Extent]]) -> Iterator[tuple[Source, Extent, int]]:
    for part in _PLACES:
        for source, extent in extents:
            yield source, extent, min(int(part * extent.count), extent.count - _ELEMENTS)


def text_of(bands: Iterable[int]) -> str:
    """Return bands as hexadecimal digits, in order."""
    return "".join(f"{band:0{DIGITS}x}" for band in sorted(bands))


def bands_in(text: str) -> list[int]:
    """Return the bands of a text."""
    return [int(text[first : first + DIGITS], 16) for first in range(0, len(text), DIGITS)]
