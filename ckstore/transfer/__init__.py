"""Copies versions between stores."""
