"""Frees what no version needs."""
