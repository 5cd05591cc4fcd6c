"""The Zarr v3 codec `ckstore.levels`: the array-to-array step from floats to integers of other lattices."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.codecs.levels import Scale
from ckstore.codecs.zarr_filters import FilterCodec


@dataclass(frozen=True)
class LevelsCodec(Scale, FilterCodec):
    """Levels, rounded ordinals or ordinals of chunks; see `Levels`, its numcodecs twin, for the settings.

    Examples
    --------
    >>> import zarr
    >>> from ckstore.codecs.zarr_huffman import HuffmanCodec
    >>> from ckstore.codecs.zarr_levels import LevelsCodec
    >>> array = zarr.create_array({}, shape=(3,), chunks=(3,), dtype="float32", fill_value=0.0, compressors=None,
    ...                           filters=[LevelsCodec(shift=20)], serializer=HuffmanCodec())
    >>> array[:] = [1.0, 3e-8, 5e7]
    >>> [f"{value:.2g}" for value in array[:]]
    ['1', '3e-08', '5e+07']
    """

    name = "ckstore.levels"
