"""The numba loops, each beside a plain NumPy reference."""

from ckstore.compiling import listen

listen()
