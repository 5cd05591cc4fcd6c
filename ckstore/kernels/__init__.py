"""The numba kernels, each with a plain NumPy reference."""

from ckstore.kernels.kept import keep
from ckstore.runtime.address_space import check
from ckstore.runtime.compiling import listen
from ckstore.runtime.forks import wait_for
from ckstore.runtime.numba_hooks import compiler_locks

check()
listen()
keep()
for lock in compiler_locks():
    wait_for(lock)
