"""All private parts of numba that ckstore uses, each with the loss if numba drops it.

`tests/runtime/test_numba_hooks.py` fails when a release of numba lacks one. Numba is imported inside the functions.
"""

from __future__ import annotations

import sys
from typing import Any


def without_linear_algebra() -> None:
    """Hide SciPy from numba, which looks for linear algebra that no kernel needs; call before the import of numba.

    Only for a process of ckstore's own. Loss without it: a tenth of a second at the start of the command line.
    """
    sys.modules.setdefault("scipy.linalg.cython_blas", None)  # type: ignore[arg-type]


def reference_counting(counted: bool) -> dict[str, bool]:
    """Return the option that switches a compiled function's reference counting of arrays; empty if numba has none.

    Loss without it: entropy coding of sparse chunks takes up to twice as long.
    """
    from numba.core.cpu import CPUTargetOptions

    return {"_nrt": counted} if hasattr(CPUTargetOptions, "_nrt") else {}


def keep_for(compiled: Any, stamp: str) -> None:
    """Make a compiled function's cache on disk valid as long as `stamp` is the same.

    Loss without it: numba checks only the function's own module, and runs old code after an update of another one.
    """
    kept: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):
        kept._source_stamp = stamp


def compiler_locks() -> list[Any]:
    """Return the locks that are held during a compilation: the compiler's, and LLVM's.

    Loss without it: a process forked while another thread compiles waits for the compiler forever.
    """
    from llvmlite.binding import ffi
    from numba.core.compiler_lock import global_compiler_lock

    holders: list[Any] = [global_compiler_lock, getattr(ffi.lib, "_lock", None)]
    return [holder._lock for holder in holders if hasattr(holder, "_lock")]


def ask_first(locator: Any) -> None:
    """Make numba ask a class first for the place of compiled functions (`numba.core.caching.CacheImpl`).

    Loss without it: read-only installations and homes cannot be used.
    """
    from numba.core import caching

    caching.CacheImpl._locator_classes.insert(0, locator)
