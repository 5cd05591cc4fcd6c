"""Keeps directories at the newest version of a run: followers of a store."""
