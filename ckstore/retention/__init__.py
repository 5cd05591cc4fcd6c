"""Applies retention policies: selects, forgets and encodes older versions."""
