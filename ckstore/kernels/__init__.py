"""The numba kernels."""

import numba  # noqa: F401  # The whole package first: imports of its parts do not wait for another thread's import.

from ckstore.runtime.address_space import check
from ckstore.runtime.compiling import compiler_locks
from ckstore.runtime.forks import wait_for

check()
for lock in compiler_locks():
    wait_for(lock)
