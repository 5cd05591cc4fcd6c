"""What is to be ingested, read once."""
