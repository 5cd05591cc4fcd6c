"""The Zarr v3 codec `ckstore.quantized_residual`: the array-to-array step from floats to lattice integers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from zarr.abc.codec import ArrayArrayCodec
from zarr.core.common import parse_named_configuration
from zarr.core.dtype import Int32

from ckstore.codecs.quantized_residual import dequantise, linear_lattice, quantise

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import NDBuffer
    from zarr.core.common import JSON
    from zarr.core.dtype import ZDType

NAME = "ckstore.quantized_residual"


@dataclass(frozen=True)
class QuantizedResidualCodec(ArrayArrayCodec):
    """Quantisation of chunks on a lattice whose step is a power of two; see `QuantizedResidual`, its numcodecs twin.

    Parameters
    ----------
    step : int
        Binary exponent of the step.
    exponents : tuple of int
        One for each element of a chunk's last axis, added to `step`; none by default.

    Notes
    -----
    Lossy: it gives back values of the lattice. A chunk with a fill value that is no lattice value is filled with the
    nearest one.

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

    step: int
    exponents: tuple[int, ...] = ()

    is_fixed_size = True

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from an array's metadata."""
        _, configuration = parse_named_configuration(data, NAME)
        exponents = cast("list[int]", configuration.get("exponents", []))
        return cls(step=int(cast("int", configuration["step"])), exponents=tuple(int(value) for value in exponents))

    def to_dict(self) -> dict[str, JSON]:
        """The codec as it is in an array's metadata."""
        configuration: dict[str, JSON] = {"step": self.step}
        if self.exponents:
            configuration["exponents"] = list(self.exponents)
        return {"name": NAME, "configuration": configuration}

    def validate(self, *, shape: tuple[int, ...], dtype: ZDType[Any, Any], chunk_grid: Any) -> None:
        """Refuse arrays of anything but float32 and float64, and exponents that do not fit the dtype."""
        linear_lattice(dtype.to_native_dtype().name, self.step, self.exponents, len(self.exponents))

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """Chunks are int32 from here on; the fill value becomes its integer."""
        dtype = chunk_spec.dtype.to_native_dtype()
        lattice = linear_lattice(dtype.name, self.step, (), 1)
        fill = quantise(np.array([chunk_spec.fill_value], dtype.newbyteorder("=")), lattice)
        return replace(chunk_spec, dtype=Int32(), fill_value=fill[0])

    def _lattice(self, spec: ArraySpec) -> Any:
        width = spec.shape[-1] if spec.shape else 1
        return linear_lattice(spec.dtype.to_native_dtype().name, self.step, self.exponents, width)

    def _decode(self, chunk: NDBuffer, spec: ArraySpec) -> NDBuffer:
        integers = np.ascontiguousarray(chunk.as_numpy_array(), np.int32).reshape(spec.shape)
        values = dequantise(integers, self._lattice(spec))
        return spec.prototype.nd_buffer.from_numpy_array(values)

    def _encode(self, chunk: NDBuffer, spec: ArraySpec) -> NDBuffer:
        dtype = spec.dtype.to_native_dtype().newbyteorder("=")
        values = np.ascontiguousarray(chunk.as_numpy_array(), dtype)
        return spec.prototype.nd_buffer.from_numpy_array(quantise(values, self._lattice(spec)))

    async def _decode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode, chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._encode, chunk_data, chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Four bytes an element."""
        return input_byte_length // chunk_spec.dtype.to_native_dtype().itemsize * 4
