"""The decorator of kernels that Python calls: compiled once, cached on disk until a kernel changes."""

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
    """A decorator that compiles a function and, to the type checker, keeps its type."""

    def __call__(self, function: Function, /) -> Function:
        """Compile `function` at its first call."""
        ...


_compile: Decorator = njit(cache=True, nogil=True, boundscheck=False, error_model="numpy", no_cfunc_wrapper=True)


def kernel(function: Function) -> Function:
    """Compile a function at its first call, to machine code that runs without the GIL and is cached on disk.

    Numba takes cached code as valid while the function's own module does not change. Kernels contain code and constants
    of other modules of this package: after an update of one of those alone, old code would run on arrays made for the
    new one. So the cache's key covers the sources of all kernels.
    """
    compiled = _compile(function)
    keep_for(compiled, _sources())
    return compiled


@cache
def _sources() -> str:
    """Return the SHA-256 of the sources of all kernels, by name."""
    digest = sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
