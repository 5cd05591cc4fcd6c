"""The shared library of the kernels, which the build compiles: functions for this processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
"""Any array; the docstrings name its dtype."""

PATH = Path(__file__).with_name("libkernels.so.1")

LEVELS = ("baseline", "avx2", "avx512")
"""Levels of processors, the lowest first; all return the same bytes."""

try:
    _library = ctypes.CDLL(str(PATH))
except OSError as error:
    raise ImportError(f"{error}: install ckstore again, or run `python -m tools.compile_kernels`.") from None

level = LEVELS[_library.start_kernels(ctypes.c_ssize_t(object.__basicsize__))]
"""The level of this processor."""

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_ssize_t}


def function(name: str, parameters: str) -> Callable[..., int]:
    """Return a function of `kernels.h`, by the types of its parameters: p an address or an array's id, i an integer.

    It runs without the GIL; the caller keeps the arrays alive.
    """
    found: Any = _library[f"{name}_{level}"]
    found.argtypes = [_KINDS[letter] for letter in parameters]
    found.restype = ctypes.c_ssize_t
    result: Callable[..., int] = found
    return result


def check(status: int) -> int:
    """Return the status of a kernel; raise `ValueError` for arrays of the wrong types or sizes."""
    if status == _MISFIT:
        raise ValueError("The types or sizes of a kernel's arrays do not fit.")
    return status


_MISFIT = -2

_copy_past_caches = function("copy_past_caches", "pp")


def copy_past_caches(data: Array, out: Array) -> None:
    """Copy bytes, uint8 (n), to memory that this processor does not read soon."""
    check(_copy_past_caches(id(data), id(out)))
