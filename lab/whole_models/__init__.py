"""Measures whole models on a CPU."""
