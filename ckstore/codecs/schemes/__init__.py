"""The published schemes, as their papers have them."""
