"""Writes versions: ingest, compact, thin, drop and rebase."""
