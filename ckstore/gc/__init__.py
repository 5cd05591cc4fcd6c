"""Garbage collection: frees the bytes that no version needs."""
