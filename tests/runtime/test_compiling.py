"""Every private part of numba that ckstore uses exists; a release of numba that lacks one fails here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUTargetOptions
from numba.core.runtime import _nrt_python

from ckstore.kernels import compiled, lattice
from ckstore.runtime import compiling
from ckstore.runtime.blocks import fixed


def test_functions_may_leave_references_uncounted() -> None:
    assert hasattr(CPUTargetOptions, "_nrt")
    assert compiling.reference_counting(False) == {"_nrt": False}


def test_two_locks_are_held_while_something_is_compiled() -> None:
    first, second = compiling.compiler_locks()
    with global_compiler_lock:
        assert first._is_owned()
        assert not second._is_owned()


def test_dispatchers_ask_our_cache() -> None:
    assert isinstance(lattice.magnitude_top._cache, compiled.MachineCode)  # type: ignore[attr-defined]
    assert issubclass(compiled.MachineCode, caching._Cache)


def test_numba_has_a_runtime_whose_functions_are_known() -> None:
    used = {"Free", "MemInfo_alloc_aligned", "MemInfo_call_dtor", "adapt_ndarray_from_python"}
    assert used <= _nrt_python.c_helpers.keys()


def test_compiled_functions_cannot_call_kernels() -> None:
    """Their kept code has nothing to be linked with."""
    kernel = lattice.magnitude_top

    @numba.njit
    def caller(values: np.ndarray) -> int:
        return kernel(values, 0, 5)

    with pytest.raises((TypeError, numba.TypingError), match="only Python can"):
        caller(fixed(np.arange(9, dtype=np.uint32)))


def test_a_program_loads_some_code_and_compiles_other(tmp_path: Path) -> None:
    program = """
import numpy as np
from ckstore.codecs.integers import decode_integers, encode_integers
from ckstore.kernels.codebook import nearest
values = np.arange(9, dtype=np.int32)
out = np.empty_like(values)
decode_integers(encode_integers(values), out)
assert (out == values).all()
indices = np.empty(3, np.uint16)  # The store has no such indices, so no code came with the installation.
nearest(np.float32([0, 1, 2]).view(np.uint32), np.float64([0.5, 1.5, np.inf]), 0, indices)
print(indices)
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for kept in (0, 1):
        assert sum(path.name.startswith("codebook.nearest") for path in tmp_path.iterdir()) == kept
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == "[0 1 2]\n"
