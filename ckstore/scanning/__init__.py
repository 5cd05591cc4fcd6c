"""Reads the inputs of an ingest: files, directories and state dicts."""
