"""Shared memory, memory mapped before its use, and the amount of free memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

#: Linux 5.14 and later: map all pages now, without changing their contents.
_MADV_POPULATE_WRITE = 23

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def nameless_file() -> int:
    """Return the descriptor of an empty anonymous file, which ends with its last descriptor or mapping."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckstore", os.MFD_CLOEXEC)
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
