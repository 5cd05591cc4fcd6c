"""Arrays that a thread reuses: mapping new memory page by page costs more than its use."""

from __future__ import annotations

from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

#: Larger arrays are not kept, so that no thread holds much memory.
_LARGEST = 4 << 20

_held = local()


def scratch(name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return an uninitialised one-dimensional array, valid in this thread until its next call with the same name.

    The name is that of the use, unique in ckstore: concurrent uses of one name would overwrite each other.
    """
    wanted = np.dtype(dtype)
    nbytes = size * wanted.itemsize
    if nbytes > _LARGEST:
        return np.empty(size, wanted)
    buffers: dict[str, npt.NDArray[np.uint8]] = _held.__dict__
    buffer = buffers.get(name)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = buffers[name] = np.empty(max(nbytes, 4096), np.uint8)
    return buffer[:nbytes].view(wanted)
