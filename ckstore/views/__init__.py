"""Read-only Zarr hierarchies whose chunks are decoded when they are read."""
