"""Encodes objects: estimates the ways to store each, and encodes it in the chosen one."""
