"""The entropy coder's loops, beside a plain reference."""
