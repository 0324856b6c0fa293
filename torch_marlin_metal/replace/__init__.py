"""Reads the 4-bit layers of other packages from a model in memory."""
