"""Bridges to other libraries, each of which imports its guest lazily."""
