"""Measures products on a CPU beside other projects and the machine's limits."""
