"""The kernels: loops over the elements of chunks, compiled when ckstore is installed."""

from ckstore.runtime.address_space import check
from ckstore.runtime.collector import collection_seldom
from ckstore.runtime.compiling import compiler_locks
from ckstore.runtime.forks import wait_for

with collection_seldom():
    import numba  # noqa: F401  # The whole package: imports of its parts do not wait for other threads'.

check()
for lock in compiler_locks():
    wait_for(lock)
