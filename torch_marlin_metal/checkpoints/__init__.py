"""Reads and writes 4-bit checkpoints. Public as `torch_marlin_metal.convert`."""
