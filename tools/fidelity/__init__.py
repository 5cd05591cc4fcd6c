"""The bench that judges coarse versions: their sizes, and their effects on training."""
