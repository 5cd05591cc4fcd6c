"""The Zarr v3 codec `ckstore.huffman`: the array-to-bytes step of integer arrays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.abc.codec import ArrayBytesCodec
from zarr.core.common import parse_named_configuration

from ckstore.codecs.integers import count_integers, decode_integers, encode_integers
from ckstore.errors import UsageError

if TYPE_CHECKING:
    from typing import Self

    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer, NDBuffer
    from zarr.core.common import JSON

NAME = "ckstore.huffman"


@dataclass(frozen=True)
class HuffmanCodec(ArrayBytesCodec):
    """Entropy coding of integer chunks in place of Zarr's `bytes` codec.

    Notes
    -----
    Chunks are coded in C order, as one group. An array that ckstore wrote in context order reads here as integers in
    *coded order* (stably sorted by the class of each element's base within its chunk), and its attributes say so. The
    codec never reads another array.

    Examples
    --------
    >>> import numpy as np, zarr
    >>> from ckstore.codecs.zarr_huffman import HuffmanCodec
    >>> array = zarr.create_array({}, shape=(64, 64), chunks=(32, 32), dtype="int16", serializer=HuffmanCodec(),
    ...                           compressors=None)
    >>> array[:] = np.tile(np.arange(64, dtype="int16"), (64, 1))
    >>> int(array[3, 40])
    40
    """

    is_fixed_size = False

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from an array's metadata; it has no settings."""
        parse_named_configuration(data, NAME, require_configuration=False)
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        """Return the codec's entry in an array's metadata."""
        return {"name": NAME, "configuration": {}}

    @staticmethod
    def _dtype(chunk_spec: ArraySpec) -> np.dtype[Any]:
        # Zarr validates codecs with the array's dtype, before filters: the dtype of a chunk is known only here.
        dtype = chunk_spec.dtype.to_native_dtype()
        if dtype.kind not in "iu":
            raise UsageError(f"The codec {NAME} takes integers, not {dtype.name}: view other dtypes as integers.")
        return dtype

    def _decode(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        dtype = self._dtype(chunk_spec)
        payload = chunk_bytes.as_numpy_array().data
        flat = np.empty(int(np.prod(chunk_spec.shape, dtype=np.int64)), dtype.newbyteorder("="))
        count, _ = count_integers(payload)
        if count < flat.size and len(chunk_spec.shape) == 1:
            # The last chunk of a pack's array holds only the rest of the array.
            flat[count:] = 0
            decode_integers(payload, flat[:count])
        else:
            decode_integers(payload, flat)
        if not dtype.isnative:
            flat = flat.astype(dtype)
        return chunk_spec.prototype.nd_buffer.from_numpy_array(flat.reshape(chunk_spec.shape))

    def _encode(self, chunk_array: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        self._dtype(chunk_spec)
        chunk = chunk_array.as_numpy_array()
        flat = np.ascontiguousarray(chunk, dtype=chunk.dtype.newbyteorder("=")).reshape(-1)
        return chunk_spec.prototype.buffer.from_bytes(encode_integers(flat))

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> NDBuffer:
        return await asyncio.to_thread(self._decode, chunk_data, chunk_spec)

    async def _encode_single(self, chunk_data: NDBuffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode, chunk_data, chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Raise `NotImplementedError`: the size is unknown before encoding."""
        raise NotImplementedError("The size of an entropy-coded chunk is unknown before encoding.")
