"""Reports compilations of kernels, and all private parts of numba that ckstore uses, each with the loss without it.

The first compilation takes seconds, and users want to know why. `ckstore.kernels.compiled` keeps the code for later
processes. `tests/runtime/test_compiling.py` fails when a release of numba lacks a part. Numba is imported inside the
functions.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from ckstore.runtime.address_space import check_before_compiling

#: Argument of the process that compiles on a second core: the work of the process that it helps.
READS, STORES = "reads", "stores"

MESSAGE = "compiling kernels for their first use, once: this takes half a minute, and more on a busy machine."


def _warn(message: str) -> None:
    """Log a warning for callers from Python: a program without a handler prints warnings on stderr."""
    import logging

    logging.getLogger("ckstore").warning(message)


_begin: Callable[[str], None] | None = _warn
_message = MESSAGE
_spent = 0.0


def spent() -> float:
    """Return the seconds that this process has spent on compilations."""
    return _spent


def on_first(begin: Callable[[str], None] | None) -> None:
    """Call `begin` once, with a sentence for the user, at the first compilation; None calls nothing."""
    global _begin
    _begin = begin


def kept_in_passing(place: str) -> None:
    """Make the sentence say that compiled code is stored in a temporary directory."""
    global _message
    _message = (
        f"compiling kernels into {place}, where they may not last: no other directory is writable; "
        "set NUMBA_CACHE_DIR to a writable directory, and run `ckstore warm-up`."
    )


def listen() -> None:
    """Start reporting compilations; the package of kernels calls this when it is imported.

    The garbage collector pauses during a compilation: nearly all objects of the compiler stay in use until its end, and
    collections would take a tenth of its time.
    """
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        """Called by one thread at a time, which holds the compiler's lock; compilations may be nested."""

        def __init__(self) -> None:
            self._collected: list[bool] = []
            self._since = 0.0

        def on_start(self, event: event.Event) -> None:
            global _begin
            begin, _begin = _begin, None
            if begin is not None:
                begin(_message)
            if not self._collected:
                self._since = time.perf_counter()
            self._collected.append(gc.isenabled())
            gc.disable()
            check_before_compiling()

        def on_end(self, event: event.Event) -> None:
            global _spent
            if self._collected.pop():
                gc.enable()
            if not self._collected:
                _spent += time.perf_counter() - self._since

    event.register("numba:compile", Listener())


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
