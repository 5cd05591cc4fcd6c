"""Filters for Zarr v3: array-to-array codecs from floats to integers, each the twin of a numcodecs codec."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from zarr.abc.codec import ArrayArrayCodec
from zarr.core.common import parse_named_configuration
from zarr.core.dtype import Int16, Int32, Int64

from ckstore.errors import UsageError

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import NDBuffer
    from zarr.core.common import JSON
    from zarr.core.dtype import ZDType

_INTEGERS: dict[int, ZDType[Any, Any]] = {2: Int16(), 4: Int32(), 8: Int64()}


@dataclass(frozen=True)
class FilterCodec(ArrayArrayCodec):
    """A filter whose settings, checks and conversions come from a `Quantiser` that the class also inherits."""

    is_fixed_size = True

    name: ClassVar[str]

    if TYPE_CHECKING:
        parsed: ClassVar[Any]
        settings: ClassVar[Any]
        check: ClassVar[Any]
        integer: ClassVar[Any]
        quantise: ClassVar[Any]
        dequantise: ClassVar[Any]

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from an array's metadata."""
        _, given = parse_named_configuration(data, cls.name)
        names = [field.name for field in fields(cls)]
        if unknown := given.keys() - set(names):
            raise UsageError(f"The codec {cls.name} has no {min(unknown)}; its settings are {', '.join(names)}.")
        made: Self = cls.parsed(**given)
        return made

    def to_dict(self) -> dict[str, JSON]:
        """Return the codec's entry in an array's metadata."""
        return {"name": self.name, "configuration": self.settings()}

    def validate(self, *, shape: tuple[int, ...], dtype: ZDType[Any, Any], chunk_grid: Any) -> None:
        """Refuse arrays of other dtypes, and settings that do not fit the dtype."""
        self.check(dtype.to_native_dtype().name)

    def resolve_metadata(self, chunk_spec: ArraySpec) -> ArraySpec:
        """Return the specification of chunks of integers; missing ones are 0."""
        dtype = self.integer(chunk_spec.dtype.to_native_dtype().name)
        return replace(chunk_spec, dtype=_INTEGERS[dtype.itemsize], fill_value=dtype.type(0))

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
        """Return the bytes of the integers."""
        dtype = chunk_spec.dtype.to_native_dtype()
        return input_byte_length // dtype.itemsize * int(self.integer(dtype.name).itemsize)
