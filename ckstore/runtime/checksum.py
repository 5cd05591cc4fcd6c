"""Checksums, all from libraries: CRC-32 for our formats and zip members, CRC-32C for Zarr."""

from __future__ import annotations

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["crc32", "crc32_combine", "crc32c"]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (RFC 3720)."""
    import google_crc32c

    return int(google_crc32c.value(data))
