"""The bench that judges coarse versions: what they take, and what training notices of them."""
