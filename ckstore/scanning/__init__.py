"""Reads what is to be ingested: files, directories and state dicts."""
