"""Saves state dicts from a process of its own, while the training goes on."""
