"""Checksums: CRC-32C of stored chunks, CRC-32 of the members of zip files; both at memory speed where kernels run.

Verbs that read no tensor come here as well, so NumPy is imported where arrays are at hand anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Bytes from which a kernel is worth its call: the libraries take 20 and 6 GB a second.
_LARGE_32C, _LARGE_32 = 1 << 18, 1 << 15

#: What makes the libraries begin with a register of zeros: they complement it.
_ZEROS = 0xFFFFFFFF

#: The library's function for CRC-32C; None until it is first needed.
_extend: Callable[[int, Any], int] | None = None

#: The kernel that folds whole blocks, and the bytes of a block; None where no kernels are at hand.
_folding: tuple[Callable[[Any, int, Any, Any], None], int] | None = None

#: What the kernel folds by: for CRC-32C and for CRC-32.
_keys_32c: npt.NDArray[np.uint64]
_keys_32: npt.NDArray[np.uint64]


def crc32c(data: Any, start: int = 0) -> int:
    """CRC-32C (RFC 3720) of a C-contiguous buffer that follows bytes whose checksum is `start`."""
    extend = _extend or _load()
    if type(data) is bytes and len(data) < _LARGE_32C:
        return extend(start, data)
    import numpy as np

    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False  # the library takes only buffers that say they cannot change
    if _folding is not None and view.size >= _LARGE_32C:
        folded, view = _folded(view, start, _keys_32c)
        start = extend(_ZEROS, folded)
    return extend(start, view) if view.size else start


def crc32(data: Any, start: int = 0) -> int:
    """CRC-32 (that of zip and gzip) of a C-contiguous buffer that follows bytes whose checksum is `start`."""
    if _folding is None or memoryview(data).nbytes < _LARGE_32:
        return zlib.crc32(data, start)
    import numpy as np

    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False
    folded, view = _folded(view, start, _keys_32)
    return zlib.crc32(view, zlib.crc32(folded, _ZEROS))


def use_kernel() -> None:
    """Take large buffers by a kernel from now on, where the processor has what it needs; for who has loaded kernels."""
    global _folding, _keys_32c, _keys_32
    from ckstore.kernels.checksum import BLOCK, fold_blocks, folds, keys

    if _folding is None and folds():
        _keys_32c, _keys_32 = keys(0x11EDC6F41), keys(0x104C11DB7)
        _folding = fold_blocks, BLOCK


def _folded(
    view: npt.NDArray[np.uint8], start: int, keys: npt.NDArray[np.uint64]
) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """What the whole blocks of `view` are folded to, for a register of zeros; and the bytes behind them."""
    import numpy as np

    assert _folding is not None
    kernel, block = _folding
    folded = np.empty(8, np.uint64)
    kernel(view, start, keys, folded)
    return folded.tobytes(), view[view.size // block * block :]


def _load() -> Callable[[int, Any], int]:
    global _extend
    import google_crc32c

    found: Callable[[int, Any], int] = google_crc32c.extend
    _extend = found
    return found
