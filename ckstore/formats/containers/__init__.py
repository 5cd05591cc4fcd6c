"""Containers of tensors, a module each, that do not know one another."""
