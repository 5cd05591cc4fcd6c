"""Commits a change of packs, log and catalog as one."""
