"""Threads, memory, the garbage collector and checksums: what ckstore asks of the machine."""
