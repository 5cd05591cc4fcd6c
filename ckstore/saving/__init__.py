"""Saves state dicts from a separate process while the training continues."""
