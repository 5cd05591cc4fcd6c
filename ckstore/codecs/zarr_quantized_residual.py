"""The Zarr v3 codec `ckstore.quantized_residual`: the array-to-array step from floats to lattice integers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ckstore.codecs.quantized_residual import Steps
from ckstore.codecs.zarr_filters import FilterCodec

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec


@dataclass(frozen=True)
class QuantizedResidualCodec(Steps, FilterCodec):
    """Quantisation of chunks on a lattice whose steps are powers of two; see `QuantizedResidual`, its numcodecs twin.

    Parameters
    ----------
    step : int
        Binary exponent of the step.
    rows, cols : str or sequence of int, optional
        Exponents that rows and columns of a chunk add to `step`, none by default.
    width : int, optional
        Elements of a row; by default the last axis of a chunk.
    precision : str, optional
        `bfloat16` or `float16`: the dtype that decoded values, float32, are rounded to.

    Notes
    -----
    Lossy: it returns values of the lattice. A chunk with a fill value that is not a lattice value is filled with the
    nearest one. A codec does not know the index of its chunk: exponents of rows are the same for every chunk.

    Examples
    --------
    >>> import zarr
    >>> from ckstore.codecs.zarr_huffman import HuffmanCodec
    >>> from ckstore.codecs.zarr_quantized_residual import QuantizedResidualCodec
    >>> array = zarr.create_array({}, shape=(4,), chunks=(2,), dtype="float32", fill_value=0.0, compressors=None,
    ...                           filters=[QuantizedResidualCodec(step=-3)], serializer=HuffmanCodec())
    >>> array[:] = [0.3, -1.0, 2.0, 0.0]
    >>> array[:].tolist()
    [0.25, -1.0, 2.0, 0.0]
    """

    name = "ckstore.quantized_residual"

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """Return the specification of int32 chunks; the fill value becomes its integer."""
        dtype = chunk_spec.dtype.to_native_dtype().newbyteorder("=")
        fill = Steps(self.step, precision=self.precision).quantise(np.array([chunk_spec.fill_value], dtype))
        return replace(super().resolve_metadata(chunk_spec), fill_value=fill[0])
