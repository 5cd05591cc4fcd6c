"""Keeps NumPy's linear algebra to the calling thread."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

_lock = Lock()


@cache
def _functions() -> tuple[Any, Any] | None:
    """Return the functions of NumPy's own OpenBLAS that read and set its number of threads; None without it."""
    for path in (Path(np.__file__).parents[1] / "numpy.libs").glob("*openblas*"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            return library.scipy_openblas_get_num_threads64_, library.scipy_openblas_set_num_threads64_
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in this block; blocks of several threads follow one another.

    Threads of OpenBLAS wait actively for one another: on busy cores they take ten times the time of a single one.
    """
    found = _functions()
    with _lock:
        if found is None:
            yield
            return
        count = found[0]()
        found[1](1)
        try:
            yield
        finally:
            found[1](count)
