"""Reads the 4-bit layers of other packages out of a model in memory."""
