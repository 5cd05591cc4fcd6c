"""What the machine is asked for: threads, memory, the garbage collector, checksums."""
