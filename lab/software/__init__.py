"""Counts what kernels and host do on the software Metal device."""
