"""Encodes one object: estimates the ways to store it, and makes the layers of the chosen one."""
