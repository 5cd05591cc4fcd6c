"""The numba kernels, each with a plain NumPy reference."""

from ckstore.kernels.kept import keep
from ckstore.runtime.address_space import check
from ckstore.runtime.compiling import listen

check()
listen()
keep()
