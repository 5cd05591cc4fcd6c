"""Plans the base of each object; touches no file."""
