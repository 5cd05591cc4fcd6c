"""Codecs: lattices, tokens and entropy coding, as pure functions of arrays."""
