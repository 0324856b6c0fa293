"""Helpers that several tests share: fp64 references, small models, checkpoint writers, launches of kernels."""
