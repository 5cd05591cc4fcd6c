"""zstd frames of known length, through the codec that numcodecs brings."""

from __future__ import annotations


def compress(data: bytes, level: int) -> bytes:
    """One zstd frame."""
    # Imported here: numcodecs takes longer to import than a verb that reads only the catalog takes in all.
    from numcodecs.zstd import Zstd

    return bytes(Zstd(level=level).encode(data))


def expand(frame: bytes, length: int) -> bytes:
    """Undo `compress`. Never allocates more than `length` bytes, whatever the frame says.

    Raises
    ------
    ValueError, RuntimeError
        The frame is damaged or longer than that. One that is shorter is padded with zeros: check what comes out.
    """
    from numcodecs.zstd import Zstd

    data = bytearray(length)
    Zstd().decode(frame, out=data)
    return bytes(data)
