"""Reads the sources of an ingest: files, directories and state dicts."""
