"""Stores checkpoints one by one, in batches, and as they appear in directories."""
