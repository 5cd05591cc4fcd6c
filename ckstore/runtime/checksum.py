"""Checksums, all from libraries: CRC-32 of what is ours and of zip members, CRC-32C where Zarr wants it."""

from __future__ import annotations

from isal.isal_zlib import crc32

__all__ = ["crc32", "crc32c"]


def crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720)."""
    import google_crc32c

    return int(google_crc32c.value(data))
