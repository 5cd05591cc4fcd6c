"""Which base, which layers, when to rebase: planning that touches no file."""
