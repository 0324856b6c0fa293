"""Counts the instructions of the kernels with the compiler of `lab/agx/`."""
