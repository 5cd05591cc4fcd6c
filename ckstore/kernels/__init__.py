"""The numba loops, each beside a plain NumPy reference."""

from ckstore.kernels.kept import keep
from ckstore.runtime.compiling import listen

listen()
keep()
