"""Counts what kernels and host code do on the software Metal device."""
