"""Reports compilations of kernels, and uses private parts of numba, each with the loss without it.

`tests/runtime/test_compiling.py` fails when a release of numba lacks a part. Numba is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckstore.runtime.address_space import check_before_compiling

MESSAGE = "compiling kernels, once: no machine code came with this installation for this processor or release of numba."


def _warn(message: str) -> None:
    """Log a warning for callers from Python: a program without a handler prints warnings on stderr."""
    import logging

    logging.getLogger("ckstore").warning(message)


_begin: Callable[[str], None] | None = _warn


def on_first(begin: Callable[[str], None] | None) -> None:
    """Call `begin` once, with a sentence for the user, at the first compilation; None calls nothing."""
    global _begin
    _begin = begin


def announce() -> None:
    """Report the first compilation of this process; raise `CkstoreError` if the compiler lacks address space."""
    begin = _begin
    on_first(None)
    if begin is not None:
        begin(MESSAGE)
    check_before_compiling()


def start_runtime(target: Any) -> None:
    """Register the functions of numba's runtime that machine code calls; numba compiles others before it compiles.

    Loss without it: numba's parts that only compile, and SciPy, are imported at the first call of a kernel, in a third
    of a second.
    """
    try:
        from llvmlite.binding import add_symbol
        from numba.core.runtime import _nrt_python
    except ImportError:
        target.refresh()
    else:
        for name, address in _nrt_python.c_helpers.items():
            add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


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
