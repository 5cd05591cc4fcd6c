"""Other compressors of checkpoints: each a pair of functions for full data and, if supported, a pair for deltas.

Every peer gets the smaller of the difference and the data itself for every piece of a delta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import blosc2
import numpy as np
import openzl.ext as openzl
import zstandard
from numcodecs import Shuffle
from pcodec import ChunkConfig, standalone
from zipnn import ZipNN

from ckstore.codecs.lattice import FLOATS
from ckstore.dtypes import ITEM_SIZES
from tools.bench import fm_delta
from tools.bench.pieces import Bytes

Encode = Callable[[Bytes, str], bytes]
Decode = Callable[[bytes, str], Bytes]
EncodeDelta = Callable[[Bytes, Bytes, str], bytes]
DecodeDelta = Callable[[bytes, Bytes, str], Bytes]

_ZIPNN_DTYPES = {"float32", "bfloat16", "float16"}


@dataclass(frozen=True)
class Peer:
    """A way to compress pieces.

    Attributes
    ----------
    name
        Its name in tables.
    encode, decode
        Of a piece's bytes, given its dtype.
    encode_delta, decode_delta
        Of a piece's bytes, given those of the previous version; None for a peer without deltas.
    whole_files
        Whether it compresses files instead of tensors.
    """

    name: str
    encode: Encode
    decode: Decode
    encode_delta: EncodeDelta | None = None
    decode_delta: DecodeDelta | None = None
    whole_files: bool = False


def zstd_encode(data: Bytes, dtype: str) -> bytes:
    """Return one zstd frame at level 3."""
    return zstandard.ZstdCompressor(level=3).compress(data.data)


def zstd_decode(payload: bytes, dtype: str) -> Bytes:
    """Invert `zstd_encode`."""
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)


def planes_encode(data: Bytes, dtype: str) -> bytes:
    """Return the first bytes of all elements, then the second and so on, as a zstd frame at level 3: BitX's coder."""
    return zstd_encode(Shuffle(ITEM_SIZES[dtype]).encode(data), dtype)


def planes_decode(payload: bytes, dtype: str) -> Bytes:
    """Invert `planes_encode`."""
    data: Bytes = Shuffle(ITEM_SIZES[dtype]).decode(zstd_decode(payload, dtype))
    return data


def zipnn_encode(data: Bytes, dtype: str) -> bytes:
    """Compress by ZipNN with its defaults for its float types, by zstd for the others."""
    if dtype not in _ZIPNN_DTYPES or not len(data):
        return zstd_encode(data, dtype)
    # ZipNN reorders bits within its input buffer, so it gets a copy.
    return bytes(ZipNN(input_format="byte", bytearray_dtype=dtype).compress(bytearray(data)))


def zipnn_decode(payload: bytes, dtype: str) -> Bytes:
    """Invert `zipnn_encode`."""
    if dtype not in _ZIPNN_DTYPES or not payload.startswith(b"ZN"):
        return zstd_decode(payload, dtype)
    return np.frombuffer(ZipNN(input_format="byte", bytearray_dtype=dtype).decompress(payload), np.uint8)


def blosc_encode(data: Bytes, dtype: str) -> bytes:
    """Compress by Blosc2: bitshuffle by the dtype's item size, then zstd."""
    if dtype == "opaque" or not len(data):
        return zstd_encode(data, dtype)
    return bytes(
        blosc2.compress2(
            data, codec=blosc2.Codec.ZSTD, clevel=5, typesize=ITEM_SIZES[dtype], filters=[blosc2.Filter.BITSHUFFLE]
        )
    )


def blosc_decode(payload: bytes, dtype: str) -> Bytes:
    """Invert `blosc_encode`."""
    if dtype == "opaque" or payload.startswith(zstandard.FRAME_HEADER):
        return zstd_decode(payload, dtype)
    return np.frombuffer(blosc2.decompress2(payload), np.uint8)


def _aligned(data: Bytes, dtype: str) -> np.ndarray:
    """Return bytes as elements at a multiple of their size."""
    return np.require(data.view(dtype), requirements="A")


#: OpenZL's nodes that split the floats of a dtype into exponents and the rest.
_SPLITS = {
    "float32": openzl.nodes.Float32Deconstruct,
    "float16": openzl.nodes.Float16Deconstruct,
    "bfloat16": openzl.nodes.BFloat16Deconstruct,
}


def openzl_encode(data: Bytes, dtype: str) -> bytes:
    """Compress by OpenZL: exponents, and the other bits' planes of bytes, each by its entropy coder."""
    if dtype not in _SPLITS or not len(data):
        return zstd_encode(data, dtype)
    compressor = openzl.Compressor()
    compressor.set_parameter(openzl.CParam.FormatVersion, openzl.MAX_FORMAT_VERSION)
    entropy = openzl.graphs.Entropy()(compressor)
    rest = openzl.nodes.TransposeSplit()(compressor, entropy) if dtype == "float32" else entropy
    compressor.select_starting_graph(_SPLITS[dtype]()(compressor, sign_frac=rest, exponent=entropy))
    context = openzl.CCtx()
    context.ref_compressor(compressor)
    elements = _aligned(data, f"u{ITEM_SIZES[dtype]}")
    return bytes(context.compress([openzl.Input(openzl.Type.Numeric, elements)]))


