"""Threads, memory, the garbage collector and checksums."""
