"""Counts the operations of a decoded token, and predicts its time on Apple's GPUs: `python -m lab.token MODEL`."""
