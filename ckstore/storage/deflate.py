"""Raw deflate streams: smaller than zstd's frames for a hundred bytes."""

from __future__ import annotations

import zlib

_WINDOW = 15


def compress(data: bytes) -> bytes:
    """Return one stream."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -_WINDOW)
    return compressor.compress(data) + compressor.flush()


def expand(stream: bytes, most: int) -> bytes:
    """Undo `compress`. Raise `ValueError` if the stream is damaged or makes more than `most` bytes."""
    expander = zlib.decompressobj(-_WINDOW)
    try:
        data = expander.decompress(stream, most + 1)
    except zlib.error as error:
        raise ValueError(f"its compressed bytes are damaged ({error})") from error
    if not expander.eof or expander.unused_data or len(data) > most:
        raise ValueError("its compressed bytes have the wrong length")
    return data
