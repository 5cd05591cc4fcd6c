"""zstd frames of known length, through the codec of numcodecs."""

from __future__ import annotations


def compress(data: bytes, level: int) -> bytes:
    """Return one zstd frame."""
    # Imported here: the import of numcodecs takes longer than a whole verb that reads only the catalog.
    from numcodecs.zstd import Zstd

    return bytes(Zstd(level=level).encode(data))


def expand(frame: bytes, length: int) -> bytes:
    """Undo `compress`. Never allocates more than `length` bytes for any frame.

    Raises
    ------
    ValueError, RuntimeError
        The frame is damaged or longer than that. A shorter one is padded with zeros: check the result.
    """
    from numcodecs.zstd import Zstd

    data = bytearray(length)
    Zstd().decode(frame, out=data)
    return bytes(data)
