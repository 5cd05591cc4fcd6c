"""File formats: parses every file into skeleton, extents and tensors, and writes it back."""

from ckstore.formats.layout import Unknown

__all__ = ["Unknown"]
