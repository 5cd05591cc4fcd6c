"""The exact values of a stored version, unit by unit, as those of a version that is scanned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ckstore.codecs.lattice import Bits
from ckstore.formats.layout import FileLayout
from ckstore.objects.units import Unit
from ckstore.reading.stored_version import StoredVersion


class StoredValues:
    """The units of a stored version and their values, as an `Estimator` reads them."""

    def __init__(self, version: StoredVersion) -> None:
        self._version = version
        self._numbers = {unit: number for number, unit in enumerate(version.layout.units)}

    @property
    def units(self) -> Sequence[Unit]:
        """All objects."""
        return self._version.layout.units

    @property
    def layouts(self) -> Sequence[FileLayout]:
        """How the files are cut."""
        return self._version.layout.files

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return self._version.row.original_bytes

    def read(self, unit: Unit, first: int, last: int) -> Bits:
        """Bits of the elements from `first` to before `last` of a unit."""
        parts = []
        for chunk in range(first // unit.chunk, -(-last // unit.chunk)):
            start = chunk * unit.chunk
            bits = self._version.chunk(self._numbers[unit], chunk)
            parts.append(bits[max(first - start, 0) : last - start])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def checked(self, unit: Unit) -> Callable[[int, int], Bits]:
        """What reads a unit: its chunks are compared with their checksums whenever they are decoded."""
        return partial(self.read, unit)
