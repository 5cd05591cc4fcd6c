"""Every private part of numba that ckstore uses exists; a release of numba that lacks one fails here."""

from __future__ import annotations

from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock
from numba.core.cpu import CPUTargetOptions
from numba.core.runtime import rtsys

from ckstore.kernels import compiled, lattice
from ckstore.runtime import compiling


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


def test_numba_has_a_runtime_that_can_be_started() -> None:
    assert callable(rtsys.initialize)
