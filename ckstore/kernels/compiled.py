"""The decorator of what Python calls: compiled once, kept on disk, and compiled again when any kernel has changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from numba import njit

from ckstore.runtime.numba_hooks import keep_for

Function = TypeVar("Function", bound=Callable[..., Any])


class Decorator(Protocol):
    """What compiles a function and, to the type checker, leaves it as it is."""

    def __call__(self, function: Function, /) -> Function:
        """Compile `function` when it is first called."""
        ...


_compile: Decorator = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy", no_cfunc_wrapper=True)


def kernel(function: Function) -> Function:
    """Compile a function when it is first called, to machine code that runs without the GIL and is kept on disk.

    Numba takes what it kept for valid as long as the function's own module does not change. Kernels contain code and
    constants of other modules of this package: an update of one of those alone would run old code on arrays that are
    made for the new one. So what is kept counts for the sources of all kernels.
    """
    compiled = _compile(function)
    keep_for(compiled, _sources())
    return compiled


@cache
def _sources() -> str:
    """SHA-256 of the sources of all kernels, by name."""
    digest = sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
