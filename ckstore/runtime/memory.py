"""Shared memory, memory mapped before its use, large pages, and the amount of free memory.

For a restored checkpoint, whose pages are all new, mapping takes as long as decoding; large pages are mapped 2 MiB at a
time instead of 4 KiB. NumPy requests them itself, torch does not.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

#: Memory of an ingest in addition to the state: its buffers, and the process itself.
INGEST_BYTES = 256 << 20

#: Linux: use large pages.
_MADV_HUGEPAGE = 14
#: Linux 5.14 and later: map all pages now, without changing their contents.
_MADV_POPULATE_WRITE = 23
#: Linux 6.1 and later: merge mapped small pages into a large one.
_MADV_COLLAPSE = 25

#: File with the size of large pages on Linux.
_LARGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
#: Smallest memory that is worth a system call for large pages.
_LEAST = 4 << 20
#: Largest gap that an allocator leaves between consecutive arrays, in bytes.
_GAP = 64 << 10

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def nameless_file() -> int:
    """Return the descriptor of an empty anonymous file, which ends with its last descriptor or mapping."""
    if hasattr(os, "memfd_create"):
        descriptor: int = os.memfd_create("ckstore")
        return descriptor
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def populate(memory: mmap.mmap) -> None:
    """Map the pages of a mapping now, instead of one by one at the first write; a hint, without guarantee.

    Contents stay: others may write to them concurrently.
    """
    madvise = _madvise()
    if madvise is not None:
        start = ctypes.c_char.from_buffer(memory)
        madvise(ctypes.addressof(start), len(memory), _MADV_POPULATE_WRITE)


def use_large_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Ask the system for large pages under arrays, given as (address, bytes); a hint, without guarantee.

    Call it before the first write. Concurrent writers wait for a moment, and their data stays. Adjacent arrays of any
    size share pages, including the gaps that the allocator leaves between them.
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
    madvise, size = _madvise(), _large_page()
    if madvise is None or not size:
        return
    first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    last = last // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(first, last - first, _MADV_HUGEPAGE)
    for page in sorted({start // size * size for start in starts}):
        if first <= page and page + size <= last:
            madvise(page, size, _MADV_COLLAPSE)


def available() -> int | None:
    """Return the memory in bytes that this process may still take, by machine and control group; None if unknown.

    Reclaimable caches of the kernel count as free.
    """
    left = [found for found in (_free_of_machine(), _free_of_group()) if found is not None]
    return min(left, default=None)


def _free_of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _free_of_group() -> int | None:
    """Return the free memory of the process's control group; a container sees its own as the topmost one."""
    try:
        lines = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in lines:
        if controllers in ("", "memory"):
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            for group in (_GROUPS / controllers / path.lstrip("/"), _GROUPS / controllers):
                try:
                    limit, used = (int((group / name).read_text()) for name in names)
                    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                    return limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                except (OSError, ValueError):
                    continue
    return None


@cache
def _madvise() -> Any:
    """Return the C library's `madvise`; None if unsupported."""
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


@cache
def _large_page() -> int:
    """Return the size of a large page; 0 if unsupported."""
    try:
        return int(_LARGE_PAGE.read_text())
    except (OSError, ValueError):
        return 0
