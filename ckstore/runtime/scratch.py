"""Arrays that a thread uses again and again: fresh memory costs more than what is done with it, page by page."""

from __future__ import annotations

from threading import local
from typing import Any

import numpy as np
import numpy.typing as npt

#: Larger arrays are made anew: nothing keeps much memory for good.
_LARGEST = 4 << 20

_held = local()


def scratch(name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An uninitialised one-dimensional array, this thread's own until it asks for the same name again.

    Parameters
    ----------
    name
        What it is for, unique in ckstore: two uses of one name at a time would write over each other.
    size
        In elements.
    dtype
        Of the elements.
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
