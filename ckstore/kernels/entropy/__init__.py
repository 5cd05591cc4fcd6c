"""The kernels of the entropy coder, with a plain Python reference."""
