"""The numba kernels."""

import numba  # noqa: F401  # The whole package first: imports of its parts do not wait for another thread's import.

from ckstore.kernels.compiled import Kept
from ckstore.runtime.address_space import check
from ckstore.runtime.compiling import ask_first, compiler_locks, listen
from ckstore.runtime.forks import wait_for

check()
listen()
ask_first(Kept)
for lock in compiler_locks():
    wait_for(lock)
