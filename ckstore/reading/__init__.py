"""One stored version, chunk by chunk: into memory, files and other formats."""
