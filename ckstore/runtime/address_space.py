"""The limit on address space (`ulimit -v`): if it is too small, a library may end the whole process."""

from __future__ import annotations

from ckstore.errors import CkstoreError
from ckstore.runtime.threads import worker_count

#: Bytes for Python and NumPy; and for each thread (stack and heap).
_LIBRARIES, _THREAD = 512 << 20, 72 << 20


def limit() -> int | None:
    """Return the limit of the process's address space in bytes; None if there is none, or it is unknown."""
    try:
        import resource

        soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    except (ImportError, AttributeError, OSError):
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def check() -> None:
    """Raise `CkstoreError` if the limit is too small for computations."""
    allowed = limit()
    if allowed is not None and allowed < _LIBRARIES + _THREAD * worker_count():
        raise CkstoreError(too_little(allowed))


def too_little(allowed: int) -> str:
    """Return the error sentence for a process with too little address space."""
    return f"A limit of {allowed >> 20:,} MiB of address space is too little; raise it (`ulimit -v`) to 2 GiB or more."
