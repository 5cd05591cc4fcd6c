"""Checks a store: verifies its bytes and accounts for them."""
