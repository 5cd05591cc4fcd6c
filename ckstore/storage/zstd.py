"""zstd frames that state the length of their contents, alone or with a dictionary: any bytes that the reader has."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zstandard import ZstdCompressionDict

#: log2 of the smallest window that zstd has, and of the largest one that every decoder accepts.
_WINDOWS = 10, 27


def compress(data: bytes, level: int, dictionary: bytes = b"") -> bytes:
    """Return one zstd frame."""
    import zstandard

    reach = len(data) + len(dictionary)
    window = min(max(reach.bit_length(), _WINDOWS[0]), _WINDOWS[1])
    parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=reach, window_log=window)
    return zstandard.ZstdCompressor(dict_data=_raw(dictionary), compression_params=parameters).compress(data)


def length_of(frame: bytes) -> int:
    """Return the length that a frame states; raise `ValueError` if it states none."""
    import zstandard

    try:
        length = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"its compressed bytes are damaged ({error})") from error
    if length < 0:
        raise ValueError("its compressed bytes do not state their length")
    return length


def expand(frame: bytes, length: int, dictionary: bytes = b"") -> bytes:
    """Undo `compress`. Never allocate more than `length` bytes for any frame.

    Raises
    ------
    ValueError
        The frame is damaged, or does not have exactly that length.
    """
    import zstandard

    if length_of(frame) != length:
        raise ValueError("its compressed bytes have the wrong length")
    expander = zstandard.ZstdDecompressor(dict_data=_raw(dictionary))
    try:
        return expander.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"its compressed bytes are damaged ({error})") from error


def _raw(dictionary: bytes) -> ZstdCompressionDict | None:
    from zstandard import DICT_TYPE_RAWCONTENT, ZstdCompressionDict

    return ZstdCompressionDict(dictionary, dict_type=DICT_TYPE_RAWCONTENT) if dictionary else None
