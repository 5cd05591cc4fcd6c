"""Writes versions: ingest, encode, thin, drop and rebase."""
