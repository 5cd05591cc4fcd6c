"""torch files, zip and legacy, read without executing a pickle."""
