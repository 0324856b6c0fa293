"""Compares products on a CPU with other projects and with the machine's limits."""
