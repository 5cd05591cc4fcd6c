"""Large pages for memory that is about to be filled: the kernel hands it out by 2 MiB instead of by 4 KiB.

Where every page of a restored checkpoint is new, handing pages out takes as long as decoding does. NumPy asks for
large pages by itself, torch does not.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

#: Less memory is not worth a system call.
_LEAST = 4 << 20

#: Between arrays that were asked for one after the other an allocator leaves at most so many bytes.
_GAP = 64 << 10

#: Linux 6.1 and later: make a large page of small ones that were handed out before.
_MADV_COLLAPSE = 25

#: Where Linux says how large a large page is.
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def use_large_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Let the pages of arrays be large ones, if the system has such; a hint, no promise.

    Best before anybody writes to them; who does so meanwhile waits for a moment, and what is written stays.

    Parameters
    ----------
    spans
        Address and bytes of each array. Those that lie next to each other share pages, however small they are, with
        what the allocator may put between them.
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
    """Ask for it between two addresses; before `starts` the allocator has taken its notes, on small pages."""
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
    """The C library's `madvise` and the size of a large page; None where there is no such thing."""
    try:
        size = int(_SIZE.read_text())
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError, ValueError):
        return None, 0
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function, size
