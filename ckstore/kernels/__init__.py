"""The numba loops, each beside a plain NumPy reference."""
