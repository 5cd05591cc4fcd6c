"""The Zarr v3 codec `ckstore.quantized_residual`: the array-to-array step from floats to lattice integers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.abc.codec import ArrayArrayCodec
from zarr.core.common import parse_named_configuration
from zarr.core.dtype import Int32

from ckstore.codecs.quantized_residual import Steps
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import NDBuffer
    from zarr.core.common import JSON
    from zarr.core.dtype import ZDType

NAME = "ckstore.quantized_residual"


@dataclass(frozen=True)
class QuantizedResidualCodec(Steps, ArrayArrayCodec):
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

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from an array's metadata."""
        _, given = parse_named_configuration(data, NAME)
        names = ("step", "rows", "cols", "width", "precision")
        if unknown := given.keys() - set(names):
            raise UsageError(f"The codec {NAME} has no {min(unknown)}; its settings are {', '.join(names)}.")
        step, width, precision = (given.get(name) for name in ("step", "width", "precision"))
        return cls.parsed(step, given.get("rows", ""), given.get("cols", ""), width, precision)

    def to_dict(self) -> dict[str, JSON]:
        """Return the codec's entry in an array's metadata."""
        return {"name": NAME, "configuration": self.settings()}

    def validate(self, *, shape: tuple[int, ...], dtype: ZDType[Any, Any], chunk_grid: Any) -> None:
        """Refuse arrays of anything but float32 and float64, and exponents that do not fit the dtype."""
        self.check(dtype.to_native_dtype().name)

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """Return the specification of int32 chunks; the fill value becomes its integer."""
        dtype = chunk_spec.dtype.to_native_dtype().newbyteorder("=")
        fill = Steps(self.step, precision=self.precision).quantise(np.array([chunk_spec.fill_value], dtype))
        return replace(chunk_spec, dtype=Int32(), fill_value=fill[0])

    def _decode(self, chunk: NDBuffer, spec: ArraySpec) -> NDBuffer:
        integers = chunk.as_numpy_array().reshape(spec.shape)
        values = self.dequantise(integers, spec.dtype.to_native_dtype().newbyteorder("=").name)
        return spec.prototype.nd_buffer.from_numpy_array(values)

    def _encode(self, chunk: NDBuffer, spec: ArraySpec) -> NDBuffer:
        dtype = spec.dtype.to_native_dtype().newbyteorder("=")
        values = np.ascontiguousarray(chunk.as_numpy_array(), dtype)
        return spec.prototype.nd_buffer.from_numpy_array(self.quantise(values))

    async def _decode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode, chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._encode, chunk_data, chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Return four bytes per element."""
        return input_byte_length // chunk_spec.dtype.to_native_dtype().itemsize * 4
