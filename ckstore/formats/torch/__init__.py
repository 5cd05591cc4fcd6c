"""Files of torch, zip and legacy, read without executing a pickle."""
