"""Raw deflate streams of known length, with a dictionary or without."""

from __future__ import annotations

import zlib

_WINDOW = 15


def compress(data: bytes, level: int = 9, dictionary: bytes = b"") -> bytes:
    """Return one stream."""
    compressor = zlib.compressobj(level, zlib.DEFLATED, -_WINDOW, zdict=dictionary)
    return compressor.compress(data) + compressor.flush()


def expand(stream: bytes, length: int, dictionary: bytes = b"") -> bytes:
    """Undo `compress`; never allocate more than `length` bytes. Raise `ValueError` if the stream is damaged."""
    expander = zlib.decompressobj(-_WINDOW, zdict=dictionary)
    try:
        data = expander.decompress(stream, length + 1)
    except zlib.error as error:
        raise ValueError(f"its compressed bytes are damaged ({error})") from error
    if not expander.eof or expander.unused_data or len(data) != length:
        raise ValueError("its compressed bytes have the wrong length")
    return data
