"""The kernels: loops over the elements of chunks, compiled when ckstore is installed."""