def openzl_decode(payload: bytes, dtype: str) -> Bytes:
    """Invert `openzl_encode`."""
    if dtype not in _SPLITS or payload.startswith(zstandard.FRAME_HEADER):
        return zstd_decode(payload, dtype)
    [found] = openzl.DCtx().decompress(payload)
    return np.asarray(found.content.as_nparray()).view(np.uint8)


#: The types in which pcodec compresses elements, and their differences.
_PCODEC_DTYPES = {
    "float32": ("f4", "i4"), "float64": ("f8", "i8"), "float16": ("f2", "i2"), "bfloat16": ("u2", "i2"),
}  # fmt: skip


def pcodec_encode(data: Bytes, dtype: str) -> bytes:
    """Compress by pcodec at its default level; by zstd if it lacks the dtype."""
    if dtype not in _PCODEC_DTYPES or not len(data):
        return zstd_encode(data, dtype)
    return bytes(standalone.simple_compress(_aligned(data, _PCODEC_DTYPES[dtype][0]), ChunkConfig()))


def pcodec_decode(payload: bytes, dtype: str) -> Bytes:
    """Invert `pcodec_encode`."""
    if dtype not in _PCODEC_DTYPES or payload.startswith(zstandard.FRAME_HEADER):
        return zstd_decode(payload, dtype)
    return np.asarray(standalone.simple_decompress(payload)).view(np.uint8)


def pcodec_difference(data: Bytes, base: Bytes, dtype: str) -> bytes:
    """Compress by pcodec the differences of elements as integers."""
    if dtype not in _PCODEC_DTYPES or not len(data):
        return _ZSTD_XOR[0](data, base, dtype)
    integers = _PCODEC_DTYPES[dtype][1]
    return bytes(standalone.simple_compress(data.view(integers) - base.view(integers), ChunkConfig()))


def pcodec_sum(payload: bytes, base: Bytes, dtype: str) -> Bytes:
    """Invert `pcodec_difference`."""
    if dtype not in _PCODEC_DTYPES or not len(base):
        return _ZSTD_XOR[1](payload, base, dtype)
    data: Bytes = (standalone.simple_decompress(payload) + base.view(_PCODEC_DTYPES[dtype][1])).view(np.uint8)
    return data


def by_xor(encode: Encode, decode: Decode) -> tuple[EncodeDelta, DecodeDelta]:
    """Return the functions of deltas that code the bytes after XOR with the previous version's."""
    return (
        lambda data, base, dtype: encode(data ^ base, dtype),
        lambda payload, base, dtype: decode(payload, dtype) ^ base,
    )


_ZSTD_XOR = by_xor(zstd_encode, zstd_decode)


def fm_delta_encode(data: Bytes, base: Bytes, dtype: str) -> bytes:
    """Code differences by FM-Delta; of integers and complex numbers, which it lacks, zstd's XOR."""
    if dtype not in FLOATS:
        return _ZSTD_XOR[0](data, base, dtype)
    return fm_delta.encode(data, base, ITEM_SIZES[dtype])


def fm_delta_decode(payload: bytes, base: Bytes, dtype: str) -> Bytes:
    """Invert `fm_delta_encode`."""
    if dtype not in FLOATS:
        return _ZSTD_XOR[1](payload, base, dtype)
    return fm_delta.decode(payload, base, ITEM_SIZES[dtype])


PEERS = (
    Peer("zstd-3", zstd_encode, zstd_decode, whole_files=True),
    Peer("ZipNN", zipnn_encode, zipnn_decode),
    Peer("blosc2", blosc_encode, blosc_decode),
    Peer("XOR + ZipNN", zipnn_encode, zipnn_decode, *by_xor(zipnn_encode, zipnn_decode)),
    # Full versions by ZipNN, as BitX's own system stores its base models. FM-Delta's would be raw.
    Peer("BitX", zipnn_encode, zipnn_decode, *by_xor(planes_encode, planes_decode)),
    Peer("FM-Delta", zipnn_encode, zipnn_decode, fm_delta_encode, fm_delta_decode),
    Peer("OpenZL", openzl_encode, openzl_decode, *by_xor(openzl_encode, openzl_decode)),
    Peer("pcodec", pcodec_encode, pcodec_decode, pcodec_difference, pcodec_sum),
    Peer("XOR + blosc2", blosc_encode, blosc_decode, *by_xor(blosc_encode, blosc_decode)),
)
