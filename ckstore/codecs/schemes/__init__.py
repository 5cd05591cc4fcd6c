"""The published schemes, as their papers define them."""
