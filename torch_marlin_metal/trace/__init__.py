"""Counts the operations of a decoded token, and predicts the token's time on Apple's GPUs."""
