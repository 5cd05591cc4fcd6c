"""Encodes objects: estimates the ways to store each, and makes the layers of the chosen one."""
