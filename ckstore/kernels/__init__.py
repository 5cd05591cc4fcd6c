"""The numba loops, each beside a plain NumPy reference."""

from ckstore.runtime.compiling import listen

listen()
