"""Large pages for memory that is about to be filled: the kernel hands it out by 2 MiB instead of by 4 KiB.

Where every page of a restored checkpoint is new, handing pages out takes as long as decoding does. NumPy asks for
large pages by itself, torch does not.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

#: Less memory is not worth a system call.
_LEAST = 4 << 20


def use_large_pages(address: int, nbytes: int) -> None:
    """Let the pages that lie wholly within some memory be large ones, if the system has such; a hint, no promise."""
    if nbytes < _LEAST:
        return
    advise = _advise()
    if advise is not None:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(first, last - first, mmap.MADV_HUGEPAGE)


@cache
def _advise() -> Any:
    """The C library's `madvise`; None where there is none, or no large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
