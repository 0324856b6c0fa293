"""Reads and writes checkpoints with packed layers. Public as `torch_marlin_metal.convert`."""
