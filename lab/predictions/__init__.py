"""Prints what the model predicts."""
