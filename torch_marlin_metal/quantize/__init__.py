"""Quantizes one floating weight to 4 bit."""
