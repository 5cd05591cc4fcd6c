"""What a limit on address space (`ulimit -v`) leaves: where it is too little for LLVM, that ends the whole process."""

from __future__ import annotations

import os
from pathlib import Path

from ckstore.errors import CkstoreError
from ckstore.runtime.threads import worker_count

#: Bytes that Python, NumPy and the compiler take, those of each thread (stack and heap), and those of compiling.
_LIBRARIES, _THREAD, _COMPILING = 512 << 20, 72 << 20, 96 << 20


def limit() -> int | None:
    """Bytes of address space that the process may have; None where there is no limit, or nothing says."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, AttributeError, OSError):
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def check() -> None:
    """Raise `CkstoreError` where the limit is too little for anything that computes."""
    allowed = limit()
    if allowed is not None and allowed < _LIBRARIES + _THREAD * worker_count():
        raise CkstoreError(too_little(allowed))


def check_before_compiling() -> None:
    """Raise `CkstoreError` where what is left is too little for the compiler."""
    allowed = limit()
    if allowed is None:
        return
    try:
        used = int(Path("/proc/self/statm").read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return
    if allowed - used < _COMPILING:
        raise CkstoreError(too_little(allowed))


def too_little(allowed: int) -> str:
    """The sentence for a process that may have no more address space than it needs."""
    return f"A limit of {allowed >> 20:,} MiB of address space is too little; raise it (`ulimit -v`) to 2 GiB or more."
