"""The checksum of stored chunks: CRC-32C, which processors compute at memory speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Bytes from which a kernel is worth its call.
_LARGE = 1 << 18

#: The library's function; None until it is first needed.
_extend: Callable[[int, Any], int] | None = None

#: CRC-32C of the whole blocks of a large buffer, and the bytes of a block; None where no kernels are at hand.
_of_blocks: tuple[Callable[[Any, int], int], int] | None = None


def crc32c(data: Any, start: int = 0) -> int:
    """CRC-32C (RFC 3720) of a C-contiguous buffer that follows bytes whose checksum is `start`."""
    extend = _extend or _load()
    if type(data) is bytes and len(data) < _LARGE:
        return extend(start, data)
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False  # the library takes only buffers that say they cannot change
    if _of_blocks is not None and view.size >= _LARGE:
        kernel, block = _of_blocks
        start = kernel(view, start)
        view = view[view.size // block * block :]
    return extend(start, view) if view.size else start


def _load() -> Callable[[int, Any], int]:
    global _extend
    import google_crc32c

    found: Callable[[int, Any], int] = google_crc32c.extend
    _extend = found
    return found


def use_kernel() -> None:
    """Take large buffers by a kernel from now on, where the processor has what it needs; for who has loaded kernels."""
    global _of_blocks
    from ckstore.kernels.checksum import BLOCK, crc32c_of_blocks, folds

    if _of_blocks is None and folds():
        _of_blocks = crc32c_of_blocks, BLOCK
