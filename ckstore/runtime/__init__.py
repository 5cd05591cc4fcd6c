"""Threads, memory, the garbage collector, checksums, and the records of zip files."""
