"""Predicts times of other projects' kernels for few rows, and compares them with ours."""
