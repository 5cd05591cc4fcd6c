"""Plans the base and the layers of each object; touches no file."""
