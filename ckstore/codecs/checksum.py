"""The checksum of stored chunks: CRC-32C, which processors compute at memory speed."""

from __future__ import annotations

from typing import Any

import numpy as np


def crc32c(data: Any, start: int = 0) -> int:
    """CRC-32C (RFC 3720) of a C-contiguous buffer that follows bytes whose checksum is `start`."""
    import google_crc32c

    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False  # the library takes only buffers that say they cannot change
    return int(google_crc32c.extend(start, view))
