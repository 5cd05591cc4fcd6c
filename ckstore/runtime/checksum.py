"""Checksums, all from libraries: CRC-32 of what is ours and of zip members, CRC-32C where Zarr wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isal.isal_zlib import crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["crc32", "crc32c"]


def crc32c(data: Buffer, start: int = 0) -> int:
    """CRC-32C (RFC 3720) of a C-contiguous buffer that follows bytes whose checksum is `start`."""
    import google_crc32c
    import numpy as np

    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False  # the library takes only buffers that say they cannot change
    return int(google_crc32c.extend(start, view)) if view.size else start
