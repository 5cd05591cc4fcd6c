"""What ckstore uses of numba that is not public: all of it here, each with what is lost where numba has it no more.

`tests/runtime/test_numba_hooks.py` fails when a release of numba lacks one. Numba is imported inside the functions.
"""

from __future__ import annotations

import sys
from typing import Any


def without_linear_algebra() -> None:
    """Let numba find no SciPy when it looks for linear algebra, which no kernel needs; to be called before its import.

    For a process that is ours alone. Lost without it: a tenth of a second at the start of the command line.
    """
    sys.modules.setdefault("scipy.linalg.cython_blas", None)  # type: ignore[arg-type]


def reference_counting(counted: bool) -> dict[str, bool]:
    """The option that has a compiled function count references to arrays, or not; none where numba has no such option.

    Lost without it: entropy coding of sparse chunks takes up to twice as long.
    """
    from numba.core.cpu import CPUTargetOptions

    return {"_nrt": counted} if hasattr(CPUTargetOptions, "_nrt") else {}


def keep_for(compiled: Any, stamp: str) -> None:
    """Let what is kept on disk of a compiled function be valid as long as `stamp` is the same.

    Lost without it: numba looks at the function's own module alone, and after an update of another one runs old code.
    """
    kept: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if hasattr(kept, "_source_stamp"):
        kept._source_stamp = stamp


def compiler_locks() -> list[Any]:
    """The locks that are held while something is compiled: the compiler's, and LLVM's.

    Lost without it: a process that is forked while another thread compiles waits for the compiler for ever.
    """
    from llvmlite.binding import ffi
    from numba.core.compiler_lock import global_compiler_lock

    holders: list[Any] = [global_compiler_lock, getattr(ffi.lib, "_lock", None)]
    return [holder._lock for holder in holders if hasattr(holder, "_lock")]


def ask_first(locator: Any) -> None:
    """Have numba ask a class first where compiled functions are kept (`numba.core.caching.CacheImpl`).

    Lost without it: installations that are read-only, and homes that cannot be written to.
    """
    from numba.core import caching

    caching.CacheImpl._locator_classes.insert(0, locator)
