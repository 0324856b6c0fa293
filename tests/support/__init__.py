"""Helpers shared by tests: fp64 references, small models and layers, checkpoint writers, launches of single kernels."""
