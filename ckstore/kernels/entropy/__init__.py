"""The kernels of the entropy coder."""
