"""The entropy coder's loops, with a plain reference."""
