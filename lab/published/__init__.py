"""Compares the model with published times of other projects' kernels on real Macs: `python -m lab.published`."""
