"""Quantizes weights to 4, 5, 6 or 8 bits, and selects formats by size and error."""
