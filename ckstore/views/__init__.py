"""Read-only Zarr hierarchies whose chunks are decoded on access."""
