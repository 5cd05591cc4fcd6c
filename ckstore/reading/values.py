"""The exact values of a stored version, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ckstore.codecs.lattice import Bits
from ckstore.formats.layout import FileLayout
from ckstore.objects.continuation import Cut
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion


class StoredValues:
    """The units of an exact version, their values and content ids, for its encoding or thinning."""

    def __init__(self, version: StoredVersion) -> None:
        self._version = version
        self._numbers = {unit: number for number, unit in enumerate(version.layout.units)}

    @property
    def units(self) -> Sequence[Unit]:
        """All units."""
        return self._version.layout.units

    @property
    def contents(self) -> Sequence[str]:
        """The content ids of the units."""
        return self._version.document.objects

    @property
    def layouts(self) -> Sequence[FileLayout]:
        """The layouts of the files."""
        return self._version.layout.files

    @property
    def cut(self) -> Cut:
        """The files and the units."""
        document, layout = self._version.document, self._version.layout
        return Cut([*zip(document.prefixes, layout.files, strict=True)], layout.units)

    @property
    def size(self) -> int:
        """Size of the version in bytes."""
        return self._version.row.original_bytes

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Return the bits of elements from `first` to before `last` of a unit."""
        parts = []
        for chunk in range(first // unit.chunk, -(-last // unit.chunk)):
            start = chunk * unit.chunk
            bits = self._version.chunk(self._numbers[unit], chunk)
            parts.append(bits[max(first - start, 0) : last - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def checked(self, unit: Unit, *, rounded: bool = False) -> Callable[[int, int], Bits]:
        """Return a reader of a unit that compares each chunk with its checksum on every read."""
        return partial(self.read, unit)
