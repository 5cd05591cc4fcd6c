"""Large pages for memory that is about to be filled: the kernel maps 2 MiB at a time instead of 4 KiB.

For a restored checkpoint, whose pages are all new, mapping takes as long as decoding. NumPy requests large pages
itself, torch does not.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

#: Smallest memory that is worth a system call.
_LEAST = 4 << 20

#: Largest gap that an allocator leaves between consecutive arrays, in bytes.
_GAP = 64 << 10

#: Linux 6.1 and later: merge mapped small pages into a large one.
_MADV_COLLAPSE = 25

#: File with the size of large pages on Linux.
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def use_large_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Ask the system for large pages under arrays; a hint, without guarantee.

    Call it before the first write. Concurrent writers wait for a moment, and their data stays.

    Parameters
    ----------
    spans
        Address and bytes of each array. Adjacent arrays of any size share pages, including the gaps that the allocator
        leaves between them.
    """
    ranges: list[tuple[int, int, list[int]]] = []
    for address, nbytes in sorted(spans):
        first, last, starts = ranges.pop() if ranges and address - ranges[-1][1] <= _GAP else (address, address, [])
        starts.append(address)
        ranges.append((first, max(last, address + nbytes), starts))
    for first, last, starts in ranges:
        if last - first >= _LEAST:
            _advise(first, last, starts)


def _advise(first: int, last: int, starts: list[int]) -> None:
    """Request large pages between two addresses; the small pages before `starts` contain the allocator's headers."""
    madvise, size = _madvise()
    if madvise is None:
        return
    first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    last = last // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(first, last - first, mmap.MADV_HUGEPAGE)
    for page in sorted({start // size * size for start in starts}):
        if first <= page and page + size <= last:
            madvise(page, size, _MADV_COLLAPSE)


@cache
def _madvise() -> tuple[Any, int]:
    """Return the C library's `madvise` and the size of a large page; None if unsupported."""
    try:
        size = int(_SIZE.read_text())
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, ValueError):
        return None, 0
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function, size
